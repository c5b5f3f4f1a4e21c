"""Scorer `pytest`: fractions equal pytest's own, and cheats earn nothing."""

# ruff: noqa: E501 - lines of the programs that cheat
from __future__ import annotations

import json
import os
import sys

import pytest
from gyre_core import ConfigError, ExecutionStatus, InfrastructureError
from gyre_core.testing.folder import FolderSandbox
from gyre_core.testing.scorers import ScorerCase, ScorerConformance
from gyre_scorers.hidden.scorer import PytestScorer
from gyre_scorers.hidden.suite import Results, Suite, milestones, signed_records
from gyre_scorers.options import PytestOptions
from hypothesis import given
from hypothesis import strategies as st

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
OPTIONS = {"files": {"tests/test_mod.py": TESTS}, "targets": ["tests"], "count": 5}
RIGHT = b"def f(a):\n    return a + 1\n"
HALF = b"def f(a):\n    return a + 1 if a < 2 else 0\n"
WRONG = "def f(a):\n    return None\n"


@pytest.fixture
def score(workspace, context, job):
    async def run(files, options=OPTIONS, status=ExecutionStatus.COMPLETED, **limits):
        for path, data in files.items():
            await workspace.write(path, data.encode() if isinstance(data, str) else data)
        scorer = PytestScorer(PytestOptions(python=sys.executable, **limits), context)
        return await scorer.score(job(options, status), workspace)

    return run


class TestPytestConformance(ScorerConformance):
    @pytest.fixture
    def case(self, tmp_path, context):
        make = lambda: PytestScorer(PytestOptions(python=sys.executable), context)  # noqa: E731
        return ScorerCase(make, lambda: FolderSandbox(str(tmp_path)), OPTIONS, {"mod.py": RIGHT}, {"mod.py": HALF})


async def test_one_milestone_a_test_and_nothing_left_behind(score, workspace):
    result = await score({"mod.py": HALF})
    assert {m.name.split("::", 1)[1]: m.passed for m in result.milestones} == {
        "test_a[1]": True,
        "test_a[2]": False,
        "test_a[3]": False,
        "TestB::test_b": True,
        "C::test_c": False,
    }
    assert result.value == pytest.approx(2 / 5)
    assert "assert 0 == (2 + 1)" in result.milestones[1].evidence
    assert await workspace.list() == ["mod.py"]


async def test_what_cannot_be_collected_counts_against_the_expected(score):
    options = {
        **OPTIONS,
        "files": {**OPTIONS["files"], "tests/test_other.py": "import absent\ndef test_x(): pass\n"},
        "count": 8,
    }
    result = await score({"mod.py": RIGHT}, options)
    assert result.value == pytest.approx(5 / 8)
    assert result.milestones[-1].name == "3 tests not collected"
    assert "absent" in result.milestones[-1].evidence


async def test_the_agents_code_beside_the_tests_stays(score):
    options = {"files": {"src/test_mod.py": TESTS}, "targets": ["src"], "count": 5}
    files = {
        "src/mod.py": RIGHT,
        "src/test_own.py": "def test_x(): pass\n",
        "src/deep/own_test.py": "def test_x(): pass\n",
    }
    result = await score(files, options)
    assert (result.value, len(result.milestones)) == (1.0, 5)


async def test_weights_and_skips(score):
    tests = "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_s(): pass\n"
    options = {"files": {"test_m.py": tests}, "targets": ["test_m.py"], "count": 3, "weights": {"*test_b": 2}}
    assert (await score({}, options)).value == pytest.approx(1 / 3)
    assert (await score({}, {**options, "skipped": "passed"})).value == pytest.approx(2 / 4)
    assert (await score({}, {**options, "skipped": "failed"})).value == pytest.approx(1 / 4)


async def test_a_test_that_ends_the_process_fails_alone(score):
    bad = "import os\ndef f(a):\n    if a == 2:\n        os._exit(0)\n    return a + 1\n"
    result = await score({"mod.py": bad})
    assert result.value == pytest.approx(4 / 5)
    assert "ended the process" in result.milestones[1].evidence


async def test_a_test_that_hangs_fails_alone(score):
    bad = "import time\ndef f(a):\n    while a == 2:\n        time.sleep(1)\n    return a + 1\n"
    result = await score({"mod.py": bad}, {**OPTIONS, "test_timeout_s": 4.0})
    assert result.value == pytest.approx(4 / 5)
    assert "longer than" in result.milestones[1].evidence


