"""Trips of a car-sharing club, as frozen dataclasses."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Trip:
    car: str
    start_km: int
    end_km: int
    fuel: float | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self):
        if self.end_km < self.start_km:
            raise ValueError("a trip cannot end before it starts")

    @property
    def distance(self):
        return self.end_km - self.start_km

    @property
    def consumption(self):
        if self.fuel is None or self.distance == 0:
            return None
        return round(100 * self.fuel / self.distance, 1)

    def tagged(self, name):
        return replace(self, tags=(*self.tags, name))

    @classmethod
    def parse(cls, line):
        car, start, end, *rest = line.split(";")
        return cls(car, int(start), int(end), float(rest[0]) if rest else None)


def longest(trips):
    return max(trips, key=lambda trip: trip.distance, default=None)


def by_car(trips):
    grouped = {}
    for trip in trips:
        grouped.setdefault(trip.car, []).append(trip)
    return {car: tuple(found) for car, found in grouped.items()}
