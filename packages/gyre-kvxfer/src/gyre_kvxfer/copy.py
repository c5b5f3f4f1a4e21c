"""Carry out a plan inside one process, on host memory, with numpy views.

This is the CPU form of the gather, scatter and re-sharding kernels: every box becomes one strided view a side and one
assignment a segment group, with the dtype converted on the way. Invariant: writes exactly the destination bytes the
plan names. It takes buffers, not addresses; `memory.py` makes buffers of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.errors import LayoutRefused, explain
from gyre_kvxfer.plan import Box, TransferPlan

Bytes: TypeAlias = npt.NDArray[np.uint8]
Array: TypeAlias = npt.NDArray[Any]

_STORED: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3": np.uint8,
    "float8_e5m2": np.uint8,
}


def stored_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype a KV dtype's elements are held in (bfloat16 and fp8 as unsigned integers)."""
    return np.dtype(_STORED[name])


def convert(x: Array, src: str, dst: str) -> Array:
    """Elements of dtype `src` as elements of dtype `dst`, rounded to nearest even, in stored form.

    Shapes are kept. bfloat16 goes through float32; NaN stays NaN.
    """
    if src == dst:
        return x
    if src == "bfloat16":
        x = (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dst != "bfloat16":
        with np.errstate(over="ignore"):
            return x.astype(stored_dtype(dst))
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nan = np.isnan(bits.view(np.float32))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def execute(plan: TransferPlan, src: Sequence[Bytes], dst: Sequence[Bytes]) -> None:
    """Copy what `plan` says from the source's region buffers to the destination's (uint8[region_nbytes] each)."""
    _check_regions(plan.src.region_count, plan.src.region_nbytes, src, "source")
    _check_regions(plan.dst.region_count, plan.dst.region_nbytes, dst, "destination")
    for box in plan.boxes:
        _copy_box(plan, box, src, dst)


def _check_regions(count: int, nbytes: int, got: Sequence[Bytes], side: str) -> None:
    if len(got) != count or any(len(r) < nbytes for r in got):
        came = f"{len(got)} buffers of {sorted({len(r) for r in got})} bytes"
        raise LayoutRefused(
            explain(f"copying blocks, {side}", came, f"{count} of at least {nbytes}", "Pass regions in layout order.")
        )


def _copy_box(plan: TransferPlan, box: Box, src: Sequence[Bytes], dst: Sequence[Bytes]) -> None:
    """One box. Where segments lie at even distances on both sides they form one view; else one copy a segment."""
    s_type, d_type = stored_dtype(plan.src.dtype), stored_dtype(plan.dst.dtype)
    shape = (*box.counts, box.elements)
    s_strides = (*box.src.inner, plan.src.itemsize)
    d_strides = (*box.dst.inner, plan.dst.itemsize)
    for p in range(len(box.src.plane_region)):
        s_buf = src[int(box.src.plane_region[p])]
        d_buf = dst[int(box.dst.plane_region[p])]
        for s0, d0, n, s_step, d_step in even_groups(box.src.segment_base, box.dst.segment_base):
            a = _view(s_buf, s_type, int(box.src.plane_offset[p]) + s0, (n, *shape), (s_step, *s_strides))
            b = _view(d_buf, d_type, int(box.dst.plane_offset[p]) + d0, (n, *shape), (d_step, *d_strides))
            b[...] = convert(a, plan.src.dtype, plan.dst.dtype)


def even_groups(src: npt.NDArray[np.int64], dst: npt.NDArray[np.int64]) -> list[tuple[int, int, int, int, int]]:
    """Split two base lists into stretches with constant steps: (src base, dst base, count, src step, dst step).

    A step is never negative: destination stretches must not fold onto themselves.
    """
    out = []
    i, n = 0, len(src)
    s, d = src.tolist(), dst.tolist()
    while i < n:
        j = i + 1
        s_step = d_step = 0
        if j < n and s[j] > s[i] and d[j] > d[i]:
            s_step, d_step = s[j] - s[i], d[j] - d[i]
            while j < n and s[j] - s[j - 1] == s_step and d[j] - d[j - 1] == d_step:
                j += 1
        out.append((s[i], d[i], j - i, s_step, d_step))
        i = j
    return out


def _view(buf: Bytes, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """A strided view into a region, bounds checked: the last byte must lie inside."""
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    if offset < 0 or last > len(buf):
        raise LayoutRefused(
            explain("copying blocks", f"bytes up to {last}", f"a region of {len(buf)}", "The layout is not the pool's.")
        )
    return np.ndarray(shape, dtype, buffer=buf.data, offset=offset, strides=strides)
