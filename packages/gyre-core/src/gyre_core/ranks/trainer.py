"""The trainer protocol over rank processes: the cell's side, light and the same for every library.

Invariants are the protocol's (`gyre_core.trainer`): a micro-batch counts once; sums are divided once; a satellite never
steps; files appear whole or not at all. A rank that dies or hangs becomes one InfrastructureError. After that a
satellite starts new ranks with its next command, from the weights it had; a core has lost its optimizer's state and
says so until it is restored. Not here: what a rank computes (`replica`) and how it is reached (`group`).
"""

from __future__ import annotations

import array
import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gyre_core.engine import WeightSource
from gyre_core.errors import CapabilityError, ConfigError, InfrastructureError
from gyre_core.facts import ModelFacts
from gyre_core.ranks import files
from gyre_core.ranks.atrest import make_state_file, make_weight_files, open_checkpoint
from gyre_core.ranks.group import RankGroup, RankPlan, Reply
from gyre_core.ranks.ledger import OpenContribution, StepSum, Suspect, merge_metrics, read_suspects
from gyre_core.ranks.options import RankTrainerOptions
from gyre_core.ranks.replica import MASTER, MOMENTS
from gyre_core.ranks.tensorfile import Entry, create
from gyre_core.ranks.versions import Order, PlainVersions, Versions, give, take
from gyre_core.trainer import BatchStats, Contribution, MicroBatch, StepResult, TrainerCapability

log = logging.getLogger("gyre.ranks")
T = TypeVar("T")
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


