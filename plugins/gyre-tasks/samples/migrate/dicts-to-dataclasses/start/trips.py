"""Trips of a car-sharing club, as dicts."""


def make_trip(car, start_km, end_km, fuel=None):
    if end_km < start_km:
        raise ValueError("a trip cannot end before it starts")
    return {"car": car, "start_km": start_km, "end_km": end_km, "fuel": fuel, "tags": []}


def distance(trip):
    return trip["end_km"] - trip["start_km"]


def consumption(trip):
    if trip["fuel"] is None or distance(trip) == 0:
        return None
    return round(100 * trip["fuel"] / distance(trip), 1)


def tag(trip, name):
    trip["tags"].append(name)
    return trip


def longest(trips):
    return max(trips, key=distance) if trips else None


def by_car(trips):
    grouped = {}
    for trip in trips:
        grouped.setdefault(trip["car"], []).append(trip)
    return grouped


def parse(line):
    car, start, end, *rest = line.split(";")
    return make_trip(car, int(start), int(end), float(rest[0]) if rest else None)
