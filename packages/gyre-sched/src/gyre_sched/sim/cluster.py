"""The simulated cells: their engines, their changes of role, their weights, and their deaths.

Invariant: what an earlier life of a cell began is void once the cell is lost. With ``Hardware.mtbf_s`` cells are lost
at random times (exponential, seeded) with all they held, and come back ``repair_s`` later as their next life in the
role they started in. Plays no agent and trains nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.ids import CellId, CellState, Role

from .engine import Engine
from .result import Lane
from .stage import Stage

__all__ = ["Cluster", "HeldLease", "SimCell"]


@dataclass(slots=True)
class HeldLease:
    """A lease being computed: when each of its micro-batches ends. ``gen`` makes earlier plans for its end void."""

    number: int
    batches: tuple[str, ...]
    started: float
    ends: list[float]
    gen: int = 0


class SimCell:
    """One cell through all its lives."""

    __slots__ = ("busy_s", "engine", "gen", "id", "lane_since", "lane_state", "lease", "loading", "role", "train_busy")

    def __init__(self, cell: CellId, engine: Engine, role: Role) -> None:
        self.id = cell
        self.engine = engine
        self.role = role
        """In which it starts, and starts again."""
        self.gen = 0
        self.lease: HeldLease | None = None
        self.loading = 0
        """Weight loads during which its engine stands still."""
        self.train_busy = 0.0
        self.busy_s = 0.0
        """Sampling seconds of its earlier lives."""
        self.lane_state = ""
        self.lane_since = 0.0


class Cluster:
    """All cells."""

    def __init__(self, stage: Stage, train_cells: int, seed: int, keep_lanes: bool) -> None:
        self.stage = stage
        self.rng = random.Random(f"sim/{seed}")
        self.faults = random.Random(f"faults/{seed}")
        self.keep_lanes = keep_lanes
        self.lanes: list[Lane] = []
        self.lost = 0
        self.watch: Callable[[SimCell], None] = lambda cell: None
        self.cells: dict[str, SimCell] = {}
        for i in range(stage.hw.cells):
            role = Role.TRAIN if i < train_cells else Role.ROLLOUT
            self.cells[f"c{i}"] = SimCell(CellId(f"c{i}"), self.new_engine(), role)
        stage.do |= {
            c.DrainCell: self._drain,
            c.UndrainCell: lambda cmd: None,
            c.SwitchCell: self._switch,
            c.SyncWeights: self._sync,
        }

    def new_engine(self) -> Engine:
        """An engine with an empty cache."""
        return Engine(self.stage.hw)

    def begin(self, watch: Callable[[SimCell], None]) -> None:
        """All cells join. ``watch`` is called when the pace of a cell's engine changed."""
        self.watch = watch
        for cell in self.cells.values():
            self._join(cell)

    def _join(self, cell: SimCell) -> None:
        hw, view = self.stage.hw, self.stage.machine.view
        core = cell.id.name == "c0"
        version = view.step if core else view.published
        self.lane(cell, cell.role.value)
        self.stage.post(
            e.CellJoined(self.stage.now, cell.id, cell.role, hw.slots, hw.kv_tokens, core=core, version=version)
        )
        if hw.mtbf_s:
            self.stage.at(self.stage.now + self.faults.expovariate(1.0 / hw.mtbf_s), self._die, cell, cell.id)

    # --- lanes ---------------------------------------------------------------------------------------------

    def lane(self, cell: SimCell, state: str) -> None:
        """``cell`` is in ``state`` from now on."""
        now = self.stage.now
        if self.keep_lanes and cell.lane_state and now > cell.lane_since:
            self.lanes.append(Lane(cell.id.name, cell.lane_state, cell.lane_since, now))
        cell.lane_state, cell.lane_since = state, now

    def finish(self) -> tuple[float, float]:
        """The run is over: seconds of all cells spent sampling and training."""
        for cell in self.cells.values():
            cell.engine.advance(self.stage.now)
            self.lane(cell, "end")
        sampling = sum(cell.busy_s + cell.engine.busy_s for cell in self.cells.values())
        return sampling, sum(cell.train_busy for cell in self.cells.values())

    # --- roles ---------------------------------------------------------------------------------------------

    def _drain(self, cmd: c.DrainCell) -> None:
        self.lane(self.cells[cmd.cell.name], CellState.DRAINING.value)
        self.stage.post(e.DrainDone(self.stage.now, cmd.cell))

    def _switch(self, cmd: c.SwitchCell) -> None:
        cell, hw = self.cells[cmd.cell.name], self.stage.hw
        self.lane(cell, CellState.SWITCHING.value)
        cell.engine.clear()
        base = hw.to_train_s if cmd.role is Role.TRAIN else hw.to_rollout_s
        seconds = base * (1.0 + hw.switch_spread * (2.0 * self.rng.random() - 1.0))
        self.stage.at(self.stage.now + seconds, self._switched, cell, cmd.cell, cmd.role, seconds)

    def _switched(self, cell: SimCell, life: CellId, role: Role, seconds: float) -> None:
        if self.alive(life):
            self.lane(cell, role.value)
            self.stage.post(e.SwitchDone(self.stage.now, life, role, seconds))

    # --- weights -------------------------------------------------------------------------------------------

    def _sync(self, cmd: c.SyncWeights) -> None:
        """Load weights; the engine stands still for the last ``sync_pause`` of that time."""
        cell, hw = self.cells[cmd.cell.name], self.stage.hw
        now = self.stage.now
        if hw.sync_pause:
            self.stage.at(now + hw.sync_s * (1.0 - hw.sync_pause), self._stop, cell, cmd.cell)
        self.stage.at(now + hw.sync_s, self._synced, cell, cmd.cell, cmd.version)

    def _stop(self, cell: SimCell, life: CellId) -> None:
        if self.alive(life):
            cell.loading += 1
            cell.engine.stall(True, self.stage.now)
            self.watch(cell)

    def _synced(self, cell: SimCell, life: CellId, version: int) -> None:
        if not self.alive(life):
            return
        if cell.loading:
            cell.loading -= 1
            if not cell.loading:
                cell.engine.stall(False, self.stage.now)
                self.watch(cell)
        self.stage.post(e.WeightsLoaded(self.stage.now, life, version, self.stage.hw.sync_s))

    def alive(self, life: CellId) -> bool:
        """Whether exactly this life of a cell is going on."""
        cell = self.cells[life.name]
        return cell.id == life and cell.lane_state != CellState.LOST.value

    # --- deaths --------------------------------------------------------------------------------------------

    def _die(self, cell: SimCell, life: CellId) -> None:
        """All a cell held is gone: running calls, KV, its lease."""
        stage = self.stage
        if cell.id != life:
            return
        self.lost += 1
        cell.engine.advance(stage.now)
        cell.busy_s += cell.engine.busy_s
        cell.engine = self.new_engine()
        cell.gen += 1
        cell.loading = 0
        if cell.lease is not None:
            cell.train_busy += stage.now - cell.lease.started
            cell.lease = None
        self.lane(cell, CellState.LOST.value)
        stage.at(stage.now + stage.hw.repair_s, self._return, cell)
        stage.post(e.CellLost(stage.now, life, "killed"))

    def _return(self, cell: SimCell) -> None:
        cell.id = CellId(cell.id.name, cell.id.incarnation + 1)
        self._join(cell)
