"""Scorer `pytest`: which tests may skip, and that signed lines are one process's."""

from __future__ import annotations

import hmac
import json

import pytest
from gyre_core import Score
from gyre_scorers.hidden.skips import read_skips
from gyre_scorers.hidden.suite import Results, Suite, milestones, signed_records

KEY = b"k" * 32
MIXED = """
import pytest, unittest

def test_plain():
    assert 1

@pytest.mark.skipif(True, reason="")
def test_marked():
    assert 1

@pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.xfail)])
def test_some(a):
    assert a

class TestA:
    def test_inside(self):
        pytest.skip("here")

    def test_other(self):
        assert 1
"""


def read(**files: str):
    return read_skips({f"tests/{name}.py": text.encode() for name, text in files.items()})


def test_a_test_may_skip_where_its_own_text_speaks_of_it():
    skips = read(test_m=MIXED)
    allowed = {
        name: skips.allow(f"tests/test_m.py::{name}")
        for name in ("test_plain", "test_marked", "test_some[a::b]", "TestA::test_inside", "TestA::test_other")
    }
    assert allowed == {
        "test_plain": False,
        "test_marked": True,
        "test_some[a::b]": True,
        "TestA::test_inside": True,
        "TestA::test_other": False,
    }


AROUND = {
    "a mark of the module": "import pytest\npytestmark = pytest.mark.skip\ndef test_a():\n    assert 1\n",
    "a class": "import unittest\n@unittest.skip\nclass A:\n    def test_a(self):\n        assert 1\n",
    "a set-up": "class A:\n    def setUp(self):\n        self.skipTest('')\n    def test_a(self):\n        assert 1\n",
    "a helper": "def need():\n    raise SkipTest\ndef test_a():\n    need()\n",
    "no Python": "skip (\n",
}


@pytest.mark.parametrize("text", AROUND.values(), ids=AROUND.keys())
def test_what_surrounds_the_tests_of_a_file_speaks_for_all_of_them(text):
    skips = read(test_m=text, test_n="def test_b():\n    assert 1\n")
    assert skips.allow("tests/test_m.py::test_a")
    assert not skips.allow("tests/test_n.py::test_b")


def test_files_that_import_each_other_and_helpers():
    around = AROUND["a class"]
    skips = read(
        test_m=around, test_n="from tests.test_m import A\n", test_o="from . import test_n\n", test_p="import o\n"
    )
    assert [skips.allow(f"tests/test_{name}.py::test_z") for name in "nop"] == [True, True, False]
    assert read(test_m="def test_a(): pass\n", helper="skip = 1\n").allow("tests/test_m.py::test_a")
    assert not read(test_m="def test_a(): pass\n", helper="x = 1\n").allow("tests/test_m.py::test_a")
    documents = read_skips({"./docs/a.txt": b">>> 1  # doctest: +SKIP\n", "docs/b.txt": b">>> 1\n"})
    assert documents.allow("docs/a.txt::a.txt")
    assert not documents.allow("docs/b.txt::b.txt")


def signed(*records: dict, key: bytes = KEY) -> bytes:
    texts = [json.dumps(record).encode() for record in records]
    return b"\n".join(hmac.digest(key, text, "sha256").hex().encode() + b" " + text for text in texts)


def said(n: int, kind: str = "result", outcome: str = "passed") -> dict:
    told = {"id": "a", "ids": ["a"], "outcome": outcome, "why": "", "at": "", "void": None, "code": 0, "said": ""}
    return {"kind": kind, "n": n, **told}


def test_two_that_speak_for_the_judge_make_the_run_void():
    def kinds(*records):
        return [record["kind"] for record in signed_records(signed(*records), KEY)]

    assert kinds(said(1, "canary"), said(0)) == ["result", "canary"]
    assert kinds(said(0), said(0)) == ["result"], "the same line twice says nothing new"
    assert kinds(said(0), said(0, outcome="failed")) == ["result", "forged"]
    assert kinds(said(0), said(1, "end"), said(2)) == ["result", "end", "result", "forged"]
    other = signed(said(0, outcome="failed"), key=b"x" * 32)
    assert [r["kind"] for r in signed_records(signed(said(0)) + b"\n" + other, KEY)] == ["result"]
    results = Results()
    results.add([said(0, "collected"), said(1), said(2, "canary"), {"kind": "forged"}], None)
    assert results.void == "more than one process spoke for the judge"


@pytest.mark.parametrize("first", ["failed", "skipped"])
def test_what_failed_has_failed_whatever_is_said_later(first):
    """Within one stretch between two signs of trust, over them, and in a further run."""
    results = Results()
    begin = said(0, "collected")
    results.add([begin, said(1, outcome=first), said(2), said(3, "canary"), said(4), said(5, "end")], None)
    assert results.outcomes["a"][0] == first
    results.add([begin, said(1), said(2, "end")], None)
    assert results.outcomes["a"][0] == first
    results.add([begin, said(1, outcome="failed"), said(2, "end")], None)
    assert results.outcomes["a"][0] == "failed"


NONSENSE = {
    "no JSON": b"{",
    "a list": b"[]",
    "no number": b'{"kind": "ready"}',
    "no kind": b'{"n": 0}',
    "an unknown kind": b'{"n": 0, "kind": "passed"}',
    "a kind that is no word": b'{"n": 0, "kind": []}',
    "less than is said": b'{"n": 0, "kind": "result", "id": "a"}',
    "an unknown outcome": b'{"n": 0, "kind": "result", "id": "a", "outcome": "great", "why": "", "at": ""}',
    "names that are none": b'{"n": 0, "kind": "collected", "ids": [1]}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE.keys())
def test_what_the_guard_never_says_makes_the_run_void_and_is_no_fault_of_ours(text):
    line = hmac.digest(KEY, text, "sha256").hex().encode() + b" " + text
    assert signed_records(line, KEY) == [{"kind": "forged"}]


def test_tests_are_collected_once_and_no_others_run():
    def after(*records):
        results = Results()
        results.add(records, None)
        return results.void

    begin, end = said(0, "collected"), said(9, "end")
    assert after(begin, said(1, "start"), said(2), end) is None
    assert after(begin, said(1, "collected"), said(2), end) == "the tests were collected twice"
    assert after(said(1), end) == "a test ran that was not collected"
    assert after(begin, {**said(1), "id": "b"}, end) == "a test ran that was not collected"
    assert after(begin, {**said(1, "start"), "id": "b"}, end) == "a test ran that was not collected"


def test_tests_beyond_the_number_of_the_suite_earn_nothing():
    def value(count, passed, failed=0, weights=()):
        outcomes = {f"p[{n}]": ("passed", "") for n in range(passed)} | {f"f{n}": ("failed", "") for n in range(failed)}
        suite = Suite({}, ["t"], count, weights=dict(weights))
        return Score.of_milestones(milestones(suite, Results(outcomes, list(outcomes)))).value

    assert value(5, 5) == value(5, 7) == 1.0
    assert value(5, 1, 4) == value(5, 1001, 4) == 0.2
    assert value(5, 2, 10) == 0.0
    assert value(4, 3, 2, {"p[[]0]": 10}) == 2 / 4
    plain = {f"p{n}": ("passed" if n else "failed", "") for n in range(10)}
    assert Score.of_milestones(milestones(Suite({}, ["t"], 5), Results(plain, list(plain)))).value == 0.9
    assert value(100, 50, 60) == 50 / 110
