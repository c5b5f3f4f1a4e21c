"""Probes: some hidden tests changed so that they cannot hold, for a second judging of the same work.

Code under test runs in the process that judges it and can find the judge in its memory: the guard's own checks (see
`guard`) are told apart by whoever reaches into it. So work that passed is judged again with a few of the tests that
passed changed where they stand. One whose last statement says what something equals is told that it equals something
else; any other has one more assertion at its end, which is false. Invariant: nothing else differs, neither names nor
order; an honest work passes the same tests again and fails a probe at its last statement alone; whoever makes tests
pass by other means, by a value that equals everything or by reading in its caller what is wanted, passes a probe too,
or tells two stories, unless he reads the suite line by line. Pure. Not here: running anything.
"""

from __future__ import annotations

import ast
import posixpath
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_MOST = 8
"""Probes of one file."""
_ONE_IN = 5
"""Tests for each probe of a file after the first."""
_PLAIN = ("mark", "patch", "skip", "skipIf", "skipUnless", "staticmethod", "classmethod")
"""Decorators (one of the words of their dotted name) under which a test that fails has failed."""
_EQUAL = ("assertEqual", "assertEquals", "assertAlmostEqual", "assertListEqual", "assertDictEqual")
"""Methods of a test case that say what something equals."""
_OTHER = (
    "(lambda e: -e - {k} if type(e) in (int, float) else e + '{k}' if type(e) is str else e + b'{k}' "
    "if type(e) is bytes else [*e, {k}] if type(e) is list else (*e, {k}) if type(e) is tuple else {{**e, {k}: {k}}} "
    "if type(e) is dict else {{*e, {k}}} if type(e) is set else not e if type(e) is bool else {k} if e is None "
    "else (_ for _ in ()).throw(AssertionError()))("
)
"""Around a value that is not written out: another one of the same kind; for other kinds the test fails right there."""
Scope = ast.Module | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Probes:
    """A suite's files with probes in them."""

    files: Mapping[str, bytes]
    names: frozenset[str] = frozenset()
    """Ids of the changed tests, without parameters."""
    ends: frozenset[str] = frozenset()
    """Where a probe fails whose own checks all held, as file and line."""
    able: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """File -> ids of its tests that can be a probe."""
    unable: frozenset[str] = frozenset()
    """Ids of tests that cannot."""

    def among(self, test: str) -> bool:
        """Whether a test's id is that of a changed one."""
        return plain(test) in self.names

    def reached(self, at: str) -> bool:
        """Whether a test that failed there failed at a probe's end; also one that inherited it."""
        return at in self.ends

    def beyond(self, test: str) -> bool:
        """Whether no probe could speak for a test: it stands in the suite and is not fit, or none of its file is."""
        return plain(test) in self.unable or self.able.get(file_of(test)) == frozenset()


def plain(test: str) -> str:
    """A test's id without its parameters."""
    return test.partition("[")[0]


def file_of(test: str) -> str:
    """The file in a test's id."""
    return test.partition("::")[0]


