"""Probes: some hidden tests with an end that cannot hold, for a second judging of the same work.

Code under test runs in the process that judges it and can find the judge in its memory: the guard's own checks (see
`guard`) are told apart by whoever reaches into it. So work that passed is judged again with a few tests changed where
they stand: one more assertion at their end, which is false. Invariant: nothing else differs, neither names nor order;
an honest work passes the same tests again and fails a probe at its last line alone; whoever makes tests pass by other
means passes a probe too, or tells two stories, unless he reads the suite line by line. Pure. Not here: running
anything.
"""

from __future__ import annotations

import ast
import posixpath
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MOST = 3
"""Probes of one file."""
_ONE_IN = 10
"""Tests for each probe of a file after the first."""
_PLAIN = ("mark", "patch", "skip", "skipIf", "skipUnless", "staticmethod", "classmethod")
"""Decorators (one of the words of their dotted name) under which a test that fails has failed."""
Scope = ast.Module | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Probes:
    """A suite's files with probes in them."""

    files: Mapping[str, bytes]
    names: frozenset[str] = frozenset()
    """Ids of the changed tests, without parameters."""
    ends: frozenset[str] = frozenset()
    """What the evidence of a test that failed at a probe's last line has in it."""

    def among(self, test: str) -> bool:
        """Whether a test's id is that of a changed one."""
        return test.partition("[")[0] in self.names

    def reached(self, why: str) -> bool:
        """Whether this is how a test fails whose own checks all held; also one that inherited a probe."""
        return any(end in why for end in self.ends)


def with_probes(files: Mapping[str, bytes], chance: random.Random) -> Probes:
    """Change some tests of each test file; a file that cannot be read as Python stays as it is."""
    made, names, ends = dict(files), set[str](), set[str]()
    for path, data in files.items():
        file = path.rpartition("/")[2]
        if file.endswith(".py") and (file.startswith("test_") or file.endswith("_test.py")):
            try:
                text, changed = _changed(data.decode(), chance)
            except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            made[path] = text.encode()
            names |= {f"{posixpath.normpath(path)}::{name}" for name in changed}
            ends |= set(changed.values())
    return Probes(made, frozenset(names), frozenset(ends))


def _changed(text: str, chance: random.Random) -> tuple[str, dict[str, str]]:
    """The file's new text, and what the evidence of each changed test has in it. ValueError if it did not come out."""
    tests = list(_tests(ast.parse(text), ""))
    usable = [(name, test) for name, test, alone in tests if alone and _is_plain(test)]
    chosen = chance.sample(usable, min(len(usable), _MOST, 1 + len(tests) // _ONE_IN))
    lines, ends = text.split("\n"), dict[str, str]()
    for name, test in sorted(
        chosen, key=lambda each: -each[1].lineno
    ):  # from the end: lines before stay where they are
        left, right = chance.sample(range(100_000, 1_000_000), 2)
        assert test.end_lineno is not None
        lines.insert(test.end_lineno, " " * test.body[0].col_offset + f"assert {left} == {right}, {left}")
        ends[name] = str(left)
    new = "\n".join(lines)
    last = {name: ast.unparse(test.body[-1]) for name, test, _ in _tests(ast.parse(new), "")}
    if any(not last.get(name, "").startswith(f"assert {end} == ") for name, end in ends.items()):
        raise ValueError("a probe is not the end of its test")
    return new, ends


def _tests(scope: Scope, prefix: str) -> Iterator[tuple[str, ast.FunctionDef, bool]]:
    """Tests: id within the file, function, whether nothing else in its scope has its name."""
    named = Counter(_bound(scope))
    for node in scope.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, node, named[node.name] == 1
        elif isinstance(node, ast.ClassDef):
            yield from _tests(node, f"{prefix}{node.name}::")


def _bound(scope: Scope) -> Iterator[str]:
    """Names that a scope's statements bind or delete, also inside of branches."""
    ahead: list[ast.AST] = list(scope.body)
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        else:
            ahead += ast.iter_child_nodes(node)


def _is_plain(test: ast.FunctionDef) -> bool:
    """Whether the end of its body is reached when nothing failed, and failing there is what its failing is."""
    for decorator in test.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        words = {node.attr if isinstance(node, ast.Attribute) else node.id for node in ast.walk(called)
                 if isinstance(node, ast.Attribute | ast.Name)}  # fmt: skip
        if not words & set(_PLAIN) or "xfail" in words:
            return False
    if test.body[0].lineno == test.lineno:  # all on one line
        return False
    ahead: list[ast.AST] = list(test.body)
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom | ast.Raise):
            return False
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            ahead += ast.iter_child_nodes(node)
    return True
