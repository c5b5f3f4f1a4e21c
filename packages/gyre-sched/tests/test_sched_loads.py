"""The index of rollout cells against looking at all of them."""

from gyre_sched import CellId
from gyre_sched.loads import Fleet
from gyre_sched.records import Cell
from hypothesis import given, settings
from hypothesis import strategies as st

SLOTS = 3


def make_cell(order):
    cell = Cell(CellId(f"c{order}"), False, order, 0.0)
    cell.slots, cell.kv_tokens, cell.version = SLOTS, 1_000, order % 2
    return cell


def looked_at_all(fleet, version, ok):
    able = [c for c in fleet.members.values() if c.version >= version and ok(c)]
    return min(able, key=lambda c: (c.load(), c.order), default=None)


steps = st.lists(st.tuples(st.sampled_from(["in", "out", "more", "less", "ask"]), st.integers(0, 7)), max_size=120)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_the_least_loaded_cell_is_the_one_that_looking_at_all_finds(steps):
    fleet, cells = Fleet(), [make_cell(i) for i in range(8)]
    for what, i in steps:
        cell = cells[i]
        if what == "in" and i not in fleet.members:
            fleet.add(cell)
        elif what == "out":
            fleet.remove(cell)
        elif what == "more" and cell.calling < SLOTS:
            cell.calling += 1
            fleet.recount(cell)
        elif what == "less" and cell.calling:
            cell.calling -= 1
            fleet.recount(cell)
            fleet.lighter(cell)
        elif what == "ask":
            # Only one cell will do, and the search may pass over as many as there are others.
            found = fleet.least(i % 2, lambda c, i=i: c.order == i, tries=8)
            assert found is looked_at_all(fleet, i % 2, lambda c, i=i: c.order == i)
        assert fleet.least() is looked_at_all(fleet, -1, lambda c: True)
        assert fleet.free == {o for o, c in fleet.members.items() if c.calling < SLOTS}


def test_a_cell_whose_entry_became_valid_again_uses_up_one_try():
    """Emptier and as full as before: its two entries in the index say the same."""
    fleet, full, other = Fleet(), make_cell(0), make_cell(2)
    full.calling, other.calling = 1, 2
    fleet.add(full)
    fleet.add(other)
    for _ in range(20):
        full.calling = 0
        fleet.lighter(full)
        full.calling = 1
        assert fleet.least() is full
    assert fleet.least(-1, lambda c: c is other, tries=2) is other
