"""The scheduler's hands: each command goes to the part of the run that carries it out.

Invariant: nothing is decided here. A method that fails raises, and the runner tells the scheduler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from gyre_core import CellId, GyreError, Role
from gyre_sched import CellId as SchedCell
from gyre_sched import MoveReport
from gyre_sched import Role as SchedRole

from gyre_rl.run.bus import EventBus
from gyre_rl.run.cells import Cells
from gyre_rl.run.rollout import Rollout
from gyre_rl.run.training import Training
from gyre_rl.views.events import SessionMoved, StepSealed, Switched, WeightsSynced

STUCK_S = 120.0
"""How long a rollout cell may fail to load weights (its core may be starting anew) before it is ended."""


@dataclass(slots=True)
class Counts:
    """What a run's summary tells of its scheduler."""

    role_switches: int = 0
    sessions_rerouted: int = 0
    kv_moved_sessions: int = 0


@dataclass(slots=True)
class RunDriver:
    """Implements `gyre_sched.CellDriver` over the processes of a run."""

    cells: Cells
    rollout: Rollout
    training: Training
    bus: EventBus
    spawn: Callable[[Coroutine[Any, Any, Any]], None]
    """Runs work in the background; its failure ends the run."""
    counts: Counts = field(default_factory=Counts)
    reasons: dict[CellId, str] = field(default_factory=dict)
    """Why each cell was last told to change its state."""
    contexts: dict[str, int] = field(default_factory=dict)
    """Living session -> tokens of its context, as last seen."""
    group_left: Callable[[str], None] = lambda group: None
    evaluations: dict[str, asyncio.Event] = field(default_factory=dict)
    """Evaluation groups and whether all their executions have ended."""
    _drain_began: dict[CellId, float] = field(default_factory=dict)
    _stuck: dict[SchedCell, float] = field(default_factory=dict)
    """Cells that cannot load weights, and since when."""

    async def drain(self, cell: SchedCell) -> None:
        """Stop the intake of a rollout cell."""
        self._drain_began[_core(cell)] = time.monotonic()
        await self.cells.drain(_core(cell), True)

    async def undrain(self, cell: SchedCell) -> None:
        """Open it again."""
        self._drain_began.pop(_core(cell), None)
        await self.cells.drain(_core(cell), False)

    async def switch(self, cell: SchedCell, role: SchedRole) -> float:
        """Change a cell's role with the newest published weights."""
        reason = self.reasons.get(_core(cell), "")
        now = time.monotonic()
        drained = now - self._drain_began.pop(_core(cell), now)
        try:
            seconds = await self.cells.switch(_core(cell), Role(role.value), self.training.applied)
        except Exception:  # told to views, and raised for the scheduler to judge
            self.bus.emit(Switched(str(cell), role.value, 0.0, reason, drained, ok=False))
            raise
        self.counts.role_switches += 1
        self.bus.emit(Switched(str(cell), role.value, seconds, reason, drained))
        return seconds

    async def move_session(
        self, session: str, src: SchedCell, dst: SchedCell, *, carry_kv: bool, interrupt: bool
    ) -> MoveReport:
        """Bring a session from one cell to another."""
        report = await self.cells.move(session, _core(src), _core(dst), carry_kv=carry_kv)
        self.counts.sessions_rerouted += 1
        self.counts.kv_moved_sessions += report.carried
        self.bus.emit(
            SessionMoved(
                session,
                str(src),
                str(dst),
                report.carried,
                report.tokens if report.carried else self.contexts.get(session, 0),
                report.bytes,
                report.seconds,
                interrupt,
            )
        )
        return report

    async def sync_weights(self, cell: SchedCell, version: int) -> float:
        """Load a version on a rollout cell. One that cannot for STUCK_S is ended: everybody would wait for it."""
        try:
            seconds = await self.cells.sync(_core(cell), version)
        except GyreError as error:
            await self._cannot_load(cell, error)
            raise
        self._stuck.pop(cell, None)
        self.bus.emit(WeightsSynced(str(cell), version, seconds))
        return seconds

    async def _cannot_load(self, cell: SchedCell, error: GyreError) -> None:
        """Tell the first time; in the end have it start anew."""
        now = time.monotonic()
        began = self._stuck.setdefault(cell, now)
        if began == now:
            self.bus.notice(f"{cell} could not load weights and is asked again: {error}")
        elif now - began > STUCK_S:
            del self._stuck[cell]
            self.bus.notice(f"{cell} could not load weights for {STUCK_S:.0f} s and is ended: {error}")
            await self.cells.end(_core(cell))

    async def admit(self, group: str, version: int) -> None:
        """Start a group."""
        self.rollout.start_group(group, version)

    async def retry(self, execution: str, group: str, attempt: int) -> None:
        """Start an execution again."""
        self.rollout.start(execution, group, attempt, self.training.applied)

    async def cut(self, execution: str, reason: str) -> None:
        """End an execution; it is scored on what stands."""
        await self.rollout.cut(execution, reason)

    async def build_group(self, group: str, step: int, executions: tuple[str, ...], left_out: tuple[str, ...]) -> None:
        """Begin to fix a group's part of the loss."""
        self.spawn(self.training.build_group(group, step, executions, len(left_out)))

    async def drop_group(self, group: str, reason: str) -> None:
        """Too little of a group is left."""
        self.bus.notice(f"group {group} left: {reason}")
        self.group_left(group)

    async def lease(self, cell: SchedCell, lease: int, step: int, batches: tuple[str, ...]) -> None:
        """Hand micro-batches to a training cell."""
        await self.training.lease(_core(cell), lease, step, batches)

    async def recall_lease(self, cell: SchedCell, lease: int) -> None:
        """Ask for what is done of it."""
        await self.cells.recall(_core(cell), lease)

    async def seal(self, step: int, groups: tuple[str, ...]) -> None:
        """A step's groups are fixed."""
        self.training.seal(step)
        self.bus.emit(StepSealed(step, len(groups)))
        if self.rollout.config.rollout.on_step_close == "cut":
            await self.rollout.cut_all(f"step {step} closed")

    async def apply_step(self, step: int, groups: tuple[str, ...]) -> None:
        """Begin to step the optimizer."""
        self.spawn(self.training.apply(step, groups))

    async def evaluated(self, group: str, executions: tuple[str, ...]) -> None:
        """Everything of an evaluation group has ended."""
        self.evaluations[group].set()

    async def alarm(self, subject: str, reason: str) -> None:
        """Something a person should see."""
        self.bus.notice(f"{subject}: {reason}", "error")


def _core(cell: SchedCell) -> CellId:
    """The same id under gyre-core's name for the type."""
    return CellId(*cell)
