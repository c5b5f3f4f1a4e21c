"""`LocalTrainer`: the embedded trainer as `gyre_core.Trainer`.

Everything that computes runs in one worker thread, so the cell's event loop answers meanwhile. Invariants are those
of `train.replica` (gradients), `train.optimizer` (the step) and `train.checkpoint` (files).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from gyre_core import (
    BatchStats,
    CapabilityError,
    ComponentContext,
    Contribution,
    InfrastructureError,
    MicroBatch,
    ModelFacts,
    StepResult,
    TrainerCapability,
    WeightSource,
)
from gyre_core.facts import facts_of
from gyre_weights import Publisher

from gyre_local.memory import give_back
from gyre_local.model.weights import read_tensors
from gyre_local.options import LocalTrainerOptions
from gyre_local.train.checkpoint import OPTIMIZER, model_files, read_state, write_checkpoint
from gyre_local.train.contributions import Gradients, contribution_path, read_contribution, write_contribution
from gyre_local.train.handover import CoreMemory, in_memory, memory_location, send_to_core
from gyre_local.train.optimizer import Optimizer
from gyre_local.train.replica import Replica, import_model

T = TypeVar("T")
_CPU = torch.device("cpu")


class LocalTrainer:
    """Embedded trainer for one cell, core or satellite; CPU or one GPU.

    `timings` has the seconds of the last start, load_weights, export, step, publish, save, restore, offload, onload;
    `published_bytes` what the last publish wrote.
    """

    def __init__(self, options: LocalTrainerOptions | None, context: ComponentContext) -> None:
        self.options = options or LocalTrainerOptions()
        self.timings: dict[str, float] = {}
        self.published_bytes = 0
        self._device = torch.device(context.device)
        self._replica = Replica(self.options, self._device)
        self._optimizer: Optimizer | None = None
        self._facts: ModelFacts | None = None
        self._threads = context.threads
        self._pool = ThreadPoolExecutor(1, f"gyre-local-trainer-{context.name}", self._use_threads)
        self._seed = context.seed
        self._run_dir, self._address = context.run_dir, context.address
        self._files: dict[str, bytes] = {}
        self._publisher: Publisher | None = None
        self._memory: CoreMemory | None = None

    def _use_threads(self) -> None:
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    @property
    def capabilities(self) -> frozenset[TrainerCapability]:
        """What it offers."""
        return frozenset({TrainerCapability.OFFLOAD})

    @property
    def version(self) -> int:
        """Policy version of its weights; -1 before the first load."""
        return self._replica.version

    @property
    def facts(self) -> ModelFacts | None:
        """Of the transformers model."""
        return self._facts

    async def _run(self, what: str, work: Callable[[], T]) -> T:
        def timed() -> T:
            started = time.perf_counter()
            result = work()
            self.timings[what] = time.perf_counter() - started
            return result

        return await asyncio.get_running_loop().run_in_executor(self._pool, timed)

    def _core(self, doing: str) -> Optimizer:
        if self._optimizer is None:
            raise CapabilityError(doing, got="a satellite (or a trainer not started)", expected="the core")
        return self._optimizer

    async def prepare(self, source: WeightSource) -> None:
        """Import the model's code (seconds) ahead of `start`; no weights are read."""
        await self._run("prepare", lambda: import_model(source.location))

    async def start(self, source: WeightSource, *, core: bool) -> None:
        """Load model and weights; with `core` also make the optimizer."""

        def work() -> None:
            self._replica.start(source)
            self._facts = facts_of(self._replica.model, router_replay=self.options.router_replay)
            if core:
                self._optimizer = Optimizer(self.options, self._replica.parameters)
                self._files = model_files(Path(source.location), self.options.dtype)
                if self.options.handover == "memory":
                    shapes, dtype = self._replica.shapes, self._replica.sum_dtype
                    self._memory = CoreMemory(
                        shapes, dtype, self._run_dir, self._address, self.options.handover_timeout_s
                    )
                    self._memory.open_step(self.version)

        await self._run("start", work)

    async def load_weights(self, source: WeightSource) -> None:
        """Satellite: take another version's weights; drops gradients not exported. CapabilityError on the core, whose
        weights are the authoritative ones."""
        if self._optimizer is not None:
            raise CapabilityError(
                f"loading policy version {source.version} into the core", got="a weight source",
                expected="restore, which brings the optimizer's state as well",
            )  # fmt: skip
        await self._run("load_weights", lambda: self._replica.load_weights(source))

    async def logprobs(self, batch: MicroBatch) -> Sequence[float]:
        """One value a loss entry of the batch, in its order: each sampled token, once for each execution sharing it."""
        return await self._run("logprobs", lambda: self._replica.logprobs(batch))

    async def accumulate(self, batch: MicroBatch) -> BatchStats:
        """Add the batch's summed gradient to the open contribution."""
        return await self._run("accumulate", lambda: self._replica.accumulate(batch))

    async def export_contribution(self, contribution_id: str, step: int, folder: str) -> Contribution:
        """Close the open contribution and write `folder`/<id>.safetensors; with handover = "memory" hand it to the core
        instead."""
        path = str(contribution_path(folder, contribution_id))
        memory = self.options.handover == "memory"
        location = memory_location(contribution_id) if memory else path
        way = self._to_memory if memory else write_contribution
        return await self._run("export", lambda: self._replica.export(contribution_id, step, location, way))

    def _to_memory(self, contribution: Contribution, gradients: Gradients) -> None:
        if self._memory is not None:
            self._memory.keep(contribution, gradients)
        else:
            send_to_core(contribution, gradients, self._run_dir, self.options.handover_timeout_s)

    async def discard_contribution(self) -> None:
        """Forget the open contribution."""
        await self._run("discard", self._replica.discard)

    async def add_contribution(self, contribution: Contribution) -> None:
        """Core: add to the step's sum. See `Optimizer.add` and `read_contribution` for what is refused."""
        optimizer = self._core(f"adding contribution {contribution.id!r}")

        def work() -> None:
            if contribution.version != self.version:
                raise ValueError(
                    f"adding contribution {contribution.id!r}: got gradients of policy version {contribution.version}, "
                    f"expected {self.version}"
                )
            optimizer.add(contribution, self._gradients(contribution), self.version)

        await self._run("add", work)

    def _gradients(self, contribution: Contribution) -> Gradients:
        if not in_memory(contribution):
            return read_contribution(contribution, self._replica.shapes)
        if self._memory is None:
            raise InfrastructureError(
                f"adding contribution {contribution.id!r}", got="one in memory", expected="one at rest",
                fix='Set handover = "memory" on every cell, or on none.',
            )  # fmt: skip
        return self._memory.take(contribution)

    async def step(self, divisor: float) -> StepResult:
        """Core: one optimizer step; skipped, with the guilty contribution named, when a gradient is not finite."""
        optimizer = self._core("stepping")

        def work() -> StepResult:
            result = optimizer.step(divisor, self.version)
            self._set_version(result.version)
            return result

        return await self._run("step", work)

    def _set_version(self, version: int) -> None:
        self._replica.version = version
        if self._memory is not None:
            self._memory.open_step(version)

    async def publish(self, folder: str) -> WeightSource:
        """Core: make `folder`/v<version>, in the way the option `publish` says, and drop the oldest beyond
        `keep_versions` (not those that a kept delta rests on)."""
        self._core("publishing")

        def work() -> WeightSource:
            options = self.options
            if self._publisher is not None and self._publisher.folder != Path(folder):
                self._publisher.close()
                self._publisher = None
            if self._publisher is None:
                self._publisher = Publisher(
                    options.publish, folder, keep=options.keep_versions, full_every=options.full_every
                )
            spare = [self._replica.source_folder]
            made = self._publisher.publish(self.version, lambda: self._replica.parameters, self._files, spare)
            self.published_bytes = made.bytes
            return WeightSource(self.version, made.location, made.kind, made.digest)

        return await self._run("publish", work)

    async def save(self, folder: str) -> None:
        """Core: weights, optimizer, version and random state. Contributions added since the last step are not in it."""
        optimizer = self._core("saving a checkpoint")

        def work() -> None:
            state = {"version": self.version, "steps": optimizer.steps, "dtype": self.options.dtype, "format": 1}
            tensors = optimizer.state() | {"rng/cpu": torch.get_rng_state()}
            if self._device.type == "cuda":
                tensors["rng/cuda"] = torch.cuda.get_rng_state(self._device)
            write_checkpoint(Path(folder), self._replica.parameters, tensors, state, self._files)

        await self._run("save", work)

    async def restore(self, folder: str) -> None:
        """Core: what `save` wrote, exactly; InfrastructureError, with nothing changed, when it is not whole."""
        optimizer = self._core("restoring a checkpoint")

        def work() -> None:
            doing = f"restoring the checkpoint {folder}"
            state = read_state(Path(folder))
            if state["dtype"] != self.options.dtype:
                raise InfrastructureError(doing, got=f"dtype {state['dtype']}", expected=self.options.dtype)
            kept = read_tensors(Path(folder), only=(OPTIMIZER,))
            self._replica.take_tensors(read_tensors(Path(folder), only=("model.safetensors",)), doing)
            optimizer.load_state(kept, int(state["steps"]))
            self._set_version(int(state["version"]))
            torch.set_rng_state(kept["rng/cpu"])
            if self._device.type == "cuda" and "rng/cuda" in kept:
                torch.cuda.set_rng_state(kept["rng/cuda"], self._device)

        await self._run("restore", work)

    async def offload(self) -> None:
        """Weights and optimizer state to host memory; the open contribution is dropped."""
        await self._run("offload", lambda: self._move(_CPU))

    async def onload(self) -> None:
        """Weights and optimizer state back to the device."""
        await self._run("onload", lambda: self._move(self._device))

    def _move(self, device: torch.device) -> None:
        self._replica.move(device)
        if self._optimizer is not None:
            self._optimizer.move(device)
        give_back(self._device)

    async def close(self) -> None:
        """End for good."""

        def work() -> None:
            if self._memory is not None:
                self._memory.close()
            if self._publisher is not None:
                self._publisher.close()
            self._memory = self._publisher = None
            self._replica.close()
            self._optimizer = None
            give_back(self._device)

        await self._run("close", work)
        self._pool.shutdown(wait=False)
