"""Digests in C: the numbers of numpy, also of bytes of another process; and numpy's turn where there is no compiler."""

from __future__ import annotations

import ctypes
import errno
import os

import numpy as np
import pytest
from gyre_kvxfer import native
from gyre_kvxfer.digest import LANES, fast_part
from gyre_kvxfer.memory import IOVEC
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module", autouse=True)
def library():
    if native.load() is None:
        pytest.skip("no C compiler here: numpy does the work")


@given(
    st.integers(1, 5), st.integers(0, 3), st.integers(1, 3), st.lists(st.integers(0, 8), min_size=1), st.integers(0, 99)
)
def test_the_same_digests_as_numpy(rows: int, gap: int, planes: int, ids: list[int], seed: int) -> None:
    nbytes = rows * 8 * LANES
    rng = np.random.default_rng(seed)
    tables = [rng.integers(0, 256, (9, nbytes + 8 * gap), np.uint8)[:, :nbytes] for _ in range(planes)]
    out = np.empty(len(ids), np.uint64)
    assert native.block_parts(tables, np.array(ids), out)
    want = [fast_part(np.ascontiguousarray(table[ids]), plane) for plane, table in enumerate(tables)]
    assert (out == np.sum(want, axis=0, dtype=np.uint64)).all()


def pieces(of: np.ndarray) -> np.ndarray:
    out = np.empty(len(of), IOVEC)
    out["base"], out["size"] = of.ctypes.data + np.arange(len(of)) * of.strides[0], of.shape[1]
    return out


@pytest.mark.parametrize("nbytes", [512, 4096, native.BATCH_BYTES * 2])
def test_bytes_of_another_process_are_digested_as_they_come(nbytes: int) -> None:
    source = np.random.default_rng(3).integers(0, 256, (12, nbytes), np.uint8)
    into, parts = np.zeros_like(source), np.empty(9, np.uint64)
    assert native.read_parts(os.getpid(), pieces(into)[3:], pieces(source)[3:], 3, 4, parts) == 9
    assert (into[3:] == source[3:]).all()
    assert not into[:3].any()
    want = [fast_part(source[i : i + 1], i // 4)[0] for i in range(3, 12)]
    assert parts.tolist() == want


def test_a_read_that_fails_says_how_far_it_came_and_why() -> None:
    source = np.ones((3, native.BATCH_BYTES), np.uint8)
    into, parts, remote = np.zeros_like(source), np.empty(3, np.uint64), pieces(source)
    remote["base"][1] = 8
    assert native.read_parts(os.getpid(), pieces(into), remote, 0, 3, parts) == 1
    assert ctypes.get_errno() == errno.EFAULT


def test_pieces_it_cannot_take_are_left_to_numpy() -> None:
    out = np.empty(1, np.uint64)
    assert not native.block_parts([np.zeros((2, 520), np.uint8)], np.array([0]), out)
    assert not native.block_parts([np.zeros((2, 1025), np.uint8)[:, 1:513]], np.array([0]), out)
    assert not native.block_parts([np.zeros((2, 512), np.uint8), np.zeros((2, 1024), np.uint8)], np.array([0]), out)
    assert not native.whole(0)
    with pytest.raises(IndexError, match="expected them in"):
        native.block_parts([np.zeros((2, 512), np.uint8)], np.array([2]), out)


def test_without_a_compiler_or_with_a_broken_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert native.build(tmp_path / "a") is None
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert native.build(tmp_path / "b") is None


def test_the_library_is_named_after_the_processor_it_was_built_for(tmp_path, monkeypatch) -> None:
    """A home may be shared by machines of several kinds: code for one can be unknown to another."""

    def told(flags: str) -> str:
        info = tmp_path / flags.replace(" ", "")
        cores = [f"processor\t: {i}\ncpu MHz\t: {2000 + i}\nflags\t\t: {flags}\n" for i in range(2)]
        info.write_text("\n".join(cores))
        return native.processor(info)

    assert told("fpu sse2 avx512f") == told("fpu sse2 avx512f") != told("fpu sse2")
    assert native.processor(tmp_path / "none") == native.processor(tmp_path / "none either")
    kinds = iter([told("fpu sse2"), told("fpu sse2 avx512f"), told("fpu sse2")])
    monkeypatch.setattr(native, "processor", lambda: next(kinds))
    first, second, third = (native.build(tmp_path / "cache") for _ in range(3))
    assert first == third != second
    assert sorted((tmp_path / "cache").iterdir()) == sorted([first, second])
