import dataclasses

import pytest


@pytest.fixture
def trips():
    import trips

    return trips


def test_it_is_a_frozen_dataclass_with_slots(trips):
    assert dataclasses.is_dataclass(trips.Trip)
    trip = trips.Trip("red", 10, 30)
    assert not hasattr(trip, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        trip.car = "blue"


def test_fields_in_order(trips):
    names = [field.name for field in dataclasses.fields(trips.Trip)]
    assert names == ["car", "start_km", "end_km", "fuel", "tags"]
    assert trips.Trip("red", 1, 2).tags == ()


def test_equal_trips_are_equal_and_hash_alike(trips):
    one, two = trips.Trip("red", 1, 2, 0.5), trips.Trip("red", 1, 2, 0.5)
    assert one == two
    assert len({one, two}) == 1


def test_a_trip_that_ends_before_it_starts(trips):
    with pytest.raises(ValueError, match="before it starts"):
        trips.Trip("red", 5, 4)


def test_replacing_checks_again(trips):
    with pytest.raises(ValueError):
        dataclasses.replace(trips.Trip("red", 5, 6), end_km=1)


def test_distance_and_consumption(trips):
    trip = trips.Trip("red", 100, 350, 15.0)
    assert (trip.distance, trip.consumption) == (250, 6.0)
    assert trips.Trip("red", 1, 2).consumption is None
    assert trips.Trip("red", 2, 2, 1.0).consumption is None


def test_tagging_makes_a_new_trip(trips):
    trip = trips.Trip("red", 1, 2)
    tagged = trip.tagged("rain").tagged("night")
    assert (trip.tags, tagged.tags) == ((), ("rain", "night"))


def test_parse(trips):
    assert trips.Trip.parse("red;10;30;2.5") == trips.Trip("red", 10, 30, 2.5)
    assert trips.Trip.parse("red;10;30") == trips.Trip("red", 10, 30, None)
    with pytest.raises(ValueError):
        trips.Trip.parse("red;30;10")


def test_longest(trips):
    short, long = trips.Trip("red", 1, 2), trips.Trip("blue", 5, 50)
    assert trips.longest([short, long]) is long
    assert trips.longest([]) is None


def test_by_car(trips):
    a, b, c = trips.Trip("red", 1, 2), trips.Trip("blue", 5, 50), trips.Trip("red", 2, 9)
    assert trips.by_car([a, b, c]) == {"red": (a, c), "blue": (b,)}
