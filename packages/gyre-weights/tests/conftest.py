"""Helper modules beside the tests are importable; roots in shared memory stay out of other tests' way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gyre_weights.handover import Holder

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /dev/shm, so that a test that fails leaves nothing there."""
    base = tmp_path / "shm"
    base.mkdir()
    monkeypatch.setattr("gyre_weights.shm.shm_root.__kwdefaults__", {"base": base})
    monkeypatch.setattr("gyre_weights.shm.sweep.__kwdefaults__", {"base": base, "abandoned_s": 3600.0})
    return base


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """Of the versions under `there`."""
    made = Holder(tmp_path / "there", idle_s=200.0, total_s=280.0)
    yield made
    made.close()
