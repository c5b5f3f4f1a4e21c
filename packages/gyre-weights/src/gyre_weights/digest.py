"""A cheap digest of a tensor's bytes: were these the bytes that were published?

Every 64-bit word is added to one of 64 lanes (word i to lane i mod 64) within blocks of 32 KiB; each block's lanes are
multiplied by an odd number of its own and summed modulo 2^64; BLAKE2b over the 64 lanes and the length gives 64 bits.
It runs near memory speed in numpy and, for tensors on a device, in torch, with equal results. Any one damaged word, a
cut tail, a stale or foreign block and exchanged blocks are found; two 512-byte rows exchanged inside one 32 KiB block
are not. It guards against faults, not against an adversary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_weights.arrays import Bytes

U64: TypeAlias = npt.NDArray[np.uint64]

LANES = 64
ROWS = 64
BLOCK = LANES * 8 * ROWS
"""Bytes of a block."""
CHUNK = 16 * BLOCK
"""Bytes to digest at a time, so that they stay in the cache for the copy that goes along."""


def block_keys(first: int, count: int) -> U64:
    """Odd multipliers of blocks `first`.. (SplitMix64's finalizer over the index; Steele et al. 2014)."""
    x = (np.arange(first + 1, first + count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


class Digest:
    """A running digest. Feed chunks in order; all but the last must be whole blocks."""

    __slots__ = ("_blocks", "_bytes", "_lanes")

    def __init__(self) -> None:
        self._lanes = np.zeros(LANES, np.uint64)
        self._blocks = 0
        self._bytes = 0

    def add(self, data: Bytes) -> None:
        """uint8[n], contiguous; ValueError after a chunk that was no whole number of blocks."""
        if self._bytes % BLOCK:
            raise ValueError("digesting: got bytes after a part of a block, expected whole blocks before the last")
        self._bytes += data.nbytes
        whole = data.nbytes - data.nbytes % BLOCK
        if whole:
            self._mix(data[:whole])
        if whole < data.nbytes:
            tail = np.zeros(BLOCK, np.uint8)
            tail[: data.nbytes - whole] = data[whole:]
            self._mix(tail)

    def _mix(self, data: Bytes) -> None:
        sums = np.add.reduce(data.view(np.uint64).reshape(-1, ROWS, LANES), axis=1)
        sums *= block_keys(self._blocks, len(sums))[:, None]
        self._lanes += np.add.reduce(sums, axis=0)
        self._blocks += len(sums)

    def hex(self) -> str:
        """16 hexadecimal digits."""
        return _seal(self._lanes, self._bytes)


def _seal(lanes: U64, nbytes: int) -> str:
    return hashlib.blake2b(lanes.astype("<u8").tobytes() + nbytes.to_bytes(8, "little"), digest_size=8).hexdigest()


def digest_bytes(data: Bytes) -> str:
    """Digest of uint8[n]."""
    digest = Digest()
    for start in range(0, data.nbytes, CHUNK):
        digest.add(data[start : start + CHUNK])
    return digest.hex()


def digest_torch(tensor: Any) -> str:
    """Digest of a contiguous torch tensor, computed where it lies; only 512 bytes come to the host."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if _is_host(flat):
        return digest_bytes(flat.numpy())
    lanes = torch.zeros(LANES, dtype=torch.int64, device=flat.device)
    step = 1024 * BLOCK
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        if piece.numel() % BLOCK or piece.data_ptr() % 8:
            padded = torch.zeros(-(-piece.numel() // BLOCK) * BLOCK, dtype=torch.uint8, device=flat.device)
            padded[: piece.numel()] = piece
            piece = padded
        sums = piece.view(torch.int64).reshape(-1, ROWS, LANES).sum(1)
        keys = torch.from_numpy(block_keys(start // BLOCK, len(sums)).view(np.int64)).to(flat.device)
        lanes += (sums * keys[:, None]).sum(0)
    return _seal(lanes.cpu().numpy().view(np.uint64), flat.numel())


def _is_host(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")


def content_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], str]]) -> str:
    """Identity of a whole version from (name, dtype, shape, digest) of its tensors, whatever their order and files."""
    digest = hashlib.blake2b(digest_size=16)
    for name, dtype, shape, value in sorted(tensors):
        digest.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{value}\n".encode())
    return digest.hexdigest()
