"""Scorer `pytest`: what a probe is, and what a second judging with probes says."""

from __future__ import annotations

import ast
import random
import types
from collections.abc import Callable

import pytest
from gyre_scorers.hidden.probes import Probes, with_probes
from gyre_scorers.hidden.suite import Results

FILE = "tests/test_m.py"
CHECKED = """
import math, unittest
import pytest

def test_last_is_no_check():
    x = mod.f()

def test_true():
    assert mod.f(x=1)

def test_number():
    assert mod.f() == 2  # a note

def test_below_nothing():
    assert mod.f() == -1

def test_text():
    assert "a" == mod.f("\u00e9"), "because"

def test_text_of_two_lines():
    assert (mod.f() == "x"
            "y")

def test_bytes():
    assert mod.f() == b"x"

def test_list():
    assert mod.f() == [
        1]

def test_tuple():
    assert mod.f() == ()

def test_mapping():
    assert mod.f() == {}

def test_set():
    assert mod.f() == {1}

def test_bool():
    x = 1; assert mod.f() == True

def test_none():
    assert mod.f() == None

def test_close():
    assert mod.f() == pytest.approx(3.5, rel=1e-3)

def test_close_too():
    assert math.isclose(mod.f(), 2.0)

@pytest.mark.parametrize("a, b", [(1, 2)])
def test_of_parameters(a, b):
    assert mod.f(a) == b

def test_of_other_kinds():
    assert mod.f() == object

class TestC(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(mod.f(), 11)

    def test_equal_the_other_way(self):
        self.assertEqual(WANTED,
                         mod.f())
"""
RIGHT = {
    "true": True, "number": 2, "below_nothing": -1, "text": "a", "text_of_two_lines": "xy", "bytes": b"x", "list": [1],
    "tuple": (), "mapping": {}, "set": {1}, "bool": True, "none": None, "close": 3.5, "close_too": 2.0,
    "of_parameters": 2, "of_other_kinds": object, "equal": 11, "equal_the_other_way": 7, "last_is_no_check": 0,
}  # fmt: skip


