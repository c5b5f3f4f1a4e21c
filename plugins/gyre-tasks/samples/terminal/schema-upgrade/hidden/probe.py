import os
import sqlite3
import subprocess
import sys
import tempfile

FILE = os.path.join(tempfile.mkdtemp(dir="."), "shop.db")


def make(names=(), prices=()):
    db = sqlite3.connect(FILE)
    db.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    db.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, price TEXT NOT NULL)")
    db.executemany("INSERT INTO customers (name) VALUES (?)", [(name,) for name in names])
    db.executemany("INSERT INTO orders (customer, price) VALUES (1, ?)", [(price,) for price in prices])
    db.execute("PRAGMA user_version = 1")
    db.commit()
    db.close()


def migrate():
    return subprocess.run([sys.executable, "migrate.py", FILE], capture_output=True, text=True, timeout=20)


def ask(query):
    db = sqlite3.connect(FILE)
    try:
        return db.execute(query).fetchall()
    finally:
        db.close()


def names():
    make(["Ada Lovelace", "Jean Luc Picard", "Plato", "Mary Ann van der Berg"])
    migrate()
    assert ask("SELECT first, last FROM customers ORDER BY id") == [
        ("Ada", "Lovelace"), ("Jean Luc", "Picard"), ("", "Plato"), ("Mary Ann van der", "Berg"),
    ]


def cents():
    make(["A B"], ["19.99", "0.29", "5", "1.10", "8.41", "64.15"])
    migrate()
    assert ask("SELECT cents FROM orders ORDER BY id") == [(1999,), (29,), (500,), (110,), (841,), (6415,)]


def again():
    make(["A B"], ["1.00"])
    assert migrate().stdout == "version 3\n"
    done = migrate()
    assert (done.returncode, done.stdout) == (0, "version 3\n")
    assert ask("PRAGMA user_version") == [(3,)]
    assert ask("SELECT cents FROM orders") == [(100,)]


def whole():
    make(["A B"], ["1.00", "1.5", "2.00"])
    done = migrate()
    assert done.returncode == 1 and "order 2" in done.stderr and "Traceback" not in done.stderr
    assert ask("PRAGMA user_version") == [(2,)]
    assert ask("SELECT price FROM orders ORDER BY id") == [("1.00",), ("1.5",), ("2.00",)]
    assert [row[1] for row in ask("PRAGMA table_info(orders)")] == ["id", "customer", "price"]


globals()[sys.argv[1]]()
