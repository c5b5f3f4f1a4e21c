"""A journal of measurements in a file of JSON lines: a change appends, a question reads line by line."""

import csv
import json
import os


class Journal:
    def __init__(self, path):
        self.path = path

    def _mend(self):
        """Cut off a last line that was not written to its end."""
        if not os.path.exists(self.path):
            return
        with open(self.path, "rb+") as file:
            data = file.read()
            end = data.rfind(b"\n") + 1
            if end < len(data):
                file.truncate(end)

    def append(self, time, sensor, value, note=""):
        line = json.dumps({"time": time, "sensor": sensor, "value": value, "note": note}, ensure_ascii=False)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self):
        if not os.path.exists(self.path):
            return
        with open(self.path, encoding="utf-8") as file:
            for line in file:
                row = json.loads(line)
                yield row["time"], row["sensor"], row["value"], row["note"]

    def last(self, sensor):
        found = None
        for row in self.rows():
            if row[1] == sensor:
                found = row
        return found

    def mean(self, sensor):
        total, count = 0.0, 0
        for row in self.rows():
            if row[1] == sensor:
                total, count = total + row[2], count + 1
        return total / count if count else None
