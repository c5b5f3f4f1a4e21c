"""Upgrades a database of the shop: migrate.py FILE. The version is in PRAGMA user_version."""

import sqlite3
import sys


def to_2(db):
    """One name becomes a first and a last name."""
    db.execute("ALTER TABLE customers ADD COLUMN first TEXT NOT NULL DEFAULT ''")
    db.execute("ALTER TABLE customers ADD COLUMN last TEXT NOT NULL DEFAULT ''")
    for number, name in db.execute("SELECT id, name FROM customers").fetchall():
        first, _, last = name.rpartition(" ")
        db.execute("UPDATE customers SET first = ?, last = ? WHERE id = ?", (first, last, number))
    db.execute("ALTER TABLE customers DROP COLUMN name")


def to_3(db):
    """Prices as text become cents."""
    db.execute("ALTER TABLE orders ADD COLUMN cents INTEGER NOT NULL DEFAULT 0")
    for number, price in db.execute("SELECT id, price FROM orders").fetchall():
        whole, point, part = price.partition(".")
        db.execute("UPDATE orders SET cents = ? WHERE id = ?", (int(float(price) * 100), number))
    db.execute("ALTER TABLE orders DROP COLUMN price")


STEPS = {1: to_2, 2: to_3}


def migrate(path):
    db = sqlite3.connect(path, isolation_level=None)
    version = db.execute("PRAGMA user_version").fetchone()[0]
    while version in STEPS:
        try:
            STEPS[version](db)
            db.execute(f"PRAGMA user_version = {version + 1}")
        except Exception:
            raise
        version += 1
    db.close()
    return version


if __name__ == "__main__":
    try:
        print("version", migrate(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
