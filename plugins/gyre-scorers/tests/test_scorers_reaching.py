"""Scorer `pytest`: code that reaches into the guard or changes the tests earns nothing, and what twins are.

The code under test runs in the process that judges it, so it can find the guard. It cannot tell a twin from a test.
"""

from __future__ import annotations

import ast
import random
import sys

import pytest
from gyre_scorers.hidden.scorer import PytestScorer
from gyre_scorers.hidden.suite import Results, Suite, milestones
from gyre_scorers.hidden.twins import with_twins
from gyre_scorers.options import PytestOptions

TESTS = """
import unittest
import pytest
import mod

@pytest.mark.parametrize("a", [1, 2, 3])
def test_a(a):
    assert mod.f(a) == a + 1

class TestB:
    def test_b(self, tmp_path):
        assert mod.f(0) == 1

class C(unittest.TestCase):
    def test_c(self):
        self.assertEqual(mod.f(10), 11)
"""
OPTIONS = {"files": {"tests/test_mod.py": TESTS}, "targets": ["tests"], "count": 5, "test_timeout_s": 5.0}
NAMES = ["test_a[1]", "test_a[2]", "test_a[3]", "TestB::test_b", "C::test_c"]
WRONG = "def f(a):\n    return None\n"

BY_SIGNAL = "    import signal\n    report = signal.getsignal(signal.SIGALRM).__self__.report\n"
BY_FRAMES = """
    import sys
    frame, report = sys._getframe(), None
    while frame is not None:
        if 'guard' in frame.f_locals:
            report = frame.f_locals['guard'].report
        frame = frame.f_back
"""
BY_SEARCH = """
    import gc, types
    every = [each for each in gc.get_objects() if isinstance(each, types.FunctionType)]
    report = [each for each in every if each.__name__ == 'report' and each.__closure__][0]
"""
BY_HOOKS = """
    import gc
    from _pytest.config import Config
    config = [each for each in gc.get_objects() if isinstance(each, Config)][0]
    [hook] = [each.pytest_runtest_makereport for each in config.pluginmanager.get_plugins()
              if type(each).__name__ == 'Plugin' and hasattr(each, 'pytest_runtest_makereport')]
    report = hook.__closure__[0].cell_contents.report
"""
PASSED = "        report({'kind': 'result', 'id': name, 'outcome': 'passed', 'when': 'call', 'why': ''})\n"
TRUSTED = "    report({'kind': 'canary', 'void': None})\n"
LEAVE = "    import os\n    os._exit(0)\n"
GOOD_END = "    report({'kind': 'end', 'code': 0, 'void': None, 'said': ''})\n"
RUNNING = "    import os\n    for name in [os.environ['PYTEST_CURRENT_TEST'].rpartition(' ')[0]]:\n"
COLLECTED = """
    import gc
    from _pytest.main import Session
    for name in [item.nodeid for item in [each for each in gc.get_objects() if isinstance(each, Session)][0].items]:
"""
KNOWN = f"    for name in ['tests/test_mod.py::' + name for name in {NAMES}]:\n"
JUMPING = """
import sys
def trace(frame, event, arg):
    code = frame.f_code
    def local(frame, event, arg):
        if event == 'line' and frame.f_lineno == code.co_firstlineno + 2:
            frame.f_lineno += 1
        return local
    return local if code.co_name.startswith('test_') else None
sys.settrace(trace)
def f(a):
    return None
"""


def reaching(way: str, *rest: str) -> str:
    return "def f(a):\n" + way + "".join(rest)


