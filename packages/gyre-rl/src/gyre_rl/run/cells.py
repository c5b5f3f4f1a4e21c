"""The cells of a run as the scheduler's driver sees them: role switches, session moves, weights, leases.

Invariant: every method speaks to one life of one cell; a cell that is gone raises, and the scheduler decides what that
means. Holds where weights of each version are, and what each living cell said of itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from gyre_core import CellId, Contribution, InfrastructureError, MicroBatch, Role, WeightSource
from gyre_sched import MoveReport

from gyre_rl.cell.messages import (
    AddContribution,
    Added,
    Applied,
    ApplyStep,
    CellBody,
    CellReady,
    Drain,
    KVSettings,
    Lease,
    LeaveSession,
    Pulled,
    PullSession,
    Recall,
    SwitchTo,
    Sync,
    Took,
)
from gyre_rl.config.schema import RunConfig
from gyre_rl.procs.fleet import Child, Fleet
from gyre_rl.procs.wire import Empty

T = TypeVar("T")
APPLY_S = 600.0
ADD_S = 600.0
"""A contribution waits on the core behind the batch that its trainer computes."""
HOST = "gyre_rl.cell.host:make"


def name_of(index: int) -> str:
    """Of the run's `index`-th cell, in all of its lives."""
    return f"cell-{index}"


def index_of(name: str) -> int:
    """Which cell has this name."""
    return int(name.removeprefix("cell-"))


@dataclass(slots=True)
class CellInfo:
    """A living cell."""

    child: Child
    core: bool
    ready: CellReady


def plain(options: Any) -> dict[str, Any]:
    """An options dataclass as JSON-able data for another process."""
    if options is None:
        return {}
    data: dict[str, Any] = msgspec.to_builtins(dataclasses.asdict(options))
    return data


@dataclass(slots=True)
class Cells:
    """Starts cells and carries out what the scheduler asks of them."""

    fleet: Fleet
    config: RunConfig
    contributions: Path
    weights: Path
    infos: dict[CellId, CellInfo] = field(default_factory=dict)
    sources: dict[int, WeightSource] = field(default_factory=dict)
    moves: list[Pulled] = field(default_factory=list)

    # -- life ------------------------------------------------------------------------------------------------
    async def start(self, name: str, role: Role, source: WeightSource, *, core: bool, restore: str | None) -> CellId:
        """Start a cell and wait until it is ready."""
        config = self.config
        body = CellBody(
            role=role,
            core=core,
            source=source,
            engine=config.engine.name,
            trainer=config.trainer.name,
            engine_options=plain(config.engine.options),
            trainer_options=plain(config.trainer.options),
            restore=restore,
            weights=str(self.weights),
            seed=config.seed,
            device=config.cells.device,
            threads=config.cells.threads,
            accelerators=config.cells.accelerators,
            base_dir=config.base_dir,
            replays_experts=config.model.routed_experts,
            kv=KVSettings(config.kv.transport, config.kv.digest, config.kv.finite),
        )
        threads = str(config.cells.threads)
        env = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
        cells = config.cells
        child = await self.fleet.start(
            name, HOST, msgspec.to_builtins(body), env=env, accelerators=cells.accelerators, cell=index_of(name)
        )
        try:
            ready = await self.fleet.ready(child, CellReady, cells.start_s)
        except BaseException:
            await self.fleet.stop(child)  # it may live on, or become ready later, and nobody would know it
            raise
        self.infos[child.id] = CellInfo(child, core, ready)
        return child.id

    def info(self, cell: CellId) -> CellInfo:
        """A living cell; raises InfrastructureError for one that is gone."""
        info = self.infos.get(CellId(*cell))
        if info is None:
            raise InfrastructureError(f"asking {cell}", got="a cell that is gone")
        return info

    @property
    def core(self) -> CellId:
        """The core cell; raises InfrastructureError while it is gone."""
        for cell, info in self.infos.items():
            if info.core:
                return cell
        raise InfrastructureError("asking the core cell", got="none: it is gone")

    def lost(self, cell: CellId) -> CellInfo | None:
        """Forget a cell."""
        return self.infos.pop(CellId(*cell), None)

    async def end(self, cell: CellId) -> None:
        """Have its process end, which is noticed as any death is."""
        await self.info(cell).child.process.terminate()

    async def _ask(self, cell: CellId, path: str, message: Any, as_type: type[T], timeout_s: float = 60.0) -> T:
        return await self.info(cell).child.reach().call(path, message, as_type, timeout_s=timeout_s)

    # -- roles and sessions ----------------------------------------------------------------------------------
    async def drain(self, cell: CellId, on: bool) -> None:
        """Stop or reopen the intake of calls."""
        await self._ask(cell, "/drain", Drain(on), Empty)

    async def switch(self, cell: CellId, role: Role, version: int) -> float:
        """Change the role, with the weights of `version`."""
        took: Took = await self._ask(
            cell, "/switch", SwitchTo(role, self.sources[version]), Took, self.config.cells.switch_s
        )
        return took.seconds

    async def sync(self, cell: CellId, version: int) -> float:
        """Load `version` on a rollout cell."""
        took: Took = await self._ask(cell, "/sync", Sync(self.sources[version]), Took, self.config.cells.switch_s)
        return took.seconds

    async def move(self, session: str, src: CellId, dst: CellId, *, carry_kv: bool) -> MoveReport:
        """Bring a session to `dst`, with its KV if that works; without it `dst` prefills."""
        endpoint = self.info(src).ready.kv_endpoint
        if carry_kv and endpoint:
            pulled: Pulled = await self._ask(dst, "/pull", PullSession(session, endpoint), Pulled)
            self.moves.append(pulled)
            if pulled.carried:
                return MoveReport(True, pulled.bytes, pulled.tokens, pulled.seconds)
        await self._ask(src, "/leave", LeaveSession(session), Empty)
        return MoveReport(False)

    # -- training --------------------------------------------------------------------------------------------
    async def lease(self, cell: CellId, lease: int, step: int, batches: tuple[MicroBatch, ...]) -> None:
        """Hand out work; its end comes as an event of the cell."""
        folder = self.contributions / f"{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        message = Lease(lease, step, self.sources[step], str(folder), batches)
        await self._ask(cell, "/lease", message, Empty)

    async def recall(self, cell: CellId, lease: int) -> None:
        """Ask for what is done."""
        await self._ask(cell, "/recall", Recall(lease), Empty)

    async def add(self, contribution: Contribution) -> tuple[Contribution, ...]:
        """Count a contribution on the core; returns it, or those that counted some of its batches before."""
        added: Added = await self._ask(self.core, "/add", AddContribution(contribution), Added, ADD_S)
        return added.counted

    async def apply(self, message: ApplyStep) -> Applied:
        """Step on the core."""
        applied: Applied = await self._ask(self.core, "/apply", message, Applied, APPLY_S)
        self.sources[applied.source.version] = applied.source
        return applied

    async def start_all(self, source: WeightSource, restore: str | None) -> list[CellId]:
        """The cells of the run, all at once; the first ones are TRAIN, the very first is the core."""
        config = self.config.cells
        self.sources[source.version] = source
        starts = []
        for index in range(config.count):
            role = Role.TRAIN if index < config.train else Role.ROLLOUT
            core = index == 0
            starts.append(self.start(name_of(index), role, source, core=core, restore=restore if core else None))
        return list(await asyncio.gather(*starts))
