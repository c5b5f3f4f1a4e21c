"""Takes in a day of payments: intake.py FILE OUT. Writes OUT/totals.csv and OUT/rejected.csv."""

import csv
import re
import sys
from decimal import Decimal
from pathlib import Path

AMOUNT = re.compile(r"-?\d+\.\d\d")


def problem(row):
    if len(row) != 3:
        return f"{len(row)} fields"
    if not row[0].strip():
        return "no customer"
    if not AMOUNT.fullmatch(row[1].strip()):
        return "bad amount"
    return ""


def intake(source, out):
    totals, rejected = {}, []
    with open(source, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        next(reader, None)
        for row in reader:
            if not row:
                continue
            why = problem(row)
            if why:
                rejected.append((reader.line_num, why))
            else:
                name = row[0].strip()
                totals[name] = totals.get(name, Decimal(0)) + Decimal(row[1].strip())
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "totals.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["customer", "total"])
        writer.writerows((name, f"{total:.2f}") for name, total in sorted(totals.items()))
    with open(out / "rejected.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["line", "reason"])
        writer.writerows(rejected)
    return 1 if rejected else 0


if __name__ == "__main__":
    sys.exit(intake(sys.argv[1], Path(sys.argv[2])))
