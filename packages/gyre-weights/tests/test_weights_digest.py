"""The digest: equal wherever and however it is taken, different for every fault it promises to find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gyre_weights import Digest, digest_bytes, digest_torch
from gyre_weights.digest import BLOCK, block_keys, content_digest
from hypothesis import given, settings
from hypothesis import strategies as st

RANDOM = np.random.default_rng(0)


def oracle(data: np.ndarray) -> int:
    """The lanes' sum in plain Python, for one lane after the other."""
    padded = np.zeros(-(-len(data) // BLOCK) * BLOCK, np.uint8)
    padded[: len(data)] = data
    words, total = padded.view(np.uint64).reshape(-1, 64, 64), 0
    for index, block in enumerate(words):
        key = int(block_keys(index, 1)[0])
        for row in block:
            total += sum(int(word) for word in row) * key
    return total % 2**64


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, BLOCK - 1, BLOCK, BLOCK + 8, 3 * BLOCK + 5, 40 * BLOCK + 17])
def test_numpy_and_torch_and_pieces_agree(nbytes: int) -> None:
    data = RANDOM.integers(0, 256, nbytes).astype(np.uint8)
    pieces = Digest()
    for start in range(0, nbytes, 2 * BLOCK):
        pieces.add(data[start : start + 2 * BLOCK])
    assert digest_bytes(data) == pieces.hex() == digest_torch(torch.from_numpy(data))
    running = Digest()
    running.add(data)
    assert int(running._lanes.sum(dtype=np.uint64)) == oracle(data)


def test_the_device_way_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic used on a device, run on the host."""
    data = torch.from_numpy(RANDOM.integers(0, 256, 2050 * BLOCK + 9).astype(np.uint8))
    expected = digest_torch(data)
    monkeypatch.setattr("gyre_weights.digest.digest_bytes", lambda _: pytest.fail("took the host's way"))
    monkeypatch.setattr("gyre_weights.digest._is_host", lambda _: False)
    assert digest_torch(data) == expected


@settings(deadline=None)
@given(st.integers(0, 5 * BLOCK + 99), st.integers(1, 255))
def test_every_damaged_byte_is_found(at: int, flip: int) -> None:
    data = np.arange(5 * BLOCK + 100, dtype=np.uint64).view(np.uint8)[: 5 * BLOCK + 100].copy()
    before = digest_bytes(data)
    data[at] ^= flip
    assert digest_bytes(data) != before


def test_cut_stale_and_exchanged_parts_are_found() -> None:
    data = RANDOM.integers(0, 256, 4 * BLOCK).astype(np.uint8)
    known = digest_bytes(data)
    zeros = data.copy()
    zeros[-100:] = 0
    swapped = np.concatenate([data[BLOCK : 2 * BLOCK], data[:BLOCK], data[2 * BLOCK :]])
    stale = data.copy()
    stale[4096:8192] = RANDOM.integers(0, 256, 4096)
    others = [zeros, zeros[:-100], swapped, stale, data[:-1], np.append(data, np.uint8(0))]
    assert len({known, *map(digest_bytes, others)}) == 7


def test_identity_of_a_version() -> None:
    one, two = ("a", "F32", (2, 3), "1"), ("b", "F32", (2, 3), "2")
    assert content_digest([one, two]) == content_digest([two, one])
    others = [
        [one],
        [one, ("b", "F32", (3, 2), "2")],
        [one, ("b", "BF16", (2, 3), "2")],
        [one, ("b", "F32", (2, 3), "3")],
    ]
    assert len({content_digest(case) for case in [[one, two], *others]}) == 5


def test_bytes_after_a_short_piece_are_refused() -> None:
    digest = Digest()
    digest.add(np.zeros(5, np.uint8))
    with pytest.raises(ValueError, match="whole blocks"):
        digest.add(np.zeros(5, np.uint8))
