"""An account book without state in the module."""

import time


class Ledger:
    def __init__(self, limit=10_000, clock=time.time):
        self.limit, self._clock = limit, clock
        self._accounts, self._journal, self._listeners = {}, [], []

    @property
    def balances(self):
        return dict(self._accounts)

    @property
    def journal(self):
        return tuple(self._journal)

    def listen(self, listener):
        """Returns a function that ends the listening."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def open_account(self, name):
        if name in self._accounts:
            raise ValueError(f"{name} exists")
        self._accounts[name] = 0

    def book(self, source, target, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.limit:
            raise ValueError("over the limit")
        for name in (source, target):
            if name not in self._accounts:
                raise KeyError(name)
        if self._accounts[source] < amount and source != "bank":
            raise ValueError(f"{source} has only {self._accounts[source]}")
        return self._move(source, target, amount)

    def _move(self, source, target, amount):
        self._accounts[source] -= amount
        self._accounts[target] += amount
        entry = (self._clock(), source, target, amount)
        self._journal.append(entry)
        for listener in tuple(self._listeners):
            listener(entry)
        return len(self._journal) - 1

    def undo(self, number):
        _, source, target, amount = self._journal[number]
        return self._move(target, source, amount)

    def statement(self, name):
        return [(s, t, a) for _, s, t, a in self._journal if name in (s, t)]
