"""Scorer `pytest`: code that reaches into the guard or changes the tests earns nothing, and what probes are.

The code under test runs in the process that judges it, so it can find the guard. It cannot tell a probe from a test.
"""

from __future__ import annotations

import pytest
from gyre_scorers.hidden.suite import Results

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
SUITE = {"files": {"tests/test_mod.py": TESTS}, "targets": ["tests"], "count": 5, "test_timeout_s": 5.0}
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
SKIPPED = PASSED.replace("passed", "skipped")
OTHER_PROCESS = (
    "    cells = dict(zip(report.__code__.co_freevars, report.__closure__))\n"
    "    cells['own'].cell_contents = os.getpid()\n"
)
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
    "a fork that writes by itself": reaching(
        "    import os\n    if os.fork() == 0:\n        pass\n    else:\n        return None\n",
        BY_SIGNAL, OTHER_PROCESS, COLLECTED, PASSED, TRUSTED, GOOD_END, LEAVE,
    ),
    "a fork that ends the judge": reaching(
        "    import os\n    if os.fork() == 0:\n        os.kill(os.getppid(), 9)\n    else:\n        import time\n"
        "        time.sleep(60)\n",
        BY_SIGNAL, OTHER_PROCESS, COLLECTED, PASSED, TRUSTED, GOOD_END, LEAVE,
    ),
}  # fmt: skip
CHEATS |= {
    "report in the first judging alone": "def f(a):\n    import os\n    if os.path.exists('../../seen'):\n"
    "        return None\n    open('../../seen', 'w').close()\n"
    + reaching(BY_SIGNAL, COLLECTED, PASSED, TRUSTED, GOOD_END, LEAVE).removeprefix("def f(a):\n"),
    "another pytest for the next run": "def f(a):\n    import os\n    open('../tools.zip', 'wb').write(b'PK')\n"
    "    os._exit(0)\n",
}
RIGHT_ONCE = "    if a == 10:\n        return 11\n"
AS_A_TEST = (
    "    import sys\n    path = sys._getframe(1).f_code.co_filename\n"
    "    exec(compile('import pytest; pytest.{}()', path, 'exec'))\n"
)
SKIPS = {
    "report a skip": reaching(RIGHT_ONCE, BY_SIGNAL, RUNNING, SKIPPED, TRUSTED),
    "report a skip, and go": reaching(RIGHT_ONCE, BY_SIGNAL, RUNNING, SKIPPED, TRUSTED, LEAVE),
    "report all skipped, and go": reaching(RIGHT_ONCE, BY_SIGNAL, COLLECTED, SKIPPED, TRUSTED, GOOD_END, LEAVE),
    "skip under the test's name": reaching(RIGHT_ONCE, AS_A_TEST.format("skip")),
    "expect to fail under the test's name": reaching(RIGHT_ONCE, AS_A_TEST.format("xfail")),
}
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


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
async def test_reaching_into_the_guard_earns_nothing(score, code):
    result = await score({"mod.py": code})
    assert result.value == 0.0, (result.why, [m.name for m in result.milestones if m.passed])


@pytest.mark.parametrize("code", SKIPS.values(), ids=SKIPS.keys())
async def test_a_skip_that_is_not_the_suites_leaves_nothing_out(score, code):
    """One of five tests passes by right."""
    result = await score({"mod.py": code})
    assert result.value in (0.0, 0.2), (result.why, [m.name for m in result.milestones if m.passed])
    assert sum(m.weight for m in result.milestones) == 5.0


@pytest.mark.parametrize("files", FILES.values(), ids=FILES.keys())
async def test_files_beside_the_work_earn_nothing_and_stop_nothing(score, files):
    assert (await score({"mod.py": WRONG, **files})).value == 0.0
    assert (await score({"mod.py": "def f(a):\n    return a + 1\n", **files})).value == 1.0


async def test_a_trace_that_jumps_over_assertions_earns_nothing(score):
    tests = "import mod\n" + "".join(
        f"def test_{n}():\n    x = mod.f({n})\n    assert x == {n} + 1\n    x = 0\n    x = 1\n" for n in range(5)
    )
    options = {**SUITE, "files": {"tests/test_mod.py": tests}}
    result = await score({"mod.py": JUMPING}, options)
    assert result.value == 0.0
    assert "traces" in result.milestones[0].evidence
    assert (await score({"mod.py": "def f(a):\n    return a + 1\n"}, options)).value == 1.0


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


GOOD = "def f(a):\n    return a + 1\n"


def counting(head: str) -> str:
    """A class whose tests count how many went before."""
    body = "    def test_{0}(self):\n        self.done.append(mod.f(0))\n        assert len(self.done) == {0}\n"
    return head + "".join(body.format(n) for n in (1, 2, 3))


