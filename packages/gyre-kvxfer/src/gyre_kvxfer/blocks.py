"""Blocks of a pool as byte rows, their digests, and the compact pool a conversion is staged in.

Invariant: the digest of a block covers the bytes of its tokens below `n_tokens` and zeros for the rest, whatever lies
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.copy import Bytes, execute
from gyre_kvxfer.digest import LANES, U64, finish_lanes, finite, lane_sums, part
from gyre_kvxfer.engine import Region
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.native import block_parts
from gyre_kvxfer.plan import Ints, Runs, plan_transfer

CHUNK_BYTES = 256 << 10
"""Digests take this much of a region at a time, so that gathered copies stay in cache."""


def _pieces(layout: KVLayout) -> tuple[npt.NDArray[np.int64], int]:
    """A block's contiguous pieces inside one region: their offsets for block 0, and the bytes of each."""
    s, extents = layout.strides, layout.extents
    at = layout.axes.index("B")
    nbytes = layout.itemsize * int(np.prod([extents[a] for a in layout.axes[at + 1 :]], dtype=np.int64))
    outer = np.zeros(1, np.int64)
    for axis in layout.axes[:at]:
        outer = (outer[:, None] + np.arange(extents[axis]) * s[axis]).ravel()
    return outer, nbytes


def rows(layout: KVLayout, buffers: Sequence[Bytes]) -> list[Bytes]:
    """Every contiguous piece of a block, as uint8[num_blocks, bytes] views, in layout order."""
    outer, nbytes = _pieces(layout)
    shape, pitch = (layout.num_blocks, nbytes), layout.strides["B"]
    return [
        np.ndarray(shape, np.uint8, buffer=buf.data, offset=int(o), strides=(pitch, 1))
        for buf in buffers
        for o in outer
    ]


def block_runs(layout: KVLayout, blocks: Ints) -> Runs:
    """Every piece of these whole blocks as a run of its own, in the order of `rows`, piece by piece, then block by
    block.
    """
    outer, nbytes = _pieces(layout)
    ids = np.asarray(blocks, np.int64) * layout.strides["B"]
    offset = np.tile((outer[:, None] + ids).ravel(), layout.region_count)
    region = np.repeat(np.arange(layout.region_count, dtype=np.int64), len(outer) * len(ids))
    return Runs(region, offset, np.full(len(offset), nbytes, np.int64))


def compact_pool(layout: KVLayout, blocks: int) -> tuple[KVLayout, list[Bytes], list[Region]]:
    """A dense pool of the same form with `blocks` blocks, zeroed, in host memory of this process."""
    small = replace(layout, num_blocks=blocks, block_pitch=0)
    buffers = [np.zeros(small.region_nbytes, np.uint8) for _ in range(small.region_count)]
    return small, buffers, [Region(b.ctypes.data, len(b)) for b in buffers]


def block_digests(
    kind: str, layout: KVLayout, buffers: Sequence[Bytes], blocks: Ints, first: int, stop: int, n_tokens: int
) -> U64:
    """uint64[stop - first]: digests of the sequence's blocks [first, stop), of which `n_tokens` tokens are there."""
    out = np.zeros(stop - first, np.uint64)
    full = max(first, min(stop, n_tokens // layout.block_size))
    ids = np.asarray(blocks[first:full], np.int64)
    if len(ids):
        tables = rows(layout, buffers)
        if kind != "fast" or not block_parts(tables, ids, out[: len(ids)]):
            for plane, table in enumerate(tables):
                out[: len(ids)] += _plane_part(kind, table, ids, plane)
    for b in range(full, stop):
        out[b - first] = _partial(kind, layout, buffers, blocks, b, n_tokens)
    return out


def _plane_part(kind: str, table: Bytes, ids: npt.NDArray[np.int64], plane: int) -> U64:
    """uint64[n]: what one piece adds to the digests of blocks `ids`. Scattered blocks are gathered a cacheful at a
    time.
    """
    if bool((np.diff(ids) == 1).all()):
        return part(kind, table[int(ids[0]) : int(ids[-1]) + 1], plane)
    step = max(1, CHUNK_BYTES // table.shape[1])
    held = np.empty((step, table.shape[1]), np.uint8)
    lanes = np.empty((len(ids), LANES), np.uint64)
    strong = np.empty(len(ids), np.uint64)
    for at in range(0, len(ids), step):
        some = ids[at : at + step]
        got = np.take(table, some, axis=0, out=held[: len(some)], mode="clip")
        if kind == "fast":
            lane_sums(got, lanes[at : at + step])
        else:
            strong[at : at + step] = part(kind, got, plane)
    return finish_lanes(lanes, plane) if kind == "fast" else strong


def _partial(kind: str, layout: KVLayout, buffers: Sequence[Bytes], blocks: Ints, b: int, n_tokens: int) -> np.uint64:
    small, held, _ = compact_pool(layout, 1)
    tokens = min(n_tokens - b * layout.block_size, layout.block_size)
    one = np.zeros(1, np.int64)
    execute(plan_transfer(layout, small, np.asarray(blocks[b : b + 1]), one, start=0, stop=tokens), buffers, held)
    total = np.zeros(1, np.uint64)
    for plane, table in enumerate(rows(small, held)):
        total += part(kind, table, plane)
    return np.uint64(total[0])


def all_finite(layout: KVLayout, buffers: Sequence[Bytes], blocks: Ints, start: int, stop: int) -> bool:
    """Whether the KV of tokens [start, stop) is free of NaN and infinity (fp8 is not looked at)."""
    first, last = start // layout.block_size, layout.blocks_for(stop)
    small, held, _ = compact_pool(layout, max(1, last - first))
    base = first * layout.block_size
    ids = np.arange(last - first)
    plan = plan_transfer(layout, small, np.asarray(blocks[first:last]), ids, start=start - base, stop=stop - base)
    execute(plan, buffers, held)
    return all(finite(b, layout.dtype) for b in held)
