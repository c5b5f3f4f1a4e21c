"""The small types that exist in two packages say the same, so that plain data passes between them."""

from __future__ import annotations

import gyre_core
import gyre_loss
import gyre_sched
import gyre_tito


def values(enum):
    return {member.value for member in enum}


def test_roles_states_and_transitions_are_the_same():
    assert values(gyre_core.Role) == values(gyre_sched.Role)
    assert values(gyre_core.CellState) == values(gyre_sched.CellState)


def test_cell_ids_are_equal_across_packages():
    assert gyre_core.CellId("cell-1", 2) == gyre_sched.CellId("cell-1", 2)
    assert hash(gyre_core.CellId("cell-1", 2)) == hash(gyre_sched.CellId("cell-1", 2))
    assert str(gyre_core.CellId("cell-1", 2)) == str(gyre_sched.CellId("cell-1", 2))


def test_statuses_are_the_same_and_agree_on_what_trains():
    ends = {status.value: status.trains for status in gyre_core.ExecutionStatus}
    assert {status.value: status.trains for status in gyre_sched.EndStatus} == ends
    assert {status.value: status.trains for status in gyre_loss.Status} == ends
    assert set(ends) <= values(gyre_tito.Status)
