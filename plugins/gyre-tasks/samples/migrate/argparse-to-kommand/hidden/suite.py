import ast
import subprocess
import sys
from pathlib import Path

import pytest

SHELF = Path("shelf.py").resolve()


@pytest.fixture
def shelf(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, "-S", SHELF, *words], cwd=tmp_path, capture_output=True, text=True, timeout=10
        )

    return run


def uses_kommand():
    tree = ast.parse(SHELF.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return "kommand" in names and not names & {"argparse", "optparse", "getopt"}


@pytest.fixture(autouse=True)
def ported():
    assert uses_kommand()


def test_add_and_list(shelf):
    assert shelf("add", "Emma", "1815").stdout == "added Emma\n"
    assert shelf("add", "Ada", "1969", "--read").stdout == "added Ada\n"
    assert shelf("list").stdout == "Ada (1969) *\nEmma (1815)\n"


def test_list_sorted_by_year(shelf):
    shelf("add", "Emma", "1815")
    shelf("add", "Ada", "1969")
    assert shelf("list", "--sort=year").stdout == "Emma (1815)\nAda (1969)\n"


def test_list_read_only(shelf):
    shelf("add", "Emma", "1815")
    shelf("add", "Ada", "1969", "--read")
    assert shelf("list", "--read").stdout == "Ada (1969) *\n"


def test_an_empty_shelf_lists_nothing(shelf):
    done = shelf("list")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_remove(shelf):
    shelf("add", "Emma", "1815")
    assert shelf("remove", "Emma").stdout == "removed Emma\n"
    assert shelf("list").stdout == ""


def test_count(shelf):
    shelf("add", "Emma", "1815")
    shelf("add", "Ada", "1969")
    assert shelf("count").stdout == "2\n"
    assert shelf("count", "--since=1900").stdout == "1\n"
    assert shelf("count", "--since=2000").stdout == "0\n"


@pytest.mark.parametrize("words", [
    ("add", "Emma"), ("add", "Emma", "long ago"), ("remove", "Emma"), ("list", "--sort=colour"), ("list", "--all"),
    ("count", "--since=x"), ("lend", "Emma"), (),
], ids=" ".join)
def test_wrong_use_is_one_line_and_status_2(shelf, words):
    done = shelf(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_twice_the_same_title(shelf):
    shelf("add", "Emma", "1815")
    done = shelf("add", "Emma", "1816")
    assert (done.returncode, done.stderr) == (2, "error: Emma is on the shelf\n")