HONEST = {
    "tests that build on each other": (ORDERED, 6),
    "a class taken by name": (
        counting("import unittest\nimport mod\nclass TestA(unittest.TestCase):\n    done = []\n"),
        3,
    ),
    "a class with a fixture of its own": (
        counting(
            "import pytest\nimport mod\nclass TestA:\n    @pytest.fixture(scope='class', autouse=True)\n"
            "    def fresh(self):\n        type(self).done = []\n"
        ),
        3,
    ),
    "parameters with colons": (
        "import pytest\nimport mod\n@pytest.mark.parametrize('a', ['::1', 'x::y'])\n"
        "def test_a(a):\n    assert mod.f(1) == 2\n",
        2,
    ),
    "files left behind": (
        "import os\nimport mod\ndef test_a():\n    assert not os.path.exists('made')\n    open('made', 'w').close()\n",
        1,
    ),
    "a test of its own lines": (
        "import inspect\nimport mod\ndef test_b():\n    assert inspect.currentframe().f_lineno == 4\n"
        "def test_a():\n    assert mod.f(1) == 2\n",
        2,
    ),
}


@pytest.mark.parametrize("prefix", ["", "./"])
@pytest.mark.parametrize(("tests", "count"), HONEST.values(), ids=HONEST.keys())
async def test_honest_work_loses_nothing(score, prefix, tests, count):
    options = {"files": {f"{prefix}tests/test_mod.py": tests}, "targets": ["tests"], "count": count}
    for _ in range(2):
        result = await score({"mod.py": GOOD}, options)
        assert result.value == 1.0, [(each.name, each.evidence) for each in result.milestones if not each.passed]


async def test_tests_that_another_file_inherits_lose_nothing(score):
    base = (
        "import mod\nclass Base:\n    def test_x(self):\n        assert mod.f(1) == 2\n"
        "    def test_y(self):\n        assert mod.f(2) == 3\n"
    )
    more = "from test_base import Base\nclass TestMore(Base):\n    pass\n"
    files = {"tests/test_base.py": base, "tests/test_more.py": more}
    options = {"files": files, "targets": ["tests"], "count": 2, "paths": [".", "tests"]}
    for _ in range(3):
        assert (await score({"mod.py": GOOD}, options)).value == 1.0


async def test_work_that_ends_the_process_keeps_what_passed(score):
    tests = "import mod\n" + "".join(f"def test_{n}():\n    mod.end()\n" for n in range(4))
    tests += "".join(f"def test_good_{n}():\n    assert mod.f({n}) == {n} + 1\n" for n in range(4))
    options = {"files": {"tests/test_mod.py": tests}, "targets": ["tests"], "count": 8}
    assert (await score({"mod.py": GOOD + "def end():\n    import os\n    os._exit(0)\n"}, options)).value == 0.5


async def test_half_a_character_in_evidence_is_told(score):
    options = {**SUITE, "files": {"tests/test_mod.py": "import mod\ndef test_a():\n    mod.f(1)\n"}, "count": 1}
    result = await score({"mod.py": "def f(a):\n    raise ValueError('\\ud800')\n"}, options)
    assert result.value == 0.0
    assert "ValueError" in result.milestones[0].evidence
    result.milestones[0].evidence.encode()


async def test_a_suite_can_do_without_a_second_judging(score):
    """Its only test holds once for each workspace."""
    tests = "import os\nimport mod\ndef test_1():\n    os.mkdir('../../once')\n    assert mod.f(0) == 1\n"
    options = {"files": {"tests/test_mod.py": tests}, "targets": ["tests"], "count": 1, "probes": False}
    assert (await score({"mod.py": GOOD}, options)).value == 1.0


def test_a_process_that_ends_between_two_tests_fails_the_one_before():
    passed = {"kind": "result", "id": "a", "outcome": "passed", "why": ""}
    records = [{"kind": "collected", "ids": ["a", "b"]}, {"kind": "start", "id": "a"}, passed]
    trusted = {"kind": "canary", "void": None}
    results = Results()
    assert results.add([*records, trusted], None), "another run may learn of b"
    assert results.outcomes == {"a": ("failed", "ended the process (by itself)")}
    results = Results()
    results.add([*records, trusted, {"kind": "start", "id": "b"}, {**passed, "id": "b"}, trusted], None)
    assert results.outcomes == {"a": ("passed", ""), "b": ("failed", "ended the process (by itself)")}
    results = Results()
    assert not results.add([*records, trusted], "wall")
    assert results.outcomes["a"][0] == "passed", "the suite's time was over"
