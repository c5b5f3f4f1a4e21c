"""Takes in a day of payments: intake.py FILE OUT. Writes OUT/totals.csv and OUT/rejected.csv."""

import sys
from pathlib import Path


def intake(source, out):
    totals = {}
    lines = Path(source).read_text().splitlines()
    for line in lines[1:]:
        customer, amount, note = line.split(",")
        totals[customer] = totals.get(customer, 0.0) + float(amount)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "totals.csv", "w") as file:
        file.write("customer,total\n")
        for customer in sorted(totals):
            file.write(f"{customer},{totals[customer]:.2f}\n")
    (out / "rejected.csv").write_text("line,reason\n")


if __name__ == "__main__":
    intake(sys.argv[1], Path(sys.argv[2]))
