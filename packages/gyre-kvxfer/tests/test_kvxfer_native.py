"""Lane sums in C: the numbers of numpy, and numpy's turn where there is no compiler."""

from __future__ import annotations

import numpy as np
import pytest
from gyre_kvxfer import native
from gyre_kvxfer.digest import LANES, lane_sums
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module", autouse=True)
def library():
    if native.load() is None:
        pytest.skip("no C compiler here: numpy does the work")


@given(st.integers(1, 5), st.integers(0, 3), st.lists(st.integers(0, 8), min_size=1, max_size=9), st.integers(0, 99))
def test_the_same_sums_as_numpy(rows: int, gap: int, ids: list[int], seed: int) -> None:
    nbytes = rows * 8 * LANES
    pool = np.random.default_rng(seed).integers(0, 256, (9, nbytes + 8 * gap), np.uint8)
    table = pool[:, :nbytes]
    out = np.empty((len(ids), LANES), np.uint64)
    assert native.lane_rows(table, np.array(ids), out)
    assert (out == lane_sums(np.ascontiguousarray(table[ids]))).all()


def test_rows_it_cannot_take_are_left_to_numpy() -> None:
    out = np.empty((1, LANES), np.uint64)
    assert not native.lane_rows(np.zeros((2, 520), np.uint8), np.array([0]), out)
    assert not native.lane_rows(np.zeros((2, 1025), np.uint8)[:, 1:513], np.array([0]), out)
    with pytest.raises(IndexError, match="expected them in"):
        native.lane_rows(np.zeros((2, 512), np.uint8), np.array([2]), out)


def test_without_a_compiler_or_with_a_broken_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.build(tmp_path / "a") is None
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert native.build(tmp_path / "b") is None
