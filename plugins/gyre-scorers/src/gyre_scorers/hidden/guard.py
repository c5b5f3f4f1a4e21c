"""Runs inside the sandbox, read from standard input: pytest on the hidden suite, each result signed.

Invariant: a result counts only as a line signed with a key that came on standard input; what the code under test prints
goes nowhere, and a fork of this process reports nothing. Tests that must fail are mixed in under real names; if one of
them passes, or pytest's or unittest's code is not what it was before the code under test was imported, or a test's code
not what was collected, the whole run says so and is void. A test whose code is not of the suite's own text has failed.
Uses the standard library and the pytest brought along; needs Python 3.10. What this cannot stop: code that reads the
suite and then reaches into this module.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hmac
import json
import os
import random
import signal
import sys
import time
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

WATCHED = ("_pytest", "pytest", "pluggy", "unittest")
REPLACED_BY_PYTEST = ("_getini_unknown_type",)
"""What pytest's own plugins replace when it starts."""


def reporter(fd: int, key: bytes) -> Callable[[dict[str, Any]], None]:
    """A function that writes one signed line; what it uses is bound now, before any foreign code runs.

    Silent in a fork of this process: one that the code under test made and that strayed back into pytest is no judge.
    """
    digest, dumps, write, count = hmac.digest, json.dumps, os.write, iter(range(1 << 60))
    process, own = os.getpid, os.getpid()

    def report(record: dict[str, Any]) -> None:
        if process() != own:
            return
        text = dumps({**record, "n": next(count)}).encode()
        line = b"\n" + digest(key, text, "sha256").hex().encode() + b" " + text + b"\n"
        while line:
            line = line[write(fd, line) :]

    return report


class Texts:
    """What the suite's own text compiles to, found before any foreign code runs.

    Whoever writes other tests into the files, or hands other text to the import, does not get them to count.
    """

    def __init__(self, root: str, files: list[str]) -> None:
        from _pytest.assertion.rewrite import rewrite_asserts

        self.codes: set[types.CodeType] = set()
        self.data: dict[str, bytes] = {}
        self.trusted = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})
        for path in files:
            place = os.path.normpath(os.path.join(root, path))
            with open(place, "rb") as file:
                data = self.data[place] = file.read()
            if place.endswith(".py"):
                with (
                    contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError),
                    warnings.catch_warnings(),
                ):
                    warnings.simplefilter("ignore")
                    self._add(compile(data, place, "exec", dont_inherit=True))
                    tree = ast.parse(data, place)
                    rewrite_asserts(tree, data, place)
                    self._add(compile(tree, place, "exec", dont_inherit=True))

    def _add(self, code: types.CodeType) -> None:
        self.codes.add(code)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                self._add(inner)

    def have(self, item: Any) -> bool:
        """Whether a collected test is of the suite: its function, or one that it wraps, is compiled from its text or
        comes from an installed package; one that has no function stands in a file that is as it was."""
        function = getattr(item, "function", None)
        if function is None:
            known = self.data.get(str(item.path))
            return known is not None and item.path.read_bytes() == known
        ahead: list[Any] = [function]
        seen: set[int] = set()
        while ahead and len(seen) < 100:
            each = ahead.pop(0)
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, types.FunctionType):
                if each.__code__ in self.codes or each.__code__.co_filename.startswith(self.trusted):
                    return True
                ahead += [cell.cell_contents for cell in each.__closure__ or () if cell != types.CellType()]
                ahead += vars(each).values()
            elif isinstance(each, types.MethodType | functools.partial):
                ahead.append(each.__func__ if isinstance(each, types.MethodType) else each.func)
            elif type(each).__module__.partition(".")[0] == "hypothesis":
                ahead.append(getattr(each, "inner_test", None))
        return False


