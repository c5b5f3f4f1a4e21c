import ast
import subprocess
import sys
from pathlib import Path

import pytest

GOOD = '"""Stock of a shop."""\n\n\nclass OutOfStockError(Exception):\n    pass\n\n\nclass Inventory:\n    def __init__(self):\n        self._items = {}\n\n    def add(self, name, amount=1):\n        if amount <= 0:\n            raise ValueError("amount must be positive")\n        self._items[name] = self._items.get(name, 0) + amount\n\n    def take(self, name, amount=1):\n        if self._items.get(name, 0) < amount:\n            raise OutOfStockError(name)\n        self._items[name] -= amount\n        if not self._items[name]:\n            del self._items[name]\n\n    def amount(self, name):\n        return self._items.get(name, 0)\n\n    def names(self):\n        return sorted(self._items)\n\n    def merge(self, other):\n        for name in other.names():\n            self.add(name, other.amount(name))\n'
CHANGES = {
    "add replaces": ("self._items.get(name, 0) + amount", "amount"),
    "add takes zero": ("amount <= 0", "amount < 0"),
    "add takes anything": ("raise ValueError(\"amount must be positive\")", "pass"),
    "take takes one more": ("-= amount", "-= amount + 1"),
    "take goes below zero": ("self._items.get(name, 0) < amount", "False"),
    "take says nothing": ("OutOfStockError(name)", "OutOfStockError()"),
    "used up stays": ("del self._items[name]", "pass"),
    "names unsorted": ("sorted(self._items)", "sorted(self._items, reverse=True)"),
    "merge takes one": ("other.amount(name))", "1)"),
    "merge forgets": ("self.add(name, other.amount(name))", "pass"),
}
PORTED = Path("new/inventory_checks.py")


def outcome(folder, code):
    """pytest's exit code on the ported tests and a given inventory.py."""
    (folder / "inventory.py").write_text(code)
    (folder / "inventory_checks.py").write_bytes(PORTED.read_bytes())
    start = f"import sys; sys.path[:0] = {[str(folder)]!r}; sys.path += {sys.path!r}; import pytest; " \
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-c', '/dev/null', '--rootdir', '.', 'inventory_checks.py']))"
    return subprocess.run([sys.executable, "-S", "-c", start], cwd=folder, capture_output=True, timeout=15).returncode


@pytest.fixture(autouse=True)
def ported():
    tree = ast.parse(PORTED.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert "unittest" not in names
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]


def test_it_passes_on_the_right_code(tmp_path):
    assert outcome(tmp_path, GOOD) == 0


@pytest.mark.parametrize("name", CHANGES)
def test_it_finds(name, tmp_path):
    assert outcome(tmp_path, GOOD) == 0
    old, new = CHANGES[name]
    assert GOOD.count(old) == 1
    assert outcome(tmp_path, GOOD.replace(old, new)) == 1