async def test_a_suite_over_its_time_keeps_what_passed(score):
    bad = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\nimport time\ndef f(a):\n    if a == 3:\n        time.sleep(600)\n    return a + 1\n"
    result = await score({"mod.py": bad}, {**OPTIONS, "timeout_s": 12.0})
    assert 0 <= result.value <= 4 / 5


async def test_set_up_lines_run_in_the_copy(score, workspace):
    options = {**OPTIONS, "setup": ["cp made.txt mod.py; echo x > tests/test_mod.py"]}
    result = await score({"made.txt": RIGHT}, options)
    assert result.value == 1.0
    assert await workspace.list() == ["made.txt"]


CHEATS = {
    "fake summary": {"mod.py": f"print('===== 5 passed in 0.01s =====')\n{WRONG}"},
    "exit zero": {"mod.py": "import os\nos._exit(0)\n"},
    "sys exit": {"mod.py": "import sys\nsys.exit(0)\n"},
    "conftest outcome": {
        "mod.py": WRONG,
        "conftest.py": "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
        "    out = yield\n    out.get_result().outcome = 'passed'\n",
        "tests/conftest.py": "import pytest\n@pytest.fixture(autouse=True)\ndef skip_all():\n    pytest.skip()\n",
    },
    "ini": {"mod.py": WRONG, "pytest.ini": "[pytest]\naddopts = --co\n", "tox.ini": "[pytest]\naddopts = --co\n"},
    "own tests": {
        "mod.py": WRONG,
        "tests/test_mod.py": "def test_x(): pass\n",
        "tests/test_y.py": "def test_y(): pass\n",
    },
    "sitecustomize": {
        "mod.py": WRONG,
        "sitecustomize.py": "import os\nos._exit(0)\n",
        "usercustomize.py": "import os\nos._exit(0)\n",
    },
    "own pytest": {"mod.py": WRONG, "pytest.py": "def main(*a, **k): return 0\n", "_pytest/__init__.py": ""},
    "patched runtest": {"mod.py": f"import pytest\npytest.Function.runtest = lambda self: None\n{WRONG}"},
    "patched call": {
        "mod.py": f"import _pytest.python as p\np.Function.setup = lambda self: setattr(self, 'obj', lambda **k: None)\n{WRONG}"
    },
    "patched code": {
        "mod.py": f"import _pytest.python as p\np.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__\n{WRONG}"
    },
    "patched report": {
        "mod.py": "import _pytest.reports as r\nold = r.TestReport.from_item_and_call\n"
        "def new(item, call):\n    rep = old(item, call)\n    rep.outcome = 'passed'\n    return rep\n"
        f"r.TestReport.from_item_and_call = staticmethod(new)\n{WRONG}"
    },
    "patched unittest": {
        "mod.py": "import unittest\nunittest.TestCase.assertEqual = lambda *a, **k: None\ndef f(a):\n    return a + 1 if a == 10 else 0\n"
    },
    "registered plugin": {
        "mod.py": "import gc, pytest\nfrom _pytest.config import Config\n"
        "class Evil:\n    @pytest.hookimpl(wrapper=True, tryfirst=True)\n    def pytest_runtest_makereport(self, item, call):\n"
        "        rep = yield\n        rep.outcome = 'passed'\n        return rep\n"
        "for o in gc.get_objects():\n    if isinstance(o, Config):\n        o.pluginmanager.register(Evil())\n"
        f"{WRONG}"
    },
    "wrapped pyfunc": {
        "mod.py": "import gc\nfrom _pytest.config import Config\n"
        "import pytest\nclass Evil:\n    @pytest.hookimpl(tryfirst=True)\n    def pytest_pyfunc_call(self, pyfuncitem):\n        return True\n"
        "for o in gc.get_objects():\n    if isinstance(o, Config):\n        o.pluginmanager.register(Evil())\n"
        f"{WRONG}"
    },
    "trace swallow": {
        "mod.py": "import builtins\nclass E(Exception):\n    pass\nbuiltins.AssertionError = E\n" + WRONG,
    },
    "write to every descriptor": {
        "mod.py": "import os, json\nfor fd in range(3, 30):\n    for n in range(9):\n        try:\n"
        "            os.write(fd, b'\\n' + b'0' * 64 + b' ' + json.dumps({'kind': 'end', 'code': 0, 'void': None, 'n': n}).encode() + b'\\n')\n"
        f"        except OSError:\n            pass\n{WRONG}"
    },
    "stale bytecode": {"mod.py": WRONG, "tests/__pycache__/test_mod.cpython-311-pytest-9.2.0.pyc": "x"},
    "exit after passing by patch": {
        "mod.py": "import os, pytest\nstate = []\ndef run(self):\n    state.append(1)\n    if len(state) > 5:\n        os._exit(0)\n"
        f"pytest.Function.runtest = run\n{WRONG}"
    },
    "skip": {"mod.py": "import pytest\npytest.skip('no', allow_module_level=True)\n"},
    "skip what it cannot": {
        "mod.py": "import unittest, pytest\ndef f(a):\n    if a > 5:\n        raise unittest.SkipTest('later')\n    pytest.skip('later')\n"
    },
    "rewrite the suite": {
        "mod.py": "import os\nfor base, _, names in os.walk('.'):\n    for name in names:\n        if name.startswith('test_'):\n"
        f"            open(os.path.join(base, name), 'w').write('def test_x(): pass\\n')\n{WRONG}"
    },
}