class Watch:
    """Every function of the watched modules and their classes, as it is now."""

    def __init__(self) -> None:
        self.known: list[tuple[str, Any, str, Any, Any, Any]] = []
        self.tests: list[tuple[str, Any, Any]] = []
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] in WATCHED and isinstance(module, types.ModuleType):
                self._note(name, vars(module), 2)

    def _note(self, prefix: str, space: Any, depth: int) -> None:
        for key, value in list(space.items()):
            inner = value
            if isinstance(value, property):
                inner = value.fget
            elif isinstance(value, staticmethod | classmethod):
                inner = value.__func__
            if isinstance(inner, types.FunctionType):
                self.known.append((f"{prefix}.{key}", space, key, value, inner, inner.__code__))
            elif isinstance(value, type) and depth and value.__module__.split(".")[0] in WATCHED:
                self._note(f"{prefix}.{key}", vars(value), depth - 1)

    def note_test(self, item: Any) -> None:
        """A hidden test's function, once it is collected."""
        function = getattr(item, "function", None)
        function = getattr(function, "__func__", function)
        if isinstance(function, types.FunctionType):
            self.tests.append((item.nodeid, function, function.__code__))

    def altered(self) -> str | None:
        """What was replaced since, in words; additions do not matter."""
        for name, function, code in self.tests:
            if function.__code__ is not code:
                return f"the code of {name} was replaced"
        for name, space, key, value, inner, code in self.known:
            if (space.get(key) is not value or inner.__code__ is not code) and key not in REPLACED_BY_PYTEST:
                return f"{name} was replaced"
        return None


def _equal() -> None:
    left = 1
    assert left == 2


def _unequal_in_unittest() -> None:
    unittest.TestCase().assertEqual(1, 2)  # noqa: PT009 - unittest's own check is what is tried here


def _nothing_raised() -> None:
    import pytest

    with pytest.raises(ValueError):
        pass


def _raises() -> None:
    raise RuntimeError("this test must fail")


MUST_FAIL = (_equal, _unequal_in_unittest, _nothing_raised, _raises)


def between(items: list[Any], first: int, last: int) -> list[int]:
    """Where a test of no class can stand without ending a class's own fixtures in between."""
    places = range(first + 1, last)
    apart = (i for i in places if items[i].cls is None or items[i].cls is not items[i - 1].cls)
    return [first, *apart, last]


