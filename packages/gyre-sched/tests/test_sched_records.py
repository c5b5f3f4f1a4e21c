"""Events and commands are plain frozen data that other packages can build without importing core."""

import dataclasses

import pytest
from gyre_sched import commands, events
from gyre_sched.ids import CellId


@pytest.mark.parametrize("kind", events.ALL_EVENTS + commands.ALL_COMMANDS)
def test_records_are_frozen_slotted_and_documented(kind):
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert hasattr(kind, "__slots__")
    assert kind.__doc__


@pytest.mark.parametrize("kind", events.ALL_EVENTS)
def test_time_comes_first_in_every_event(kind):
    assert dataclasses.fields(kind)[0].name == "time"


def test_cell_id_equals_any_tuple_of_the_same_shape():
    assert CellId("a", 2) == ("a", 2)
    assert {("a", 2): 1}[CellId("a", 2)] == 1
    assert str(CellId("a", 2)) == "a#2"