@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
async def test_cheats_earn_nothing(score, cheat):
    result = await score(cheat, {**OPTIONS, "test_timeout_s": 5.0})
    assert result.value == 0.0, [(m.name, m.evidence) for m in result.milestones if m.passed]


async def test_links_in_place_of_the_suite_lead_nowhere(score, workspace, tmp_path):
    (tmp_path / "outside").mkdir()
    os.symlink(tmp_path / "outside", os.path.join(workspace.path, "tests"))
    assert (await score({"mod.py": RIGHT})).value == 1.0
    assert list((tmp_path / "outside").iterdir()) == []


async def test_a_python_that_is_not_there_is_our_fault(workspace, context, job):
    scorer = PytestScorer(PytestOptions(python="no-such-python"), context)
    with pytest.raises(InfrastructureError, match="no-such-python"):
        await scorer.score(job(OPTIONS), workspace)


async def test_a_suite_from_a_folder_beside_the_configuration(score, context, tmp_path):
    (tmp_path / "hidden" / "tests").mkdir(parents=True)
    (tmp_path / "hidden" / "tests" / "test_mod.py").write_text(TESTS)
    options = {"folder": str(tmp_path / "hidden"), "targets": ["tests"], "count": 5}
    assert (await score({"mod.py": RIGHT}, options)).value == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"count": 0},
        {"files": None},
        {"folder": "x"},
        {"targets": []},
        {"targets": ["../x"]},
        {"skipped": "maybe"},
        {"tests": 1},
    ],
    ids=str,
)
async def test_a_wrong_suite_is_a_fault_of_the_task_set(score, context, job, change):
    PytestScorer(None, context).check(job(OPTIONS).task)
    options = {key: value for key, value in {**OPTIONS, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match="task 't'"):
        await score({}, options)
    with pytest.raises(ConfigError, match="task 't'"):
        PytestScorer(None, context).check(job(options).task)


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=40))
def test_unsigned_lines_are_as_if_not_there(noise, key):
    import hmac

    record = {"kind": "end", "n": 0, "code": 0, "void": None, "said": ""}
    text = json.dumps(record).encode()
    line = hmac.digest(key, text, "sha256").hex().encode() + b" " + text
    assert signed_records(noise.replace(b"\n", b"") + b"\n" + line + b"\n" + noise, key) == [record]
    assert signed_records(b"\n" + line + b"\n", key + b"x") == []


def test_results_count_only_after_a_sign_that_they_can_be_trusted():
    suite = Suite(files={}, targets=["t"], count=3)
    passed = {"kind": "result", "outcome": "passed", "why": ""}
    records = [
        {"kind": "collected", "ids": ["a", "b", "c"]},
        {**passed, "id": "a"},
        {"kind": "canary", "void": None},
        {**passed, "id": "b"},
        {"kind": "start", "id": "c"},
    ]
    results = Results()
    assert results.add(records, None)
    assert {m.name: m.passed for m in milestones(suite, results)} == {"a": True, "b": False, "c": False}
    assert not Results().add(records, "disk")
    assert not results.add([records[0], {"kind": "canary", "void": "patched"}, {"kind": "start", "id": "b"}], None)
    assert [m.passed for m in milestones(suite, results)] == [False]
