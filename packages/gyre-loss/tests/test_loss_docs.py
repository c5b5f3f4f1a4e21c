"""The how-to's blocks run, in order; names that the reference lists exist."""

from __future__ import annotations

import re
from pathlib import Path

import gyre_loss
import pytest

DOCS = Path(__file__).parents[3] / "docs"
pytestmark = pytest.mark.skipif(not DOCS.exists(), reason="the package stands alone, without the repository's docs")


@pytest.mark.parametrize(("page", "count"), [("loss", 7), ("loss-own-model", 4)])
def test_how_to_runs(page, count):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"how-to/{page}.md").read_text(), re.DOTALL)
    assert len(blocks) == count
    space: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/how-to/{page}.md", "exec"), space)


def test_reference_names_every_public_name():
    text = (DOCS / "reference/loss.md").read_text()
    hidden = {"Aggregation", "Denominators", "GroupNote", "Layout", "Objective", "Status", "histogram", "staleness"}
    missing = [name for name in gyre_loss.__all__ if name not in hidden and f"{name}" not in text]
    assert not missing
    for name in gyre_loss.__all__:
        assert getattr(gyre_loss, name) is not None
