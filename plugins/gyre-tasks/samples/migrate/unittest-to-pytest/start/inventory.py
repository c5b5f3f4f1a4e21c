"""Stock of a shop."""


class OutOfStockError(Exception):
    pass


class Inventory:
    def __init__(self):
        self._items = {}

    def add(self, name, amount=1):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self._items[name] = self._items.get(name, 0) + amount

    def take(self, name, amount=1):
        if self._items.get(name, 0) < amount:
            raise OutOfStockError(name)
        self._items[name] -= amount
        if not self._items[name]:
            del self._items[name]

    def amount(self, name):
        return self._items.get(name, 0)

    def names(self):
        return sorted(self._items)

    def merge(self, other):
        for name in other.names():
            self.add(name, other.amount(name))
