"""A journal of measurements in a CSV file: all is read for every question and written for every change."""

import csv
import os

FIELDS = ["time", "sensor", "value", "note"]


class Journal:
    def __init__(self, path):
        self.path = path

    def _load(self):
        if not os.path.exists(self.path):
            return []
        with open(self.path, newline="") as file:
            return list(csv.DictReader(file))

    def append(self, time, sensor, value, note=""):
        rows = self._load()
        rows.append({"time": time, "sensor": sensor, "value": value, "note": note})
        with open(self.path, "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)

    def rows(self):
        for row in self._load():
            yield int(row["time"]), row["sensor"], float(row["value"]), row["note"]

    def last(self, sensor):
        found = [row for row in self.rows() if row[1] == sensor]
        return found[-1] if found else None

    def mean(self, sensor):
        values = [row[2] for row in self.rows() if row[1] == sensor]
        return sum(values) / len(values) if values else None
