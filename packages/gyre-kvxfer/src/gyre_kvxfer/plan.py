"""`plan_transfer`: which bytes of which source block go where in the destination.

Pure: two layouts, two block tables and a range of tokens in, a plan out. The plan is a set of boxes, products of
index lists with the same inner run, found by merging axes as long as both sides stay contiguous; so its size follows
the number of runs that really are apart, not the number of tokens.

Invariant: every byte of the KV of tokens [start, stop) that both ranks hold appears in exactly one run, and no other
byte does. It moves nothing; `copy.py` and the transports do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.errors import LayoutRefused, explain
from gyre_kvxfer.layout import SCALED, KVLayout

Int64: TypeAlias = npt.NDArray[np.int64]
Ints: TypeAlias = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Side:
    """Where one side's runs of a box begin: region and byte offset per plane, base per segment, step per inner axis.

    The run (plane p, segment s, inner index i, j, ...) begins at byte
    `plane_offset[p] + segment_base[s] + i * inner[0] + j * inner[1] + ...` of region `plane_region[p]`.
    """

    plane_region: Int64
    plane_offset: Int64
    segment_base: Int64
    inner: tuple[int, ...]
    run_nbytes: int


@dataclass(frozen=True, slots=True)
class Box:
    """Runs of one shape: `elements` elements each, `counts` the extents of the inner axes on both sides."""

    src: Side
    dst: Side
    counts: tuple[int, ...]
    elements: int

    @property
    def runs(self) -> int:
        """Number of runs."""
        return len(self.src.plane_region) * len(self.src.segment_base) * int(np.prod(self.counts, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Runs:
    """Flat runs of one side, in stream order: int64 arrays of one length. `nbytes` each."""

    region: Int64
    offset: Int64
    nbytes: Int64

    def __len__(self) -> int:
        return len(self.region)

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """The boxes of a transfer of tokens [start, stop) between two ranks. `converts`: the dtypes differ."""

    src: KVLayout
    dst: KVLayout
    start: int
    stop: int
    boxes: tuple[Box, ...]

    @property
    def converts(self) -> bool:
        """Whether elements change their dtype on the way (then bytes cannot simply be copied)."""
        return self.src.dtype != self.dst.dtype

    @property
    def nbytes(self) -> int:
        """Bytes read at the source."""
        return sum(b.runs * b.src.run_nbytes for b in self.boxes)

    @property
    def shortest_run(self) -> int:
        """Bytes of the shortest contiguous run at the source (0 if there is nothing to move)."""
        return min((b.src.run_nbytes for b in self.boxes), default=0)

    def runs(self) -> tuple[Runs, Runs]:
        """Both sides' runs in one order, neighbours merged on each side by itself.

        The two lists have the same total, not the same length: they are two cuttings of one stream of bytes.
        """
        if self.converts:
            raise LayoutRefused(
                explain("listing runs", f"{self.src.dtype} to {self.dst.dtype}", "one dtype", "Copy through staging.")
            )
        return _flatten(self.boxes, "src"), _flatten(self.boxes, "dst")


def check_convertible(src: KVLayout, dst: KVLayout) -> None:
    """Raise `LayoutRefused` unless KV of `src` can become KV of `dst`.

    Refused: other models, shapes or layer ranges that do not meet; fp8 with other scales or to another dtype (the
    numbers would need rescaling); recurrent state on one side only.
    """

    def need(ok: bool, came: object, expected: object) -> None:
        if not ok:
            raise LayoutRefused(
                explain("matching two KV layouts", came, expected, "The session's tokens must be prefilled instead.")
            )

    need(not src.model or not dst.model or src.model == dst.model, f"models {src.model!r}, {dst.model!r}", "one model")
    need(src.kind == dst.kind, f"kinds {src.kind}, {dst.kind}", "one kind")
    for name in ("kv_heads", "head_dim"):
        a, b = getattr(src, name), getattr(dst, name)
        need(a == b, f"{name} {a} at the source, {b} at the destination", "equal numbers")
    s0, s1 = src.first_layer, src.first_layer + src.layers
    d0, d1 = dst.first_layer, dst.first_layer + dst.layers
    need(max(s0, d0) < min(s1, d1), f"layers [{s0},{s1}) and [{d0},{d1})", "ranges that meet")
    if src.dtype in SCALED or dst.dtype in SCALED:
        need(src.dtype == dst.dtype, f"{src.dtype} to {dst.dtype}", "the same fp8 dtype (others need rescaling)")
        need(src.scales == dst.scales, f"scales {src.scales!r}, {dst.scales!r}", "one scale set")
    need(
        src.states == dst.states,
        f"recurrent state {[s.name for s in src.states]} and {[s.name for s in dst.states]}",
        "the same state on both sides",
    )


def sources_for(src: KVLayout, dst: KVLayout) -> list[int]:
    """The source ranks a destination rank reads from, each head once (replicated heads from one rank only)."""
    if src.kind == "mla":
        return [dst.tp_rank % src.tp_size]
    wanted = set(dst.heads)
    chosen = []
    for rank in range(src.tp_size):
        held = set(replace(src, tp_rank=rank).heads) & wanted
        if held:
            chosen.append(rank)
            wanted -= held
    return chosen


def plan_transfer(
    src: KVLayout, dst: KVLayout, src_blocks: Ints, dst_blocks: Ints, *, start: int = 0, stop: int
) -> TransferPlan:
    """Plan the copy of tokens [start, stop) of one sequence from rank `src` to rank `dst`.

    `src_blocks`, `dst_blocks`: int[ceil(stop / block_size)] each, the sequence's block tables. Raises
    `LayoutRefused` if the layouts do not convert, or a table is short or names a block outside the pool.
    """
    check_convertible(src, dst)
    check_table(src, src_blocks, start, stop, "source")
    check_table(dst, dst_blocks, start, stop, "destination")
    heads = range(max(src.heads.start, dst.heads.start), min(src.heads.stop, dst.heads.stop))
    if start == stop or not heads:
        return TransferPlan(src, dst, start, stop, ())
    seg_src, seg_dst, length = _segments(src, dst, src_blocks, dst_blocks, start, stop)
    boxes = []
    for n in np.unique(length):
        pick = length == n
        boxes.append(_box(src, dst, heads, int(n), seg_src[pick], seg_dst[pick]))
    return TransferPlan(src, dst, start, stop, tuple(boxes))


def check_table(x: KVLayout, blocks: Ints, start: int, stop: int, side: str) -> None:
    """Raise `LayoutRefused` unless the table has the blocks of tokens [start, stop) and all lie in the pool."""
    doing = f"planning tokens [{start},{stop}) at the {side}"
    if not 0 <= start <= stop:
        raise LayoutRefused(explain(doing, f"[{start},{stop})", "0 <= start <= stop", "Correct the range."))
    need = x.blocks_for(stop)
    if len(blocks) < need:
        raise LayoutRefused(explain(doing, f"{len(blocks)} blocks", f"{need}", "Pass the whole block table."))
    used = blocks[start // x.block_size : need]
    if len(used) and (int(used.min()) < 0 or int(used.max()) >= x.num_blocks):
        came = f"block ids from {int(used.min())} to {int(used.max())}"
        raise LayoutRefused(explain(doing, came, f"0..{x.num_blocks - 1}", "The table belongs to another pool."))


def _segments(
    src: KVLayout, dst: KVLayout, src_blocks: Ints, dst_blocks: Ints, start: int, stop: int
) -> tuple[Int64, Int64, Int64]:
    """Cut [start, stop) at both sides' block borders: byte base in the source, in the destination, tokens."""
    cuts = np.concatenate(
        [np.arange(start - start % b, stop + b, b, dtype=np.int64) for b in (src.block_size, dst.block_size)]
        + [np.array([start, stop], np.int64)]
    )
    cuts = np.unique(cuts[(cuts >= start) & (cuts <= stop)])
    first, length = cuts[:-1], np.diff(cuts)

    def base(x: KVLayout, blocks: Ints) -> Int64:
        s = x.strides
        ids = blocks[first // x.block_size].astype(np.int64)
        return np.asarray(ids * s["B"] + first % x.block_size * s["T"], np.int64)

    return base(src, src_blocks), base(dst, dst_blocks), length


def _box(src: KVLayout, dst: KVLayout, heads: range, tokens: int, seg_src: Int64, seg_dst: Int64) -> Box:
    """One box for all segments of `tokens` tokens."""
    low = max(src.first_layer, dst.first_layer)
    high = min(src.first_layer + src.layers, dst.first_layer + dst.layers)
    extents = {"L": high - low, "K": src.kinds, "H": len(heads), "T": tokens, "D": src.head_dim}
    shared = {a for a in "LK" if a in src.axes and a in dst.axes}
    axes = [a for a in "LKHTD" if a in shared or a in "HTD"]
    ss, ds = src.strides, dst.strides
    run, src_run, dst_run = 1, src.itemsize, dst.itemsize
    left = [a for a in axes if extents[a] > 1]
    merged = True
    while merged:
        merged = False
        for axis in left:
            if ss[axis] == src_run and ds[axis] == dst_run:
                run, src_run, dst_run = run * extents[axis], src_run * extents[axis], dst_run * extents[axis]
                left.remove(axis)
                merged = True
                break
    left.sort(key=lambda a: -ss[a])
    planes = [
        (layer, kind)
        for layer in (range(low, high) if "L" not in shared else [low])
        for kind in (range(src.kinds) if "K" not in shared else [0])
    ]

    def side(x: KVLayout, segments: Int64, run_nbytes: int) -> Side:
        s = x.strides
        region = [x.region_index(layer - x.first_layer, kind) for layer, kind in planes]
        first = (heads.start - x.heads.start) * s["H"]
        offset = [first + (layer - x.first_layer) * s["L"] + kind * s["K"] for layer, kind in planes]
        return Side(
            np.array(region, np.int64), np.array(offset, np.int64), segments, tuple(s[a] for a in left), run_nbytes
        )

    return Box(side(src, seg_src, src_run), side(dst, seg_dst, dst_run), tuple(extents[a] for a in left), run)


def side_runs(box: Box, which: str) -> tuple[Int64, Int64]:
    """Region and byte offset of every run of a box in stream order (plane, segment, inner)."""
    side: Side = getattr(box, which)
    inner = np.zeros(1, np.int64)
    for count, step in zip(box.counts, side.inner, strict=True):
        inner = (inner[:, None] + np.arange(count, dtype=np.int64) * step).ravel()
    offset = side.plane_offset[:, None, None] + side.segment_base[None, :, None] + inner[None, None, :]
    region = np.broadcast_to(side.plane_region[:, None, None], offset.shape)
    return region.ravel(), offset.ravel()


def _flatten(boxes: tuple[Box, ...], which: str) -> Runs:
    regions, offsets, sizes = [], [], []
    for box in boxes:
        region, offset = side_runs(box, which)
        regions.append(region)
        offsets.append(offset)
        sizes.append(np.full(len(region), getattr(box, which).run_nbytes, np.int64))
    if not regions:
        empty = np.zeros(0, np.int64)
        return Runs(empty, empty, empty)
    return merge(Runs(np.concatenate(regions), np.concatenate(offsets), np.concatenate(sizes)))


def merge(runs: Runs) -> Runs:
    """Join runs that follow one another both in the stream and in memory."""
    if len(runs) < 2:
        return runs
    apart = np.empty(len(runs), bool)
    apart[0] = True
    apart[1:] = (runs.region[1:] != runs.region[:-1]) | (runs.offset[1:] != runs.offset[:-1] + runs.nbytes[:-1])
    first = np.flatnonzero(apart)
    return Runs(runs.region[first], runs.offset[first], np.add.reduceat(runs.nbytes, first))
