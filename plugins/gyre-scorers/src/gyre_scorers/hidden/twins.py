"""Twins: copies of some hidden tests, under names of the same kind, that end in an assertion which cannot hold.

The guard's own checks (see `guard`) are told apart by whoever reaches into it; a twin calls the code under test as the
test beside it does, and only this side knows its name. So whoever makes tests pass, by whatever means, makes twins pass
too, unless he reads the suite line by line. Twins run after the tests of their class or file, so that what they leave
behind meets no test there. Invariant: a twin that passed, or that a whole run left without a result, makes the run
void; a twin is in no score. Pure. Not here: running anything.
"""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ENDINGS = ("again", "twice", "more", "other", "edge", "plain", "first", "last", "small", "large", "empty", "mixed")
_MOST = 3
"""Twins of one file."""
_ONE_IN = 10
"""Tests for each twin after the first."""
Function = ast.FunctionDef
NO_TWIN = ("given", "expectedFailure")
"""Decorators (their last name) of tests that would try a twin many times over, or take its failure for success."""


@dataclass(frozen=True, slots=True)
class Twins:
    """A suite's files with twins in them, and the twins' names by file."""

    files: Mapping[str, bytes]
    names: Mapping[str, frozenset[str]]

    def among(self, test: str) -> bool:
        """Whether a test's id is a twin's."""
        path, _, rest = test.partition("::")
        return rest.rpartition("::")[2].partition("[")[0] in self.names.get(path, ())


def with_twins(files: Mapping[str, bytes], chance: random.Random) -> Twins:
    """Put twins into the test files. One that cannot be read as Python stays as it is."""
    made, names = dict(files), {}
    for path, data in files.items():
        file = path.rpartition("/")[2]
        if file.endswith(".py") and (file.startswith("test_") or file.endswith("_test.py")):
            made[path], names[path] = _twinned(data, chance)
    return Twins(made, names)


def _twinned(data: bytes, chance: random.Random) -> tuple[bytes, frozenset[str]]:
    try:
        text = data.decode()
        tree = ast.parse(text)
    except (UnicodeDecodeError, SyntaxError, ValueError):
        return data, frozenset()
    tests = list(_tests(tree))
    usable = [(test, scope) for test, scope in tests if not _leaves_early(test) and not _unfit(test)]
    chosen = chance.sample(usable, min(len(usable), _MOST, 1 + len(tests) // _ONE_IN))
    lines, added, names = text.split("\n"), list[tuple[int, bool, list[str]]](), []
    for test, scope in chosen:
        name = _name(test.name, text, chance)
        names.append(name)
        indent = " " * test.col_offset
        assert test.end_lineno is not None
        added.append((test.end_lineno, False, ["", *(indent + line for line in _lines(test, f"_{name}", chance))]))
        # Bound to a test's name only at the end: pytest takes tests in the order in which their names came.
        end = scope.end_lineno if isinstance(scope, ast.ClassDef) else len(lines)
        assert end is not None
        added.append((end, True, [f"{indent}{name} = _{name}", f"{indent}del _{name}"]))
    for line, _, more in sorted(
        added, reverse=True
    ):  # last line first; at one line names first, so bodies precede them
        lines[line:line] = more
    twinned = "\n".join(lines)
    try:
        ast.parse(twinned)
    except (SyntaxError, ValueError):
        return data, frozenset()
    return twinned.encode(), frozenset(names)


def _tests(scope: ast.Module | ast.ClassDef) -> Iterator[tuple[Function, ast.Module | ast.ClassDef]]:
    """Tests with the class or module that they stand in."""
    for node in scope.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield node, scope
        elif isinstance(node, ast.ClassDef):
            yield from _tests(node)


def _unfit(test: Function) -> bool:
    """Whether a decorator says that failing once, and for good, is not what its failing would be."""
    for decorator in test.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in NO_TWIN:
            return True
    return False


def _leaves_early(test: Function) -> bool:
    """Whether its end may not be reached though nothing failed."""
    ahead: list[ast.AST] = list(test.body)
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            ahead += ast.iter_child_nodes(node)
    return False


def _name(real: str, text: str, chance: random.Random) -> str:
    """A name that the file does not have."""
    name = f"{real}_{chance.choice(_ENDINGS)}"
    while name in text:
        name = f"{name}_{chance.choice(_ENDINGS)}"
    return name


def _lines(test: Function, name: str, chance: random.Random) -> list[str]:
    twin = copy.deepcopy(test)
    twin.name = name
    left, right = chance.sample(range(100), 2)
    twin.body.append(ast.parse(f"assert {left} == {right}").body[0])
    return ast.unparse(ast.fix_missing_locations(twin)).splitlines()
