"""Scorer `pytest`: work that changes what is judged, knows what is wanted, or does not let itself be judged.

Each was worth most of a point, or was taken for a fault of ours, by a few lines that need no knowledge of the suite.
"""

# ruff: noqa: E501 - lines of the programs that cheat
from __future__ import annotations

import os
import sys

import pytest
from gyre_core import InfrastructureError, ScoringJob
from gyre_core.testing.folder import FolderWorkspace
from gyre_scorers.hidden.copying import Copies, UnfitError
from gyre_scorers.hidden.suite import Suite
from gyre_scorers.options import PytestOptions

WRONG = "def f(a):\n    return None\n"
GOOD = "def f(a):\n    return a + 1\n"


def some(letter: str) -> str:
    return "import mod\n" + "".join(f"def test_{letter}{n}():\n    assert mod.f({n}) == {n + 1}\n" for n in range(2))


SUITE = {
    "files": {"tests/test_a.py": some("a"), "tests/test_b.py": some("b"), "tests/unit/test_c.py": some("c")},
    "targets": ["tests"],
    "count": 6,
    "test_timeout_s": 5.0,
}
TRIVIAL = "''.join(f'def test_x{i}(): pass\\n' for i in range(100))"
EACH_FILE = "import os\nfor base, _, names in os.walk('tests'):\n    for name in names:\n        path = os.path.join(base, name)\n"
REPORT = (
    "import sys, os\nframe, report = sys._getframe(), None\nwhile frame is not None:\n"
    "    if 'guard' in frame.f_locals: report = frame.f_locals['guard'].report\n    frame = frame.f_back\n"
)
FORGED = "for n in names: report({'kind': 'result', 'id': n, 'outcome': 'passed', 'why': '', 'at': ''})\n"
END = "report({'kind': 'end', 'code': 0, 'void': None, 'said': ''})\nos._exit(0)\n"


def later(text: str) -> str:
    """The same once a function is called."""
    return "def f(a):\n" + "".join(f"    {line}\n" for line in text.splitlines())


