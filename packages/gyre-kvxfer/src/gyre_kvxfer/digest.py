"""Digests of blocks: does the destination hold the bytes the source had?

Two kinds. `fast`: every 64-bit word is summed into one of 64 lanes, lanes and regions are then mixed with
multipliers; it reads every byte once (see `native`) and finds every single damaged word, stale and foreign blocks,
exchanged regions and lanes; it does not see two 512-byte rows of one region's part of a block exchanged. `strong`:
BLAKE2b, cut to 64 bits, for those who want that too. Neither is a signature.

Invariant: a digest is a function of the block's bytes in layout order alone: equal forms (`KVLayout.block_form`) give
equal digests wherever the block lies.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.errors import LayoutRefused, explain

U64: TypeAlias = npt.NDArray[np.uint64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

LANES = 64
KINDS = ("fast", "strong")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: U64) -> U64:
    """A bijection of 64-bit words that spreads every bit (the finalizer of SplitMix64, Steele et al. 2014)."""
    x = x.astype(np.uint64, copy=True)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def lane_sums(pieces: Bytes, out: U64 | None = None) -> U64:
    """uint8[n, bytes] → uint64[n, LANES]: word i is added to lane i mod LANES; a short last word is padded with 0."""
    n, nbytes = pieces.shape
    rows, rest = divmod(nbytes, LANES * 8)
    if rows and pieces.strides[1] == 1 and pieces.strides[0] % 8 == 0 and pieces.ctypes.data % 8 == 0:
        words = np.ndarray((n, rows, LANES), np.uint64, pieces, 0, (pieces.strides[0], LANES * 8, 8))
    else:
        words = np.ascontiguousarray(pieces[:, : nbytes - rest]).view(np.uint64).reshape(n, rows, LANES)
    out = np.empty((n, LANES), np.uint64) if out is None else out
    np.add.reduce(words, axis=1, dtype=np.uint64, out=out)
    if rest:
        tail = np.zeros((n, LANES * 8), np.uint8)
        tail[:, :rest] = pieces[:, nbytes - rest :]
        out += tail.view(np.uint64)
    return out


@lru_cache(maxsize=1)
def _keys() -> U64:
    """One odd multiplier a lane."""
    return _mix(np.arange(1, LANES + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1)


def finish_lanes(lanes: U64, plane: int) -> U64:
    """uint64[n, LANES] → uint64[n]: one region's part of each block's digest (parts are added up)."""
    place = np.array([plane + 1], np.uint64) * _GOLDEN
    return _mix(np.add.reduce(lanes * _keys(), axis=1, dtype=np.uint64) + place)


def fast_part(pieces: Bytes, plane: int) -> U64:
    """uint64[n]: what piece `plane` (uint8[n, bytes], one row a block) adds to each block's digest."""
    return finish_lanes(lane_sums(pieces), plane)


def strong_part(pieces: Bytes, plane: int) -> U64:
    """Like `fast_part`, from BLAKE2b keyed by the piece's number."""
    out = np.empty(len(pieces), np.uint64)
    for i, row in enumerate(pieces):
        h = hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=8, salt=plane.to_bytes(8, "little"))
        out[i] = int.from_bytes(h.digest(), "little")
    return out


def part(kind: str, pieces: Bytes, plane: int) -> U64:
    """`fast_part` or `strong_part` by name."""
    if kind not in KINDS:
        raise LayoutRefused(explain("choosing a digest", kind, KINDS, "Name one of them, or none."))
    return fast_part(pieces, plane) if kind == "fast" else strong_part(pieces, plane)


def finite(data: Bytes, dtype: str) -> bool:
    """Whether all elements (uint8[..., bytes], last axis dense) are finite. fp8 is not looked at."""
    masks = {"float32": (np.uint32, 0x7F800000), "float16": (np.uint16, 0x7C00), "bfloat16": (np.uint16, 0x7F80)}
    if dtype not in masks:
        return True
    kind, mask = masks[dtype]
    word = np.ascontiguousarray(data).view(kind)
    return not bool(((word & kind(mask)) == kind(mask)).any())