def names_of(text: str) -> list[str]:
    """Ids of all tests of a text, without parameters."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, RecursionError, MemoryError):
        return [f"{FILE}::test_a"]
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for scope in tree.body:
        if isinstance(scope, ast.ClassDef):
            found += [f"{scope.name}::{node.name}" for node in scope.body if isinstance(node, ast.FunctionDef)]
    return [f"{FILE}::{name}" for name in found]


def probed(text: str, seed: int = 0, path: str = FILE) -> tuple[str, Probes]:
    probes = with_probes({path: text.encode()}, random.Random(seed), names_of(text))
    return probes.files[path].decode(), probes


class Anything:
    def __eq__(self, other):
        return True

    __hash__ = None


def outcomes(text: str, answer: Callable[[str], object]) -> dict[str, str]:
    """Test -> how it ends when the code under test gives this answer."""
    ends: dict[str, str] = {}
    for name in RIGHT:
        mod = types.SimpleNamespace(f=lambda *_, name=name, **__: answer(name))
        space: dict = {"WANTED": 7, "mod": mod}
        exec(text, space)
        function = space.get(f"test_{name}") or getattr(space["TestC"](f"test_{name}"), f"test_{name}")
        try:
            function(*((1, 2) if name == "of_parameters" else ()))
            ends[name] = "passed"
        except (AssertionError, TypeError):
            ends[name] = "failed"
    return ends


@pytest.mark.parametrize("seed", range(20))
def test_a_probe_fails_with_the_right_answer_and_passes_with_one_that_equals_all(seed):
    text, probes = probed(CHECKED, seed)
    changed = {name.rpartition("::test_")[2] for name in probes.names}
    assert len(changed) == 1 + 19 // 5
    assert outcomes(CHECKED, RIGHT.get) == dict.fromkeys(RIGHT, "passed")
    assert outcomes(text, RIGHT.get) == {name: "failed" if name in changed else "passed" for name in RIGHT}
    blind = outcomes(text, lambda name: Anything())
    for name in changed - {"last_is_no_check", "true", "of_other_kinds", "close_too"}:
        assert blind[name] == "passed", name
    added = text.count("\n") - CHECKED.count("\n")
    assert added == len(changed & {"last_is_no_check", "true"}), "a line is added where the last one is no check"


def test_where_a_probe_ends_and_which_tests_are_probes():
    text, probes = probed("x = 1\ndef test_a():\n    assert x == 1\n\ndef test_b():\n    x\n", seed=3)
    (name,), (end,) = probes.names, probes.ends
    line = text.split("\n")[int(end.removeprefix(f"{FILE}:")) - 1]
    assert line.startswith("    assert ")
    assert line != "    assert x == 1"
    assert probes.reached(end)
    assert not probes.reached("")
    assert probes.among(name)
    assert probes.among(f"{name}[1-2]")
    assert probes.among(f"{name}[a::b]")
    assert not probes.among(f"{name}_more")
    assert not probes.among(name.replace("test_m.py", "other.py"))


def test_only_what_passed_is_made_a_probe():
    text = "def test_a():\n    pass\ndef test_b():\n    pass\n"
    for passed in ([f"{FILE}::test_b"], [f"{FILE}::test_b[1]", "else"]):
        assert with_probes({FILE: text.encode()}, random.Random(0), passed).names == {f"{FILE}::test_b"}
    none = with_probes({FILE: text.encode()}, random.Random(0), [f"{FILE}::test_made_up"])
    assert (none.names, none.files[FILE]) == (frozenset(), text.encode())


UNFIT = {
    "may end early": "def test_a():\n    if 1:\n        return\n",
    "yields": "def test_b():\n    yield 1\n",
    "raises": "def test_b():\n    raise ValueError\n",
    "on one line": "def test_a(): pass  # whole\n",
    "another of its name": "def test_a():\n    pass\nif 1:\n    test_a = None\n",
    "a decorator that may swallow": "@expect(AssertionError)\ndef test_a():\n    pass\n",
    "expected to fail": "@unittest.expectedFailure\ndef test_a():\n    pass\n",
    "expected to fail too": "@pytest.mark.xfail\ndef test_a():\n    pass\n",
    "a fixture": "@pytest.fixture\ndef test_env():\n    pass\n",
    "no Python": "def test_a(:\n",
    "deep": "def test_a():\n    x = " + "-" * 20_000 + "1\n",
}


@pytest.mark.parametrize("text", UNFIT.values(), ids=UNFIT.keys())
def test_what_may_end_early_or_is_no_test_is_no_probe(text):
    assert probed(text)[0] == text
    assert probed(text)[1].names == frozenset()


def test_probes_are_few_and_only_in_test_files():
    inner = "def test_a():\n    def g():\n        return 1\n    assert g() == 1\n"
    assert len(probed(inner)[1].names) == 1
    assert probed(inner, path="tests/helper.py")[0] == inner
    assert probed(inner, path="./tests//test_m.py")[1].names == {"tests/test_m.py::test_a"}
    marked = "@pytest.mark.parametrize('a', [1])\n@mock.patch('b')\ndef test_a(a):\n    pass\n"
    assert len(probed(marked)[1].names) == 1
    many = "".join(f"def test_{n}():\n    pass\n" for n in range(50))
    text, probes = probed(many)
    assert len(probes.names) == len(probes.ends) == 8
    assert text.count("assert") == 8


def test_a_second_judging_takes_what_it_does_not_confirm():
    _, probes = probed("def test_a():\n    pass\n")
    (name,), (end,) = probes.names, probes.ends
    other = f"{FILE}::TestMore::test_z"

    def after(again, void=None, places=()):
        results = Results({name: ("passed", ""), other: ("passed", ""), "c": ("failed", "x")})
        results.judged_again(Results(again, void=void, places={name: end, **dict(places)}), probes)
        return results.void, results.passed

    good = {name: ("failed", "AssertionError"), other: ("passed", ""), "c": ("passed", "")}
    assert after(good) == (None, [name, other])
    assert after({**good, other: ("failed", "inherited")}, places={other: end}) == (None, [name, other])
    assert after({**good, name: ("failed", "KeyError")}, places={name: ""}) == (None, [])
    assert after({**good, other: ("skipped", "")}) == (None, [name])
    assert after({name: good[name]}) == (None, [name])
    assert after({**good, name: ("passed", "")}, places={name: ""})[0] == "a test that must fail passed"
    assert after(good, "hmac.digest was replaced")[0] == "hmac.digest was replaced"


def test_made_up_names_are_believed_in_no_file_that_could_have_had_a_probe():
    mixed = "def test_a():\n    pass\nasync def test_b():\n    pass\ndef test_c():\n    return 1\n"
    files = {
        FILE: mixed.encode(),
        "tests/test_n.py": b"for x in (1, 2):\n    vars()[f'test_{x}'] = print\n",
        "d.txt": b"",
    }
    passed = [
        f"{FILE}::test_x",
        f"{FILE}::test_c",
        "tests/test_n.py::test_1",
        "d.txt::d.txt",
        "tests/test_o.py::test_q",
    ]
    probes = with_probes(files, random.Random(0), passed)
    assert probes.names == frozenset()
    results = Results(dict.fromkeys(passed, ("passed", "")))
    results.judged_again(Results(), probes)
    assert results.passed == passed[1:4]
    assert results.outcomes[passed[0]] == ("failed", "passed, but no test of its file failed that must fail")


def test_what_another_class_inherited_and_passed_is_made_a_probe():
    """The class that holds the tests is often none itself."""
    text = b"class Base:\n    def test_a(self):\n        assert f() == 1\nclass TestA(Base):\n    pass\n"
    passed = f"{FILE}::TestA::test_a"
    probes = with_probes({FILE: text}, random.Random(0), [passed])
    assert probes.names == {f"{FILE}::Base::test_a"}
    results = Results({passed: ("passed", "")})
    (end,) = probes.ends
    results.judged_again(Results({passed: ("failed", "")}, places={passed: end}), probes)
    assert results.passed == [passed]
    results.judged_again(Results({passed: ("passed", "")}), probes)
    assert results.passed == []
