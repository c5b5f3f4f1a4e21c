"""The scheduler: events in, commands out, and nothing else.

No clock, no randomness, no I/O: the same events give the same commands and the same state, in production, in
simulation and in a replay. An event that is refused leaves the machine as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import checks, events, on_cells, on_groups, on_sessions, on_training, story
from .commands import Command
from .config import SchedConfig
from .errors import BadValueError, EventError, TimeWentBackError
from .ids import CellState, Role
from .policies import Policy, Turn, watermark
from .view import View
from .world import World

__all__ = ["Scheduler"]

Handler = Callable[[World, Any], None]


def _tick(w: World, ev: events.Tick) -> None:
    del ev
    w.touched.extend(w.in_transit.values())
    on_cells.catch_up_all(w)
    w.dirty = True


def _turn_asked(w: World, ev: events.TurnAsked) -> None:
    cell = checks.cell(w, ev, ev.cell)
    start = CellState(Role(ev.role).other.value)
    if cell.state is start:
        on_cells.begin_turn(w, cell, ev.role, ev.reason)
    elif cell.state in (CellState.DRAINING, CellState.FLUSHING) and cell.target is not ev.role:
        on_cells.give_up_turn(w, cell, ev.reason)
    else:
        problem = f"{cell.id} is {cell.state}; expected {start}, or a turn away from {ev.role} to give up"
        checks.refuse(BadValueError, w, ev, problem, cell.id.name)


HANDLERS: dict[type, Handler] = {
    events.CellJoining: on_cells.joining,
    events.CellJoined: on_cells.joined,
    events.CellLost: on_cells.lost,
    events.LoadReported: on_cells.reported,
    events.DrainDone: on_cells.drain_done,
    events.DrainFailed: on_cells.drain_failed,
    events.SwitchDone: on_cells.switch_done,
    events.SwitchFailed: on_cells.switch_failed,
    events.WeightsLoaded: on_cells.weights_loaded,
    events.WeightsFailed: on_cells.weights_failed,
    events.GroupQueued: on_groups.queued,
    events.GroupsClosed: on_groups.closed,
    events.ExecutionStarted: on_groups.started,
    events.ExecutionEnded: on_groups.ended,
    events.SessionStarted: on_sessions.started,
    events.SessionEnded: on_sessions.ended,
    events.CallRequested: on_sessions.requested,
    events.CallEnded: on_sessions.call_ended,
    events.MoveDone: on_sessions.move_done,
    events.MoveFailed: on_sessions.move_failed,
    events.GroupBatched: on_training.batched,
    events.ContributionCommitted: on_training.committed,
    events.LeaseFailed: on_training.lease_failed,
    events.StepApplied: on_training.applied,
    events.WeightsPublished: on_training.published,
    events.Tick: _tick,
    events.TurnAsked: _turn_asked,
    events.CutAsked: on_groups.cut_asked,
}


class Scheduler:
    """The whole machine. ``policy`` decides turns; everything else is fixed rules under ``config``."""

    def __init__(self, config: SchedConfig | None = None, policy: Policy = watermark) -> None:
        self.config = config or SchedConfig()
        self.policy = policy
        self._w = World(self.config)
        self._view = View(self._w)

    @property
    def view(self) -> View:
        """Read-only window on the state."""
        return self._view

    @property
    def now(self) -> float:
        """Time of the last event."""
        return self._w.now

    @property
    def seq(self) -> int:
        """Number of events accepted."""
        return self._w.seq

    def handle(self, event: events.Event) -> list[Command]:
        """Take in one event and return what is to be done now, in order.

        Raises an ``EventError`` if the event cannot be true; nothing has changed then.
        """
        w = self._w
        handler = HANDLERS.get(type(event))
        if handler is None:
            known = ", ".join(sorted(kind.__name__ for kind in HANDLERS))
            raise BadValueError(event, f"{type(event).__name__} is no event; expected one of: {known}")
        w.check_time(event, event.time)
        before = w.now
        if w.seq and event.time < before:
            raise TimeWentBackError(event, f"the machine is at {before}; the time of an event never goes back")
        w.now = event.time
        w.out = []
        try:
            handler(w, event)
        except EventError:
            w.now = before
            raise
        w.seq += 1
        if w.freed and w.waiting:
            on_sessions.serve_waiting(w)
        if w.dirty or w.touched:
            self._settle()
        return w.out

    def _settle(self) -> None:
        """Carry consequences on until nothing follows any more."""
        w = self._w
        while w.dirty or w.touched:
            while w.touched:
                on_cells.progress(w, w.touched.pop(0))
            if w.dirty:
                on_groups.cut_due(w)
                w.dirty = False
                on_training.advance(w)
                self._turn()
            if w.freed and w.waiting:
                on_sessions.serve_waiting(w)

    def _turn(self) -> None:
        for _ in range(len(self._w.cells)):
            turns = self.policy(self._view)
            if not turns:
                return
            for turn in turns:
                self._begin(turn)

    def _begin(self, turn: Turn) -> None:
        w = self._w
        cell = w.find_cell(turn.cell)
        if cell is None:
            raise BadValueError(turn, f"the policy turned {turn.cell}, which is no living cell")
        if cell.state is CellState(turn.role.other.value):
            on_cells.begin_turn(w, cell, turn.role, turn.reason)
        elif cell.state in (CellState.DRAINING, CellState.FLUSHING) and cell.target is not turn.role:
            on_cells.give_up_turn(w, cell, turn.reason)
        else:
            raise BadValueError(turn, f"the policy turned {cell.id} to {turn.role}, but it is {cell.state}")

    def story(self, name: str) -> str:
        """What happened to a cell, session, execution, group or lease, and why; in words."""
        return story.tell(self._w, name)
