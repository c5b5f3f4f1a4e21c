"""The README's example runs and says what it says; doctests of the modules hold."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import gyre_loss
import pytest

README = Path(__file__).parents[1] / "README.md"
MODULES = [f"gyre_loss.{found.name}" for found in pkgutil.iter_modules(gyre_loss.__path__)]


def test_readme_example(capsys):
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    exec(compile(code, "README.md", "exec"), {})
    wanted = re.findall(r"^print\(.*\)  # (\d[^:\n]*)", code, re.MULTILINE)
    assert capsys.readouterr().out.split("\n")[:2] == wanted


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