class RankTrainer:
    """`gyre_core.Trainer` whose model lives in rank processes.

    `timings` has the seconds of the last call of each kind, `published_bytes` what the last `publish` wrote; `facts`
    what the ranks told of their model at start.
    """

    def __init__(
        self, options: RankTrainerOptions, plan: RankPlan, device: str, versions: Versions | None = None
    ) -> None:
        if versions is None and options.publish != "disk":
            raise ConfigError(
                f"making the trainer {plan.name}", got=f"publish = {options.publish!r}", expected="disk",
                fix="This trainer brings no gyre-weights.",
            )  # fmt: skip
        self.options = options
        self.plan = plan
        self.timings: dict[str, float] = {}
        self.published_bytes = 0
        self.facts: ModelFacts | None = None
        self._rebuild = options.offload == "rebuild" or (options.offload == "auto" and device != "cpu")
        self._versions: Versions = versions or PlainVersions()
        self._group: RankGroup | None = None
        self._source: WeightSource | None = None
        self._version = -1
        self._core = self._started = self._closed = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open = OpenContribution()
        self._sum: StepSum | None = None
        self._steps = 0
        self._turn = asyncio.Lock()

    # The protocol's plain answers

    @property
    def capabilities(self) -> frozenset[TrainerCapability]:
        """What it offers; router replay is known when its ranks have made the model."""
        replays = self.facts is not None and self.facts.router_replay
        return frozenset({TrainerCapability.OFFLOAD} | ({TrainerCapability.ROUTER_REPLAY} if replays else set()))

    @property
    def version(self) -> int:
        """Policy version of its weights; -1 before the first load."""
        return self._version

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that are running now."""
        return self._group.pids if self._group is not None and self._group.alive else []

    # Life

    async def prepare(self, source: WeightSource) -> None:
        """Start the ranks and import their libraries; no weights, no accelerator memory."""

        async def work() -> None:
            await self._ranks()
            await self._ask("import", {"folder": source.location}, timeout=self.options.start_timeout_s)

        await self._run("prepare", work)

    async def start(self, source: WeightSource, *, core: bool) -> None:
        """Start the ranks, make the model, load weights; with `core` also make the optimizer."""
        if self._started:
            raise InfrastructureError(f"starting the trainer {self.plan.name}", got="a second start", expected="one")

        async def work() -> None:
            self._core, self._source = core, source
            await self._ranks()
            await self._build(source)
            self._sum = StepSum() if core else None
            self._started = True
            self._version = source.version

        await self._run("start", work)

    async def close(self) -> None:
        """End the ranks for good."""
        self._closed = True
        if self._group is not None:
            await self._group.close()
        await asyncio.to_thread(self._versions.close)

    async def _ranks(self) -> None:
        """Have living ranks."""
        if self._closed:
            raise InfrastructureError(f"using the trainer {self.plan.name}", got="one that was closed")
        if self._group is None or not self._group.alive:
            group = RankGroup(self.plan)
            self._group = group
            try:
                await group.start(self.options.start_timeout_s)
            except BaseException:
                await group.close()
                raise

    async def _build(self, source: WeightSource) -> None:
        """Model and weights in ranks that have none."""
        args = {"folder": source.location, "core": self._core}
        told = await self._ask("build", args, timeout=self.options.start_timeout_s)
        self._shapes = {name: tuple(shape) for name, shape in told[0].values["parameters"]}
        self.facts = ModelFacts(**told[0].values["facts"])
        await take(self._versions, self._shapes, source, self._values)

    async def _usable(self, doing: str) -> None:
        """Living ranks with a model, or the error that says why there are none."""
        if self._closed or not self._started or self._source is None:
            raise InfrastructureError(doing, got=f"a trainer {self.plan.name} that is not started", expected="start")
        if self._group is not None and self._group.alive:
            return
        self._open = OpenContribution()
        if self._core:
            raise InfrastructureError(
                doing, got="a core whose ranks are gone, and the optimizer's state with them",
                fix="Restore it from its last checkpoint (`gyre resume`).",
            )  # fmt: skip
        log.warning("%s: new ranks for the trainer %s, from version %d", doing, self.plan.name, self._source.version)
        self._version = -1
        await self._ranks()
        await self._build(self._source)
        self._version = self._source.version

    # Running

    async def _run(self, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """One call at a time, timed; a caller who goes away does not leave half a command behind."""

        async def timed() -> T:
            async with self._turn:
                began = time.perf_counter()
                result = await work()
                self.timings[what] = time.perf_counter() - began
                return result

        return await asyncio.shield(asyncio.ensure_future(timed()))

    async def _ask(
        self, op: str, args: dict[str, Any] | None = None, payload: bytes = b"", timeout: float | None = None
    ) -> list[Reply]:
        assert self._group is not None
        return await self._group.call(op, args, payload, timeout=timeout or self.options.timeout_s)

    async def _values(self, op: str, args: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [reply.values for reply in await self._ask(op, dict(args))]

    async def _loading(self, op: str, args: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if op == "load":
            self._version = -1
        return await self._values(op, args)

    def _as_core(self, doing: str) -> StepSum:
        if self._sum is None:
            raise CapabilityError(doing, got="a satellite (or a trainer not started)", expected="the core")
        return self._sum

    # Gradients

    async def load_weights(self, source: WeightSource) -> None:
        """Satellite: take another version's weights; drops gradients not exported. CapabilityError on the core. After
        an error its weights are of the version before, or, half loaded, of none: -1."""
        if self._core:
            raise CapabilityError(
                f"loading policy version {source.version} into the core", got="a weight source",
                expected="restore, which brings the optimizer's state as well",
            )  # fmt: skip

        async def work() -> None:
            await self._usable(f"loading policy version {source.version}")
            try:
                await take(self._versions, self._shapes, source, self._loading)
            except InfrastructureError:
                if not self.pids:  # new ones begin with what was loaded last
                    self._version = self._origin.version
                raise
            self._source, self._version, self._open = source, source.version, OpenContribution()

        await self._run("load_weights", work)

    async def logprobs(self, batch: MicroBatch) -> Sequence[float]:
        """One value a loss entry of the batch, in its order: each sampled token, once for each execution sharing it."""

        async def work() -> Sequence[float]:
            await self._usable(f"computing logprobs of micro-batch {batch.id!r}")
            replies = await self._ask("logprobs", payload=batch.blob)
            data = next(reply.payload for reply in replies if reply.values["has"])
            return list(array.array("f", data))

        return await self._run("logprobs", work)

    async def accumulate(self, batch: MicroBatch) -> BatchStats:
        """Add the batch's summed gradient to the open contribution."""

        async def work() -> BatchStats:
            self._open.check(batch)
            lost = bool(self._open.batches) and not (self._group is not None and self._group.alive)
            await self._usable(f"accumulating micro-batch {batch.id!r}")
            if lost:
                raise InfrastructureError(
                    f"accumulating micro-batch {batch.id!r}", got="ranks that died with the open contribution",
                    fix="Its micro-batches return to the ledger.",
                )  # fmt: skip
            began = time.perf_counter()
            replies = [reply.values for reply in await self._ask("accumulate", payload=batch.blob)]
            metrics: dict[str, float] = {}
            for reply in replies:
                metrics = merge_metrics(metrics, reply["metrics"])
            stats = BatchStats(
                sum(reply["loss"] for reply in replies), batch.tokens, sum(reply["trained"] for reply in replies),
                time.perf_counter() - began, metrics,
            )  # fmt: skip
            if not all(reply["finite"] for reply in replies):
                executions = next((tuple(r["executions"]) for r in replies if r["executions"]), ())
                self._open.suspects.append(Suspect(batch.id, await self._guilty(batch, executions)))
            self._open.batches.append(batch)
            self._open.stats.append(stats)
            return stats

        return await self._run("accumulate", work)

    async def _guilty(self, batch: MicroBatch, executions: tuple[str, ...]) -> tuple[str, ...]:
        """Which of the batch's executions, each computed alone, have a gradient that is not finite; all if none has."""
        found = []
        for name in executions if len(executions) > 1 else ():
            replies = await self._ask("judge", {"execution": name}, batch.blob)
            if not all(reply.values["finite"] for reply in replies):
                found.append(name)
        return tuple(found) or executions

    async def export_contribution(self, contribution_id: str, step: int, folder: str) -> Contribution:
        """Close the open contribution and write `folder`/<id>.safetensors, every rank its shards."""

        async def work() -> Contribution:
            made = self._open.close(contribution_id, step, self._version, folder)
            await self._usable(f"exporting contribution {contribution_id!r}")
            if not self._open.batches:
                raise InfrastructureError(f"exporting contribution {contribution_id!r}", got="ranks that died with it")
            entries = [Entry(name, "F32", shape) for name, shape in self._shapes.items()]
            try:
                async with files.off_loop(files.new_file(Path(made.location))) as partial:
                    await asyncio.to_thread(create, partial, entries, self._open.header(made))
                    await self._ask("export", {"file": str(partial)})
            except OSError as error:
                raise InfrastructureError(f"exporting contribution {contribution_id!r}", got=str(error)) from error
            await self._forget()
            return made

        return await self._run("export", work)

    async def discard_contribution(self) -> None:
        """Forget the open contribution."""
        await self._run("discard", self._forget)

    async def _forget(self) -> None:
        self._open = OpenContribution()
        if self._started and self._group is not None and self._group.alive:
            await self._ask("discard")

    # The core

    async def add_contribution(self, contribution: Contribution) -> None:
        """Core: count a contribution. Its file is read now for its header, and at the step for its gradients."""
        total = self._as_core(f"adding contribution {contribution.id!r}")

        async def work() -> None:
            total.check(contribution, self._version)
            suspects = await asyncio.to_thread(read_suspects, contribution, self._shapes)
            total.add(contribution, suspects)

        await self._run("add", work)

    async def step(self, divisor: float) -> StepResult:
        """Core: sum in the order of ids, divide once, clip, step. The version rises by one in any case: a step without
        contributions or with a gradient that is not finite leaves the weights as they are and says so in `skipped`."""
        total = self._as_core("stepping")
        if not (math.isfinite(divisor) and divisor > 0):
            raise ValueError(f"stepping: got divisor {divisor}, expected a positive number")

        async def work() -> StepResult:
            began = time.perf_counter()
            await self._usable("stepping")
            rate = self._rate()
            norm, skipped = await self._apply(total, divisor, rate)
            self._sum = StepSum()
            self._version += 1
            return StepResult(self._version, norm, rate, time.perf_counter() - began, skipped)

        return await self._run("step", work)

    def _rate(self) -> float:
        warm = self.options.warmup_steps
        return self.options.learning_rate * (min(1.0, (self._steps + 1) / warm) if warm else 1.0)

    async def _apply(self, total: StepSum, divisor: float, rate: float) -> tuple[float, str | None]:
        """The norm before clipping, and why the step was skipped."""
        if not total.added:
            return 0.0, "no contribution"
        locations = [contribution.location for contribution in total.ordered()]
        replies = [r.values for r in await self._ask("total", {"files": locations, "divisor": divisor})]
        guilty = sorted({index for reply in replies for index in reply["guilty"]})
        norm = math.nan if guilty else math.sqrt(sum(reply["square"] for reply in replies))
        blame = total.blame(guilty)
        if not blame and not math.isfinite(norm):
            blame = "the norm of the summed gradient is not finite though each contribution is"
        if blame:
            await self._ask("drop")
            return norm, blame
        bound = self.options.max_grad_norm
        scale = bound / norm if bound and norm > bound else 1.0
        self._steps += 1
        await self._ask("apply", {"rate": rate, "scale": scale, "steps": self._steps})
        return norm, None

    async def publish(self, folder: str) -> WeightSource:
        """Core: make `folder`/v<version>, every rank its shards, in the way the option `publish` says, and drop the
        oldest beyond `keep_versions` (not those that a kept delta rests on)."""
        self._as_core("publishing")

        async def work() -> WeightSource:
            await self._usable("publishing")
            source = Path(self._origin.location)
            extras = files.model_files(source, self.options.dtype)
            order = Order(self._version, Path(folder), self._weight_files, extras, self.options.keep_versions, source)
            placed = await give(self._versions, order, self._values)
            self.published_bytes = placed.bytes
            return WeightSource(self._version, placed.location, placed.kind, placed.digest)

        return await self._run("publish", work)

    @property
    def _origin(self) -> WeightSource:
        """Where ranks that start anew begin."""
        assert self._source is not None
        return self._source

    def _weight_files(self, folder: Path) -> list[str]:
        return make_weight_files(
            folder, self._shapes, _DTYPES[self.options.dtype], self.options.shard_bytes, self._version
        )  # fmt: skip

    # At rest

    def _kinds(self) -> tuple[str, ...]:
        return MOMENTS if self.options.dtype == "float32" else (*MOMENTS, MASTER)

    async def save(self, folder: str) -> None:
        """Core: weights, optimizer state and version. Contributions added since the last step are not in it."""
        self._as_core("saving a checkpoint")

        async def work() -> None:
            await self._usable("saving a checkpoint")
            async with files.off_loop(files.new_folder(Path(folder))) as partial:
                await self._save_into(partial)
                for name, content in files.model_files(Path(self._origin.location), self.options.dtype).items():
                    (partial / name).write_bytes(content)
                state = {"version": self._version, "steps": self._steps, "dtype": self.options.dtype, "format": 1}
                await asyncio.to_thread(files.seal, partial, state)

        await self._run("save", work)

    async def _save_into(self, folder: Path) -> tuple[list[str], str]:
        """Weights and optimizer state as files of `folder`, filled by the ranks."""
        weights = await asyncio.to_thread(self._weight_files, folder)
        optimizer = await asyncio.to_thread(make_state_file, folder / files.OPTIMIZER, self._shapes, self._kinds())
        await self._ask("save", {"files": weights, "optimizer": optimizer})
        return weights, optimizer

    async def restore(self, folder: str) -> None:
        """Core: what `save` wrote, in whatever number of ranks it was written; InfrastructureError, with nothing
        changed, when it is not whole. A core whose ranks died gets new ones."""
        self._as_core("restoring a checkpoint")

        async def work() -> None:
            dtype = self.options.dtype
            state, args = await asyncio.to_thread(open_checkpoint, Path(folder), self._shapes, self._kinds(), dtype)
            if self._group is None or not self._group.alive:
                await self._ranks()
                await self._build(self._origin)
            await self._ask("restore", args)
            self._version, self._steps = state["version"], state["steps"]
            self._open, self._sum = OpenContribution(), StepSum()

        await self._run("restore", work)

    # Roles

    async def offload(self) -> None:
        """Give accelerator memory back; the open contribution is dropped."""

        async def work() -> None:
            self._open = OpenContribution()
            if self._group is not None and self._group.alive:
                await self._ask("offload", {"rebuild": self._rebuild})

        await self._run("offload", work)

    async def onload(self) -> None:
        """Take it again. A satellite whose ranks died meanwhile gets new ones."""

        async def work() -> None:
            await self._usable("onloading")
            await self._ask("onload", timeout=self.options.start_timeout_s)

        await self._run("onload", work)
