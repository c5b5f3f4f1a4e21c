"""The README's example runs as it stands, and its table is the truth."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
from gyre_tasks.files.operations import OPERATIONS

README = Path(__file__).parents[1] / "README.md"
HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "task-sets.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    exec(compile(code[1], str(README), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("files/train/00000-")
    assert all(line.startswith("out/") for line in printed[1:])
    assert len(printed) >= 3


def test_the_table_is_what_the_family_does() -> None:
    rows = re.findall(r"^\| (\w+) \| `(.+?)` \|$", README.read_text(), re.MULTILINE)
    assert rows == [(operation.word, operation.command) for operation in OPERATIONS]


@pytest.mark.skipif(not HOW_TO.is_file(), reason="needs the repository's docs")
def test_the_how_to_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("how_to_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for code in re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL):
        exec(compile(code, str(HOW_TO), "exec"), module.__dict__)
    assert capsys.readouterr().out.startswith("20 counting/heldout/1000000 [{'path': 'answer.txt'")
    [registration] = module.gyre_register()
    assert registration.name == "counting"