CHEATS = {
    "report the running test, by the signal's handler": reaching(BY_SIGNAL, RUNNING, PASSED, TRUSTED, LEAVE),
    "report the running test, by frames": reaching(BY_FRAMES, RUNNING, PASSED, TRUSTED, LEAVE),
    "report the running test, by a search": reaching(BY_SEARCH, RUNNING, PASSED, TRUSTED, LEAVE),
    "report the running test, by the hooks": reaching(BY_HOOKS, RUNNING, PASSED, TRUSTED, LEAVE),
    "report all that was collected": reaching(BY_SIGNAL, COLLECTED, PASSED, TRUSTED, GOOD_END, LEAVE),
    "report all that was collected, and go": reaching(BY_SIGNAL, COLLECTED, PASSED, TRUSTED, LEAVE),
    "report those that are known, and end": reaching(BY_SIGNAL, KNOWN, PASSED, TRUSTED, GOOD_END, LEAVE),
    "another code for the tests": "def f(a):\n    import gc, types\n    for each in gc.get_objects():\n"
    "        if isinstance(each, types.FunctionType) and each.__name__ in ('test_a', 'test_b', 'test_c'):\n"
    "            each.__code__ = (lambda *args, **more: None).__code__\n",
    "another code for all tests": "def f(a):\n    import gc, types\n    for each in gc.get_objects():\n"
    "        if isinstance(each, types.FunctionType) and each.__name__.startswith('test'):\n"
    "            each.__code__ = (lambda *args, **more: None).__code__\n",
    "leave by pytest": "def f(a):\n    import pytest\n    pytest.exit('done', 0)\n",
    "leave as Python ends": f"import atexit, os\natexit.register(lambda: os._exit(0))\n{WRONG}",
    "hook for what nobody catches": f"import sys, os\nsys.excepthook = lambda *_: os._exit(0)\n{WRONG}",
    "expect to fail": "def f(a):\n    import pytest\n    pytest.xfail('later')\n",
    "a fork that reports": reaching(
        "    import os\n    if os.fork() == 0:\n        pass\n    else:\n        return None\n",
        BY_SIGNAL, COLLECTED, PASSED, TRUSTED, GOOD_END, LEAVE,
    ),
}  # fmt: skip
FILES = {
    "an installed plugin": {
        "evil-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n",
        "evil-1.0.dist-info/entry_points.txt": "[pytest11]\nevil = evil\n",
        "evil.py": "import os\nos._exit(0)\n",
    },
    "a plugin of the project's settings": {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p evil'\n",
        "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
        "evil.py": "import os\nos._exit(0)\n",
    },
    "modules of the standard library's names": {
        "unittest.py": "class TestCase: pass\n",
        "hmac.py": "def digest(*_): return b''\n",
        "json.py": "",
        "random.py": "raise SystemExit(0)\n",
    },
    "path files": {"gyre.pth": "import os; os._exit(0)\n", "lib/site.pth": "import os; os._exit(0)\n"},
}


@pytest.fixture
def score(workspace, context, job):
    async def run(files, options=OPTIONS):
        for path, text in files.items():
            await workspace.write(path, text.encode())
        return await PytestScorer(PytestOptions(python=sys.executable), context).score(job(options), workspace)

    return run


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
async def test_reaching_into_the_guard_earns_nothing(score, code):
    result = await score({"mod.py": code})
    assert result.value == 0.0, (result.why, [m.name for m in result.milestones if m.passed])


@pytest.mark.parametrize("files", FILES.values(), ids=FILES.keys())
async def test_files_beside_the_work_earn_nothing_and_stop_nothing(score, files):
    assert (await score({"mod.py": WRONG, **files})).value == 0.0
    assert (await score({"mod.py": "def f(a):\n    return a + 1\n", **files})).value == 1.0


async def test_a_trace_that_jumps_over_assertions_earns_nothing(score):
    tests = "import mod\n" + "".join(
        f"def test_{n}():\n    x = mod.f({n})\n    assert x == {n} + 1\n    x = 0\n    x = 1\n" for n in range(5)
    )
    options = {**OPTIONS, "files": {"tests/test_mod.py": tests}}
    result = await score({"mod.py": JUMPING}, options)
    assert result.value == 0.0
    assert "traces" in result.milestones[0].evidence
    assert (await score({"mod.py": "def f(a):\n    return a + 1\n"}, options)).value == 1.0


def twinned(text: str, seed: int = 0, path: str = "tests/test_m.py"):
    twins = with_twins({path: text.encode()}, random.Random(seed))
    return twins.files[path].decode(), twins.names.get(path, frozenset()), twins


@pytest.mark.parametrize("seed", range(20))
def test_a_twin_is_a_test_of_the_file_with_an_end_that_cannot_hold(seed):
    text, names, twins = twinned(TESTS, seed)
    (name,) = names
    added = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == f"_{name}"
    ]
    assert len(added) == 1
    left, right = ast.unparse(added[0].body[-1]).removeprefix("assert ").split(" == ")
    assert left != right
    real = {node.name: node for node in ast.walk(ast.parse(TESTS)) if isinstance(node, ast.FunctionDef)}
    (of,) = (node for word, node in real.items() if name.startswith(f"{word}_"))
    assert [ast.unparse(each) for each in added[0].body[:-1]] == [ast.unparse(each) for each in of.body]
    for test in (name, f"{name}[1-2]", f"C::{name}", f"C::D::{name}[a::b]"):
        assert twins.among(f"tests/test_m.py::{test}") or "::b" in test
    assert not twins.among("tests/test_m.py::test_a")
    assert not twins.among(f"tests/other.py::{name}")


