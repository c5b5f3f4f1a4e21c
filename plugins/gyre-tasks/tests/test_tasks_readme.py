"""The README's example runs as it stands, and its table is the truth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gyre_tasks.files.operations import OPERATIONS

README = Path(__file__).parents[1] / "README.md"


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
