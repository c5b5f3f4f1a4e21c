"""Finds what an event speaks of, or refuses the event with the story of the thing.

Every function here either returns a record or raises an ``EventError``; none changes anything.
"""

from __future__ import annotations

import math
from typing import NoReturn

from . import story
from .errors import BadValueError, EventError, LateOutcomeError, StaleIncarnationError, UnknownNameError
from .ids import CellId, CellState
from .records import Cell, Execution, Group, Lease, Session
from .world import World

__all__ = ["cell", "execution", "finite", "group", "lease", "positive", "refuse", "session"]


def refuse(kind: type[EventError], w: World, event: object, problem: str, about: str = "") -> NoReturn:
    """Raise ``kind`` with the story of ``about``."""
    raise kind(event, problem, story.tell(w, about) if about else "")


def cell(w: World, event: object, name: CellId, *states: CellState) -> Cell:
    """The living cell ``name``, in one of ``states`` if any are given."""
    if not (isinstance(name, tuple) and len(name) == 2):
        raise BadValueError(event, f"cell is {name!r}; expected CellId(name, incarnation)")
    rec = w.cells.get(name[0])
    if rec is None:
        known = ", ".join(sorted(w.cells)[:8]) or "none"
        refuse(UnknownNameError, w, event, f"no cell is called {name[0]!r}; joined so far: {known}")
    if name[1] < rec.id.incarnation:
        what = f"it speaks of life {name[1]} of cell {name[0]!r}, which now lives its life {rec.id.incarnation}"
        refuse(StaleIncarnationError, w, event, what, name[0])
    if name[1] > rec.id.incarnation:
        refuse(UnknownNameError, w, event, f"life {name[1]} of cell {name[0]!r} has not joined", name[0])
    if rec.state is CellState.LOST:
        refuse(StaleIncarnationError, w, event, f"cell {rec.id} is lost; a replacement needs a new life", name[0])
    if states and rec.state not in states:
        wanted = " or ".join(states)
        refuse(LateOutcomeError, w, event, f"cell {rec.id} is {rec.state}; expected {wanted}", name[0])
    return rec


def session(w: World, event: object, name: str) -> Session:
    """The live session ``name``."""
    rec = w.sessions.get(name)
    if rec is None:
        refuse(UnknownNameError, w, event, f"no session is called {name!r}; post SessionStarted first", name)
    return rec


def execution(w: World, event: object, name: str, running: bool = True) -> Execution:
    """The execution ``name`` of a group that has not left, running if asked."""
    rec = w.executions.get(name)
    if rec is None:
        refuse(UnknownNameError, w, event, f"no execution is called {name!r}; post ExecutionStarted first", name)
    if running and not rec.running:
        refuse(LateOutcomeError, w, event, f"execution {name!r} does not run", name)
    return rec


def group(w: World, event: object, name: str, *stages: str) -> Group:
    """The group ``name``, in one of ``stages`` if any are given."""
    rec = w.groups.get(name)
    if rec is None:
        refuse(UnknownNameError, w, event, f"no group is called {name!r}; post GroupQueued first", name)
    if stages and rec.stage not in stages:
        refuse(LateOutcomeError, w, event, f"group {name!r} is {rec.stage}; expected {' or '.join(stages)}", name)
    return rec


def lease(w: World, event: object, holder: Cell, number: int) -> Lease | None:
    """The open lease ``number`` if ``holder`` has it; ``None`` if it is closed; refused if it never was its."""
    rec = w.ledger.leases.get(number)
    if rec is None:
        if not (isinstance(number, int) and 0 < number < w.ledger.next_lease):
            refuse(UnknownNameError, w, event, f"lease {number} was never granted")
        return None
    if rec.cell is not holder:
        problem = f"lease {number} is held by {rec.cell.id}, not by {holder.id}"
        refuse(BadValueError, w, event, problem, str(number))
    return rec


def finite(w: World, event: object, **values: float | None) -> None:
    """Refuse numbers that are not finite or below zero."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise BadValueError(event, f"{name} is {value}; expected a finite number that is not negative")


def positive(w: World, event: object, **values: int) -> None:
    """Refuse counts that are not at least one."""
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise BadValueError(event, f"{name} is {value}; expected a whole number of at least 1")
