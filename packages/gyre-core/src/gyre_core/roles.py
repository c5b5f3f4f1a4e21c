"""What a cell can be and how it gets from one role to the other.

Invariant: `TRANSITIONS` is the only source of legal moves; a cell is in exactly one state, and `LOST` is
reachable from all of them and final for that incarnation. This module does not decide when to switch.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Role(StrEnum):
    """What a cell does for the run."""

    ROLLOUT = "ROLLOUT"
    """Runs an inference engine."""
    TRAIN = "TRAIN"
    """Runs a training replica: the core's, or a satellite's."""


class CellState(StrEnum):
    """Where a cell stands between the roles."""

    JOINING = "JOINING"
    ROLLOUT = "ROLLOUT"
    DRAINING = "DRAINING"
    """Leaves ROLLOUT: takes no new session, its sessions go elsewhere."""
    SWITCHING = "SWITCHING"
    """Changes role: the old role's memory is given back, the new one's taken."""
    TRAIN = "TRAIN"
    FLUSHING = "FLUSHING"
    """Leaves TRAIN: takes no new lease, commits what it has computed."""
    LOST = "LOST"


_LEGAL: dict[CellState, frozenset[CellState]] = {
    CellState.JOINING: frozenset({CellState.ROLLOUT, CellState.TRAIN}),
    CellState.ROLLOUT: frozenset({CellState.DRAINING}),
    CellState.DRAINING: frozenset({CellState.SWITCHING, CellState.ROLLOUT}),
    CellState.SWITCHING: frozenset({CellState.TRAIN, CellState.ROLLOUT}),
    CellState.TRAIN: frozenset({CellState.FLUSHING}),
    CellState.FLUSHING: frozenset({CellState.SWITCHING, CellState.TRAIN}),
    CellState.LOST: frozenset(),
}

TRANSITIONS: Mapping[CellState, frozenset[CellState]] = MappingProxyType(
    {state: nxt | ({CellState.LOST} if state is not CellState.LOST else set()) for state, nxt in _LEGAL.items()}
)
"""Legal successors of each state. A switch that fails goes back to the role the cell came from."""


class TransitionError(ValueError):
    """A cell was moved to a state that its present one does not lead to."""


def check_transition(cell: str, now: CellState, then: CellState, story: str = "") -> None:
    """Raise `TransitionError` unless `now -> then` is legal; `story` is the cell's history, printed in full."""
    if then not in TRANSITIONS[now]:
        legal = ", ".join(sorted(TRANSITIONS[now])) or "nothing (it is lost)"
        tail = f"\nWhat happened to {cell} so far:\n{story}" if story else ""
        raise TransitionError(f"moving cell {cell} from {now} to {then}: from {now} it can go to {legal}.{tail}")


def role_of(state: CellState) -> Role | None:
    """The role whose work a cell in `state` may be given, or None between roles."""
    return {CellState.ROLLOUT: Role.ROLLOUT, CellState.TRAIN: Role.TRAIN}.get(state)
