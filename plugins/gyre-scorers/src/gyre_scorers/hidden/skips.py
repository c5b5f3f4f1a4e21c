"""Which tests of a hidden suite can be skipped, or be expected to fail, by the suite's own words.

A skip is told by the process in which the code under test runs, so it can be forged: raised under the test file's
name, or reported in the guard's. Invariant: a test may skip only where the text of the suite speaks of it: in the test
itself with its decorators, in what surrounds the tests of its file or of a test file that it imports, or in a helper
of the suite. Everywhere else a skip is a failure. What this cannot tell: a forged skip of a test that may skip. Pure.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SPOKEN = re.compile(r"skip|xfail|expectedfailure", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Skips:
    """What may skip: everything, whole files, or tests by their function's name in whichever file it stands."""

    all: bool
    files: frozenset[str]
    names: frozenset[str]

    def allow(self, test: str) -> bool:
        """Whether the test of this id may be skipped."""
        path, _, inner = test.partition("[")[0].partition("::")
        return self.all or path in self.files or inner.rpartition("::")[2] in self.names


def read_skips(files: Mapping[str, bytes]) -> Skips:
    """Read a suite's files, path -> content."""
    texts = {posixpath.normpath(path): data.decode("utf-8", "replace") for path, data in files.items()}
    helped = any(_SPOKEN.search(text) for path, text in texts.items() if path.endswith(".py") and not _is_test(path))
    own: set[str] = set()
    names: set[str] = set()
    imports: dict[str, set[str]] = {}
    for path, text in texts.items():
        if path.endswith(".py") and not _is_test(path):
            continue
        try:
            tree = ast.parse(text) if path.endswith(".py") else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            tree = None
        if tree is None:
            own |= {path} if _SPOKEN.search(text) else set()
            continue
        around, tests = _parts(tree, text)
        own |= {path} if _SPOKEN.search(around) else set()
        names |= {name for name, source in tests if _SPOKEN.search(source)}
        imports[path] = set(_imported(tree))
    return Skips(helped, frozenset(_reached(own, imports)), frozenset(names))


def _is_test(path: str) -> bool:
    file = posixpath.basename(path)
    return file.startswith("test_") or file.endswith("_test.py")


def _parts(tree: ast.Module, text: str) -> tuple[str, list[tuple[str, str]]]:
    """A file's text without its tests, and each test's name and text with its decorators."""
    lines = text.split("\n")
    tests: list[tuple[str, str]] = []
    around = list(lines)
    for node in _tests(tree):
        first = min(part.lineno for part in (node, *node.decorator_list)) - 1
        last = node.end_lineno or node.lineno
        tests.append((node.name, "\n".join(lines[first:last])))
        around[first:last] = [""] * (last - first)
    return "\n".join(around), tests


def _tests(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("test"):
                yield node
        elif isinstance(node, ast.ClassDef):
            yield from _tests(node)


def _imported(tree: ast.Module) -> Iterator[str]:
    """Last parts of the names of modules that may be meant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for name in (module, *(alias.name for alias in node.names)):
                yield name.rpartition(".")[2]


def _reached(own: set[str], imports: Mapping[str, set[str]]) -> set[str]:
    """With every file that imports one of them, however far."""
    found, grown = set(own), True
    while grown:
        stems = {posixpath.basename(path).removesuffix(".py") for path in found}
        more = {path for path, names in imports.items() if names & stems} - found
        found, grown = found | more, bool(more)
    return found
