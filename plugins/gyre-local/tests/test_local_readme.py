"""The README's example runs and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_says_what_it_prints() -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    wanted = re.findall(r"^    print\(.*\)  # ([^:\n]*)", found.group(1), re.MULTILINE)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(found.group(1), "README.md", "exec"), {})
    assert said.getvalue().splitlines() == wanted
    assert len(wanted) == 3
