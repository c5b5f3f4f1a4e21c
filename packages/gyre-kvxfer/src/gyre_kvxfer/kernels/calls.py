"""A plan as kernel calls: which kernel, which box, how many threads. Pure numbers, the same for device and host.

Invariant: the unit a copy kernel moves divides every address, step and size of its box, so no access is misaligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.errors import LayoutRefused, explain
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.plan import Box, Int64, TransferPlan

MAX_INNER = 4
BLOCK = 256
"""Threads of a CUDA block."""

_AXES = ("counts", "src_step", "dst_step")
BOX = np.dtype(
    [(name, np.uint64) for name in ("src_plane", "dst_plane", "src_segment", "dst_segment")]
    + [(name, np.int64) for name in ("planes", "segments", "inner")]
    + [(name, np.int64, (MAX_INNER,)) for name in _AXES]
    + [("elements", np.int64)]
)
"""`struct Box` of kv.cu."""


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call. `src_plane`, `dst_plane`: uint64 addresses; the rest as in `struct Box`.

    `units` is None for conversions. `threads` in all; `lanes` of them work on one run.
    """

    kernel: str
    src_plane: npt.NDArray[np.uint64]
    dst_plane: npt.NDArray[np.uint64]
    src_segment: Int64
    dst_segment: Int64
    counts: tuple[int, ...]
    src_step: tuple[int, ...]
    dst_step: tuple[int, ...]
    elements: int
    units: int | None
    lanes: int
    threads: int

    def box(self, addresses: Sequence[int]) -> npt.NDArray[np.void]:
        """`struct Box` as BOX[1]; `addresses` of the four arrays, in the order of the fields."""
        out = np.zeros(1, BOX)
        fields = ("src_plane", "dst_plane", "src_segment", "dst_segment")
        for name, address in zip(fields, addresses, strict=True):
            out[name] = address
        out["planes"], out["segments"] = len(self.src_plane), len(self.src_segment)
        out["inner"] = prod(self.counts)
        for name in _AXES:
            fill = 1 if name == "counts" else 0
            values = getattr(self, name)
            out[name] = (fill,) * (MAX_INNER - len(values)) + tuple(values)
        out["elements"] = self.elements
        return out


def plan_calls(plan: TransferPlan, src: Sequence[int], dst: Sequence[int]) -> list[Call]:
    """Kernel calls that carry out `plan` between regions at addresses `src` and `dst` (one per region).

    Raises `LayoutRefused` if a layout needs more than `MAX_INNER` inner axes.
    """
    src_base, dst_base = np.array(src, np.uint64), np.array(dst, np.uint64)
    return [_call(plan, box, src_base, dst_base) for box in plan.boxes]


def _call(plan: TransferPlan, box: Box, src: npt.NDArray[np.uint64], dst: npt.NDArray[np.uint64]) -> Call:
    if len(box.counts) > MAX_INNER:
        raise LayoutRefused(
            explain("planning kernels", f"{len(box.counts)} inner axes", f"at most {MAX_INNER}", "Copy on the host.")
        )
    src_plane = src[box.src.plane_region] + box.src.plane_offset.astype(np.uint64)
    dst_plane = dst[box.dst.plane_region] + box.dst.plane_offset.astype(np.uint64)
    if plan.converts:
        kernel, units, width = f"kv_convert_{plan.src.dtype}_{plan.dst.dtype}", None, box.elements
    else:
        sizes = [box.src.run_nbytes, *box.src.inner, *box.dst.inner]
        sizes += [int(np.gcd.reduce(x)) for x in (src_plane, dst_plane)]
        sizes += [int(np.gcd.reduce(x)) for x in (box.src.segment_base, box.dst.segment_base)]
        unit = gcd(16, *sizes)
        kernel, units = f"kv_copy_{unit}", box.src.run_nbytes // unit
        width = units
    lanes = min(BLOCK, 1 << (width - 1).bit_length())
    steps = (box.src.inner, box.dst.inner)
    segments = (box.src.segment_base, box.dst.segment_base)
    return Call(
        kernel, src_plane, dst_plane, *segments, box.counts, *steps, box.elements, units, lanes, box.runs * lanes
    )


def digest_rows(layout: KVLayout, regions: Sequence[int]) -> tuple[npt.NDArray[np.uint64], int, int]:
    """(plane addresses uint64[planes], bytes of a piece, bytes between blocks), planes as in `blocks.rows`.

    Raises `LayoutRefused` if a piece is no whole number of 64-bit words.
    """
    s, extents = layout.strides, layout.extents
    at = layout.axes.index("B")
    nbytes = layout.itemsize * prod(extents[a] for a in layout.axes[at + 1 :])
    if nbytes % 8 or s["B"] % 8:
        raise LayoutRefused(
            explain("digesting on the device", f"pieces of {nbytes} bytes", "a multiple of 8", "Digest on the host.")
        )
    outer = np.zeros(1, np.int64)
    for axis in layout.axes[:at]:
        outer = (outer[:, None] + np.arange(extents[axis]) * s[axis]).ravel()
    base = np.array(regions, np.uint64)
    return (base[:, None] + outer[None, :].astype(np.uint64)).ravel(), nbytes, s["B"]