class Guard:
    """The pytest plugin: chooses what runs, mixes in what must fail, times, and reports."""

    def __init__(self, config: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        self.skip, self.test_s = set(config["skip"]), config["test_timeout_s"]
        self.report, self.random = report, random.Random(config["seed"])
        self.canaries: dict[int, Any] = {}
        self.root, self.checks = config["root"], os.path.dirname(unittest.__file__)
        self.texts = Texts(config["root"], config["files"])
        self.foreign: set[int] = set()
        self.watch = Watch()
        self.clock, self.look_at = time.monotonic, 0.0
        self.own = {os.path.join(config["root"], path) for path in config["files"]}
        self.void: str | None = None
        self.traced = False
        sys.addaudithook(self._audit())

    def _audit(self) -> Callable[[str, tuple[Any, ...]], None]:
        """Notes that tracing was switched: a trace function can jump over an assertion. Only doctest has reason to."""
        frame, doctest = sys._getframe, os.path.join(os.path.dirname(os.__file__), "doctest.py")

        def hook(event: str, _args: tuple[Any, ...]) -> None:
            if event == "sys.settrace" and frame(1).f_code.co_filename != doctest:
                self.traced = True

        return hook

    def pytest_collectreport(self, report: Any) -> None:
        """A file that could not be collected."""
        if report.failed:
            self.report({"kind": "uncollected", "id": report.nodeid, "why": str(report.longrepr)[-500:]})

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Leave out what ran before; put tests that must fail between the others."""
        import pytest

        items[:] = [item for item in items if item.nodeid not in self.skip]
        self.report({"kind": "collected", "ids": [item.nodeid for item in items]})
        for item in items:
            self.watch.note_test(item)
            if not self.texts.have(item):
                self.foreign.add(id(item))
        modules: dict[Any, list[Any]] = {}
        for item in items:
            modules.setdefault(item.getparent(pytest.Module), []).append(item)
        for module, real in modules.items():
            for check in self.random.sample(MUST_FAIL, 2 if module is not None else 0):
                name = self.random.choice(real).name.split("[")[0]
                canary = pytest.Function.from_parent(module, name=name, callobj=check)
                self.canaries[id(canary)] = canary
                items.insert(
                    self.random.choice(between(items, items.index(real[0]), items.index(real[-1]) + 1)), canary
                )
        self.traced = sys.gettrace() is not None

    def pytest_runtest_protocol(self, item: Any) -> None:
        """Name the test that starts, so that one that ends the process is known."""
        if id(item) not in self.canaries:
            self.report({"kind": "start", "id": item.nodeid})
        signal.signal(signal.SIGALRM, self._late)
        signal.setitimer(signal.ITIMER_REAL, self.test_s)

    def _late(self, *_: object) -> None:
        import pytest

        pytest.fail(f"took longer than {self.test_s} s")

    def _skip(self, report: Any) -> str:
        """A skip counts as one only if the suite itself said so, not the code under test."""
        where = report.longrepr[0] if isinstance(report.longrepr, tuple) else None
        return "skipped" if hasattr(report, "wasxfail") or where in self.own else "failed"

    def place(self, trace: types.TracebackType | None) -> str:
        """Where a test failed itself, as file and line, not what it called; a check of unittest's is the test's own."""
        found = ("", 0)
        while trace is not None:
            name = trace.tb_frame.f_code.co_filename
            if os.path.dirname(name) != self.checks:
                found = (name, trace.tb_lineno)
            trace = trace.tb_next
        return f"{os.path.relpath(found[0], self.root)}:{found[1]}" if found[0] in self.texts.data else ""

    def _canary(self, report: Any) -> None:
        if report.when == "call" and not report.failed:
            self.void = self.void or "a test that must fail passed"
        self.report({"kind": "canary", "void": self.void})

    def finish(self, item: Any, report: Any, trace: types.TracebackType | None) -> None:
        """One phase of one test."""
        if self.void is None and (id(item) in self.canaries or self.clock() >= self.look_at):
            self.void = self.watch.altered()
            self.look_at = self.clock() + 0.25
        if id(item) in self.canaries:
            if report.when == "call" or report.failed or report.skipped:
                self._canary(report)
            return
        if report.when == "call" or report.failed or report.skipped:
            outcome = "failed" if report.failed else self._skip(report) if report.skipped else "passed"
            why = "" if outcome == "passed" else str(report.longrepr)[-300:]
            if id(item) in self.foreign and outcome != "failed":
                outcome, why = "failed", "not a test of the suite's text"
            if self.traced and outcome != "failed":
                outcome, why = "failed", "the code under test traces what runs"
            at = self.place(trace) if outcome == "failed" and report.when == "call" else ""
            self.report({"kind": "result", "id": item.nodeid, "outcome": outcome, "why": why, "at": at})
        if report.when == "teardown":
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.traced = sys.gettrace() is not None


def main(config: dict[str, Any]) -> None:
    """Run and end the process."""
    out = os.dup(1)
    os.set_inheritable(out, False)
    report = reporter(out, bytes.fromhex(config.pop("key")))
    sys.path.insert(0, config["tools"])
    sys.modules["__main__"] = types.ModuleType("__main__")
    import pytest

    guard = Guard(config, report)

    class Plugin:
        """The hooks, bound here so that pytest finds nothing else of the guard."""

        pytest_collectreport = staticmethod(guard.pytest_collectreport)
        pytest_collection_modifyitems = staticmethod(pytest.hookimpl(trylast=True)(guard_collection(guard)))
        pytest_runtest_protocol = staticmethod(pytest.hookimpl(tryfirst=True)(guard_protocol(guard)))
        pytest_runtest_makereport = staticmethod(pytest.hookimpl(wrapper=True, tryfirst=True)(guard_report(guard)))

    sys.path.remove(config["tools"])
    sys.path[:0] = config["paths"]
    sys.path.append(config["tools"])
    report({"kind": "ready"})
    log = os.open(config["log"], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    arguments = ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    arguments += ["-c", config["ini"], "--rootdir", config["root"], "--basetemp", config["temporary"]]
    code = pytest.main([*arguments, *config["arguments"], *config["targets"]], plugins=[Plugin()])
    for stream in (sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    said = os.pread(log, 1000, max(0, os.fstat(log).st_size - 1000)).decode("utf-8", "replace")
    guard.void = guard.void or guard.watch.altered()
    report({"kind": "end", "code": int(code), "void": guard.void, "said": said})
    os._exit(0)


def guard_collection(guard: Guard) -> Callable[..., None]:
    """The hook that chooses what runs."""

    def hook(items: list[Any]) -> None:
        guard.pytest_collection_modifyitems(items)

    return hook


def guard_protocol(guard: Guard) -> Callable[..., None]:
    """The hook before each test."""

    def hook(item: Any) -> None:
        guard.pytest_runtest_protocol(item)

    return hook


def guard_report(guard: Guard) -> Callable[..., Any]:
    """The hook around each phase's report."""

    def hook(item: Any, call: Any) -> Any:
        report = yield
        guard.finish(item, report, None if call.excinfo is None else call.excinfo.tb)
        return report

    return hook
