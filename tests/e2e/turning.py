"""A policy of these tests' own: a cell turns because of what it holds, however fast the machine is.

It goes to training while sessions rest on it between two calls, so that they have to move, and comes back. Invariant:
as of any policy, all that it knows is in the view. It is no good policy: a turn brings nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre_core import ComponentContext
from gyre_sched import CellState, Role, Turn
from gyre_sched.view import View

CELL = "cell-3"
TURNS = 6
RESTING = 2
"""Sessions that rest on the cell when it is turned: one may be about to end."""


class Turning:
    """Turns `CELL`, `TURNS` times in all."""

    def __init__(self, options: None, context: ComponentContext) -> None:
        del options, context

    def __call__(self, view: View) -> Sequence[Turn]:
        """The turns to begin now."""
        cell = view.cell(CELL)
        if cell is None or view.transit_room <= 0 or view.switches >= TURNS:
            return ()
        resting = cell.sessions - cell.calling
        if cell.state is CellState.ROLLOUT and view.rollout_count > 1 and resting >= RESTING:
            return (Turn(cell.id, Role.TRAIN, f"{resting} sessions rest on it"),)
        if cell.state is CellState.TRAIN and cell.lease is None:
            return (Turn(cell.id, Role.ROLLOUT, "it computes nothing"),)
        return ()
