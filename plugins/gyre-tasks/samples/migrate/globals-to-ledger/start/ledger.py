"""An account book. Everything is in the module."""

import time

accounts = {}
journal = []
listeners = []
limit = 10_000


def open_account(name):
    if name in accounts:
        raise ValueError(f"{name} exists")
    accounts[name] = 0


def book(source, target, amount):
    global journal
    if amount <= 0:
        raise ValueError("amount must be positive")
    if amount > limit:
        raise ValueError("over the limit")
    if accounts[source] < amount and source != "bank":
        raise ValueError(f"{source} has only {accounts[source]}")
    accounts[source] -= amount
    accounts[target] += amount
    entry = (time.time(), source, target, amount)
    journal.append(entry)
    for listener in listeners:
        listener(entry)
    return len(journal) - 1


def undo(number):
    when, source, target, amount = journal[number]
    accounts[source] += amount
    accounts[target] -= amount
    journal.append((time.time(), target, source, amount))


def statement(name):
    return [(s, t, a) for _, s, t, a in journal if name in (s, t)]


def reset():
    global journal
    accounts.clear()
    journal = []