LOADER = """
import sys, re, importlib.abc, importlib.util
class Loader(importlib.abc.Loader):
    def __init__(self, path):
        self.path = path
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(%s, module.__dict__)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if 'test_' in name:
            path = 'tests/' + ('unit/' if name.endswith('c') else '') + name.rpartition('.')[2] + '.py'
            return importlib.util.spec_from_loader(name, Loader(path), origin=path)
sys.meta_path.insert(0, Finder())
for each in sys.meta_path[1:]:
    if type(each).__name__ == 'AssertionRewritingHook':
        type(each).find_spec = lambda self, name, path=None, target=None: Finder().find_spec(name, path)
"""
ALTERED = {
    "other tests in the files": EACH_FILE + f"        open(path, 'w').write({TRIVIAL})\n" + WRONG,
    "no assertions in the files": EACH_FILE + "        text = open(path).read()\n        open(path, 'w').write(text.replace('assert', ''))\n" + WRONG,
    "another file of tests": f"open('tests/unit/test_d.py', 'w').write({TRIVIAL})\n{WRONG}",
    "other tests for the next run": later(EACH_FILE + f"        open(path, 'w').write({TRIVIAL})\nos._exit(0)\n"),
    "a conftest for the next run": later(
        "import os\nopen('tests/conftest.py', 'w').write('import pytest\\ndef pytest_collection_modifyitems(items): del items[1:]\\n')\nos._exit(0)\n"
    ),
    "an import of other tests": LOADER % TRIVIAL + WRONG,
    "another compiler": "import ast\nold = ast.parse\ndef parse(source, *a, **k):\n"
    f"    return old({TRIVIAL}, *a, **k) if b'mod.f' in source else old(source, *a, **k)\nast.parse = parse\n{WRONG}",
    "tests added to what was collected": later(
        "import gc\nfrom _pytest.main import Session\nsession = [each for each in gc.get_objects() if isinstance(each, Session)][0]\n"
        "if len(session.items) < 9:\n    session.items.extend(session.items[:1] * 9)\nreturn None\n"
    ),
    "made-up tests while it is collected": REPORT
    + "names = [f'tests/test_a.py::test_x{i}' for i in range(9)]\nreport({'kind': 'collected', 'ids': names})\n" + FORGED + END,
    "made-up tests beside the others": later(
        REPORT + "names = [f'tests/test_a.py::test_x{i}' for i in range(900)]\nreport({'kind': 'collected', 'ids': names})\n" + FORGED + "return None\n"
    ),
    "made-up results of tests that are not there": later(
        REPORT + "names = [f'tests/test_a.py::test_x{i}' for i in range(900)]\n" + FORGED + "return None\n"
    ),
    "words that make no sense": later(REPORT + "report({'kind': 'result'})\nreport({})\nreturn a + 1\n"),
}  # fmt: skip
KNOWING = {
    "equal to everything": "class All:\n    def __eq__(self, other): return True\ndef f(a):\n    return All()\n",
    "read in the caller's line": "import linecache, sys\ndef f(a):\n    frame = sys._getframe(1)\n"
    "    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)\n"
    "    return eval(line.partition('==')[2], frame.f_globals, frame.f_locals)\n",
    "read in the caller's numbers": "import sys\ndef f(a):\n"
    "    return [each for each in sys._getframe(1).f_code.co_consts if type(each) is int][-1]\n",
}
UNJUDGED = {
    "a folder for the tools": "import os\ndef f(a):\n    os.remove('../tools.zip')\n    os.mkdir('../tools.zip')\n    os._exit(0)\n",
    "the copy moved": "import os\ndef f(a):\n    os.rename(os.getcwd(), '../../elsewhere')\n    os._exit(0)\n",
    "the copy removed": "import os, shutil\ndef f(a):\n    shutil.rmtree('..', ignore_errors=True)\n    os._exit(0)\n",
    "all removed": "import os, shutil\ndef f(a):\n    shutil.rmtree('../..', ignore_errors=True)\n    os._exit(0)\n",
    "a file for the workspace": "import os, shutil\ndef f(a):\n    top = os.path.abspath('../..')\n"
    "    shutil.rmtree(top, ignore_errors=True)\n    open(top, 'w').close()\n    os._exit(0)\n",
}


@pytest.mark.parametrize("code", ALTERED.values(), ids=ALTERED.keys())
async def test_other_tests_than_the_suites_earn_nothing(score, code):
    result = await score({"mod.py": code})
    assert result.value == 0.0, (result.why, [m.name for m in result.milestones if m.passed])


@pytest.mark.parametrize("code", KNOWING.values(), ids=KNOWING.keys())
async def test_who_takes_from_the_test_what_is_wanted_earns_nothing(score, code):
    result = await score({"mod.py": code})
    assert result.value == 0.0, (result.why, [m.name for m in result.milestones if m.passed])
    assert result.why == "void: a test that must fail passed"


@pytest.mark.parametrize("code", UNJUDGED.values(), ids=UNJUDGED.keys())
async def test_work_that_harms_its_judging_earns_nothing_and_is_no_fault_of_ours(score, code):
    options = {**SUITE, "files": {"tests/test_a.py": some("a")}, "count": 2}
    assert (await score({"mod.py": code}, options)).value == 0.0


async def test_tests_that_the_work_gives_parameters_gain_nothing_by_many(score):
    easy = "@pytest.mark.parametrize('x', mod.CASES)\ndef test_easy(x):\n    assert x == x\n"
    options = {**SUITE, "files": {"tests/test_a.py": "import pytest\n" + some("a") + easy}, "count": 5}
    assert (await score({"mod.py": f"CASES = [1, 2, 3]\n{WRONG}"}, options)).value == 0.6
    many = await score({"mod.py": f"CASES = range(100)\n{WRONG}"}, options)
    assert many.value == 0.6
    assert "97 beyond the 5 tests" in " ".join(m.evidence for m in many.milestones)