def test_what_may_end_early_or_is_no_test_has_no_twin():
    early = "def test_a():\n    if 1:\n        return\ndef test_b():\n    yield 1\n"
    assert twinned(early)[:2] == (early, frozenset())
    inner = "def test_a():\n    def g():\n        return 1\n    assert g() == 1\n"
    assert len(twinned(inner)[1]) == 1
    for text in ("def test_a(:\n", "print 'x'\n"):
        assert twinned(text)[:2] == (text, frozenset())
    assert twinned(inner, path="tests/helper.py")[:2] == (inner, frozenset())
    text, names, _ = twinned("".join(f"def test_{n}(): pass\n" for n in range(50)))
    assert len(names) == 3
    assert text.count("def test_") == 50
    assert text.count("def _test_") == 3
    for test in ("@given(x=1)\ndef test_a(x): pass\n", "@unittest.expectedFailure\ndef test_a(): pass\n"):
        assert twinned(test)[:2] == (test, frozenset())


ORDERED = """
import mod

made = []

class TestBook:
    pages = []
    def test_1_empty(self):
        assert self.pages == []
    def test_2_write(self):
        self.pages.append(mod.f(1))
        assert self.pages == [2]
    def test_3_read(self):
        assert self.pages == [2]

def test_first():
    made.append(mod.f(1))
    assert len(made) == 1

def test_second():
    made.append(mod.f(2))
    assert made == [2, 3]
    made.append(4)

def test_third():
    assert made.pop() == 4
    assert made == [2, 3]
"""


async def test_tests_that_build_on_each_other_meet_no_twin(score):
    """Their twins come after all of them, whichever are chosen."""
    options = {"files": {"tests/test_mod.py": ORDERED}, "targets": ["tests"], "count": 6}
    for _ in range(6):
        result = await score({"mod.py": "def f(a):\n    return a + 1\n"}, options)
        assert result.value == 1.0, [(each.name, each.evidence) for each in result.milestones if not each.passed]


async def test_a_suite_can_do_without_twins(score):
    """A class that `unittest` takes by name and whose tests count how many went before."""
    tests = "import unittest\nimport mod\nclass TestA(unittest.TestCase):\n    done = []\n" + "".join(
        f"    def test_{n}(self):\n        self.done.append(mod.f(0))\n        assert len(self.done) == {n}\n"
        for n in (1, 2)
    )
    options = {"files": {"tests/test_mod.py": tests}, "targets": ["tests"], "count": 2, "twins": False}
    values = {(await score({"mod.py": "def f(a):\n    return a + 1\n"}, options)).value for _ in range(8)}
    assert values == {1.0}


def test_a_twin_that_passed_or_was_not_run_makes_the_run_void():
    twins = with_twins({"t/test_m.py": b"def test_a():\n    assert 1\n"}, random.Random(1))
    (name,) = twins.names["t/test_m.py"]
    suite = Suite(files={}, targets=["t"], count=1)
    real, twin = "t/test_m.py::test_a", f"t/test_m.py::{name}"
    collected = {"kind": "collected", "ids": [real, twin]}
    end = {"kind": "end", "code": 1, "void": None, "said": ""}

    def after(*outcomes):
        results = Results(twins=twins)
        said = [{"kind": "result", "id": test, "outcome": how, "why": ""} for test, how in outcomes]
        results.add([collected, *said, end], None)
        return [(each.name, each.passed) for each in milestones(suite, results)]

    assert after((real, "passed"), (twin, "failed")) == [(real, True)]
    assert after((real, "passed"), (twin, "skipped")) == [(real, True)]
    assert after((real, "passed"), (twin, "passed")) == [("the suite", False)]
    assert after((real, "passed")) == [("the suite", False)]


def test_a_process_that_ends_between_two_tests_has_told_nothing():
    passed = {"kind": "result", "id": "a", "outcome": "passed", "why": ""}
    records = [{"kind": "collected", "ids": ["a", "b"]}, {"kind": "start", "id": "a"}, passed]
    results = Results()
    assert results.add([*records, {"kind": "canary", "void": None}], None), "another run may learn of b"
    assert results.outcomes == {"a": ("failed", "ended the process (by itself)")}
    trusted = {"kind": "canary", "void": None}
    results = Results()
    results.add([*records, trusted, {"kind": "start", "id": "b"}, {**passed, "id": "b"}, trusted], None)
    assert results.outcomes == {"b": ("failed", "ended the process (by itself)")}, "and a is run again"
    results = Results()
    assert not results.add([*records, {"kind": "canary", "void": None}], "wall")
    assert results.outcomes["a"][0] == "passed", "the suite's time was over"