def with_probes(files: Mapping[str, bytes], chance: random.Random, passed: Iterable[str]) -> Probes:
    """Change some of each file's tests that passed; a file that cannot be read as Python stays as it is."""
    made, names, ends = dict(files), set[str](), set[str]()
    able = {posixpath.normpath(path): frozenset[str]() for path in files}
    unable: set[str] = set()
    good = {plain(test).rpartition("::")[2] for test in passed}  # also what another class inherited
    for path, data in files.items():
        file, place = path.rpartition("/")[2], posixpath.normpath(path)
        if file.endswith(".py") and (file.startswith("test_") or file.endswith("_test.py")):
            try:
                text = data.decode()
                tests = [(f"{place}::{name}", test, alone) for name, test, alone in _tests(ast.parse(text), "")]
                usable = {name: test for name, test, alone in tests if alone and _is_plain(test)}
                candidates = [name for name in usable if name.rpartition("::")[2] in good]
                number = min(len(candidates), _MOST, 1 + len(tests) // _ONE_IN)
                chosen = {name: usable[name] for name in chance.sample(candidates, number)}
                text, new = _changed(text, chosen, place, chance)
            except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            made[path] = text.encode()
            able[place] = frozenset(usable)
            unable |= {name for name, _, _ in tests} - set(usable)
            names |= set(chosen)
            ends |= new
    return Probes(made, frozenset(names), frozenset(ends), able, frozenset(unable))


def _changed(
    text: str, chosen: Mapping[str, ast.FunctionDef], place: str, chance: random.Random
) -> tuple[str, set[str]]:
    """The file's new text, and the places of the changed tests' ends. ValueError if it did not come out."""
    lines = [line.encode() for line in text.split("\n")]
    # From the end: what stands before stays where it is.
    for test in sorted(chosen.values(), key=lambda each: -each.lineno):
        _change(lines, test, chance.sample(range(100_001, 1_000_000, 2), 2))
    new = b"\n".join(lines).decode()
    before = {f"{place}::{name}": test for name, test, _ in _tests(ast.parse(text), "")}
    after = {f"{place}::{name}": test for name, test, _ in _tests(ast.parse(new), "")}
    ends: set[str] = set()
    for name, test in after.items():
        if name not in before or (ast.dump(test) != ast.dump(before[name])) != (name in chosen):
            raise ValueError("other tests were changed than those that were chosen")
        if name in chosen:
            last = test.body[-1]
            ends |= {f"{place}:{line}" for line in range(last.lineno, (last.end_lineno or last.lineno) + 1)}
    return new, ends


def _change(lines: list[bytes], test: ast.FunctionDef, numbers: list[int]) -> None:
    k, other = numbers
    value = _wanted(test.body[-1])
    if isinstance(value, ast.UnaryOp):
        value = value.operand if isinstance(value.operand, ast.Constant) else value
    assert test.end_lineno is not None
    match value:
        case None:
            lines.insert(test.end_lineno, (" " * test.body[0].col_offset + f"assert {k} == {other}").encode())
        case ast.Constant(str()):
            _insert(lines, value.end_lineno, value.end_col_offset, f" '{k}'")
        case ast.Constant(bytes()):
            _insert(lines, value.end_lineno, value.end_col_offset, f" b'{k}'")
        case ast.Constant(bool() | int() | float() | None as old):
            new = repr(not old if isinstance(old, bool) else k if old is None else old + k if old + k != old else k)
            _insert(lines, value.lineno, value.col_offset, new, value.end_col_offset)
        case ast.List() | ast.Tuple() | ast.Set():
            _insert(lines, value.lineno, value.col_offset + 1, f"{k}, ")
        case ast.Dict():
            _insert(lines, value.lineno, value.col_offset + 1, f"{k}: {k}, ")
        case _:
            _insert(lines, value.end_lineno, value.end_col_offset, ")")
            _insert(lines, value.lineno, value.col_offset, _OTHER.format(k=k))


def _insert(lines: list[bytes], line: int | None, column: int | None, text: str, up_to: int | None = None) -> None:
    assert line is not None
    old = lines[line - 1]
    lines[line - 1] = old[:column] + text.encode() + old[column if up_to is None else up_to :]


def _wanted(last: ast.stmt) -> ast.expr | None:
    """Of a statement that says what something equals: the suite's side."""
    match last:
        case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
            pass
        case ast.Assert(ast.Call(ast.Attribute(_, "isclose"), [left, right, *_])):
            pass
        case ast.Expr(ast.Call(ast.Attribute(_, name), [left, right, *_])) if name in _EQUAL:
            pass
        case _:
            return None
    if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
        return None
    return _value(left, right)


def _value(left: ast.expr, right: ast.expr) -> ast.expr:
    """Which side is the suite's: one that is written out, or that calls nothing; otherwise the right."""
    calls = [any(isinstance(node, ast.Call) for node in ast.walk(side)) for side in (left, right)]
    written = [isinstance(side, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set) for side in (left, right)]
    if written != [False, True] and (written == [True, False] or calls == [False, True]):
        right = left
    if isinstance(right, ast.Call) and right.args and ast.unparse(right.func).rpartition(".")[2] == "approx":
        return right.args[0]
    return right


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