HELD = """
import functools, unittest, unittest.mock as mock
import pytest
import mod

def twice(test):
    @functools.wraps(test)
    def run(*args, **more):
        test(*args, **more)
        test(*args, **more)
    return run

def plainly(test):
    def run():
        test()
    return run

@twice
def test_wrapped():
    assert mod.f(1) == 2

@mock.patch("mod.g", create=True)
def test_patched(g):
    assert mod.f(1) == 2

def inner():
    assert mod.f(2) == 3

test_closure = plainly(inner)
test_part = functools.partial(inner)

class TestMade(unittest.TestCase):
    pass

for n in range(2):
    setattr(TestMade, f"test_{n}", lambda self, n=n: self.assertEqual(mod.f(n), n + 1))

class TestStatic:
    @staticmethod
    def test_static():
        assert mod.f(1) == 2
    @classmethod
    def test_class(cls):
        assert mod.f(1) == 2
"""


async def test_tests_that_are_wrapped_made_or_inherited_are_the_suites(score):
    files = {
        "tests/test_a.py": HELD,
        "tests/base.py": "import mod\nclass Base:\n    def test_base(self):\n        assert mod.f(1) == 2\n",
        "tests/test_b.py": "from base import Base\nclass TestB(Base):\n    pass\n",
        "tests/words.txt": ">>> import mod\n>>> mod.f(1)\n2\n",
    }
    options = {
        **SUITE, "files": files, "count": 9, "paths": [".", "tests"], "arguments": ["--doctest-glob=*.txt"],
    }  # fmt: skip
    result = await score({"mod.py": GOOD}, options)
    assert result.value == 1.0, [(m.name, m.evidence) for m in result.milestones if not m.passed]


class _Told(FolderWorkspace):
    """A workspace that ends some commands at a limit, or whose disk is full."""

    def __init__(self, path: str, word: str, limit: str | None, look: str | None = None) -> None:
        super().__init__(path)
        self.word, self.limit, self.look = word, limit, look

    async def run(self, request):
        import dataclasses

        result = await super().run(request)
        if self.look is not None and any("statvfs" in part for part in request.argv):
            return dataclasses.replace(result, stdout=self.look.encode())
        if any(self.word in part for part in request.argv):
            return dataclasses.replace(result, limit=self.limit, exit_code=None if self.limit else 1)
        return result


@pytest.mark.parametrize(
    ("limit", "look", "ours"),
    [
        ("wall", "1000 1000000000", True),
        ("wall", "1000000000 1000000000", False),
        ("wall", "nothing", False),
        ("disk", "1000 1000000000", False),
        (None, "1000 1000", True),
        (None, "1000000000 1000", None),
        (None, "1000 1000000000", None),
    ],
    ids=str,
)
async def test_whose_fault_it_is_that_a_workspace_cannot_be_copied(tmp_path, job, limit, look, ours):
    """Ours if ordinary work would have fared the same; a part that cannot be read is left out."""
    workspace = _Told(str(tmp_path), "cp -RP", limit, look)
    suite = Suite({"tests/test_a.py": b"x = 1\n"}, ["tests"], 1)
    copies = Copies(suite, PytestOptions(python=sys.executable), job(SUITE).task, workspace)
    if ours is None:
        assert (tmp_path / await copies.fresh(suite.files) / "repo" / "tests" / "test_a.py").read_bytes() == b"x = 1\n"
        return
    with pytest.raises(InfrastructureError if ours else UnfitError, match="copying the workspace"):
        await copies.fresh(suite.files)


async def test_what_a_task_brought_is_not_held_against_the_work(tmp_path, job):
    import dataclasses

    given: ScoringJob = job(SUITE)
    task = dataclasses.replace(given.task, files={"large": b"x" * 1000})
    suite = Suite({}, ["tests"], 1)
    for size, error in ((2000, InfrastructureError), (2001, UnfitError)):
        workspace = _Told(str(tmp_path), "cp -RP", "disk", f"{size} 1000000000")
        with pytest.raises(error):
            await Copies(suite, PytestOptions(python=sys.executable), task, workspace).fresh({})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter every folder")
async def test_a_workspace_that_is_shut_earns_nothing(score, workspace):
    await workspace.write("mod.py", GOOD.encode())
    os.chmod(workspace.path, 0)
    try:
        result = await score({})
    finally:
        os.chmod(workspace.path, 0o755)
    assert result.value == 0.0
    assert result.why.startswith("void: ")
