"""The README's example runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_example_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr
    first, second = out.stdout.splitlines()
    assert re.fullmatch(r"\d+ tokens, \d+ sampled, 4 nodes", first)
    assert second == "completed {3}"
