"""The kernels on the host: the device's own source, run by loops. For tests, and where numpy is too slow.

Invariant: same arguments, same results as on the device, bit by bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gyre_kvxfer.digest import LANES, U64
from gyre_kvxfer.kernels.calls import BLOCK, Call, digest_rows, plan_calls
from gyre_kvxfer.kernels.compile import build_host
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.plan import Ints, TransferPlan


class HostKernels:
    """kv.cu built for this machine. `grid` blocks a launch: any number gives the same result."""

    def __init__(self, folder: Path, grid: int = 1) -> None:
        self._lib = build_host(folder)
        self._grid = grid

    def execute(self, plan: TransferPlan, src: Sequence[int], dst: Sequence[int]) -> None:
        """Carry out `plan` between host regions at these addresses."""
        for call in plan_calls(plan, src, dst):
            self._run(call)

    def _run(self, call: Call) -> None:
        arrays = [np.ascontiguousarray(x) for x in (call.src_plane, call.dst_plane, call.src_segment, call.dst_segment)]
        box = call.box([a.ctypes.data for a in arrays])
        numbers = [call.lanes] if call.units is None else [call.units, call.lanes]
        self._launch(call.kernel, box.ctypes.data, *numbers)

    def _launch(self, kernel: str, *args: int) -> None:
        run = getattr(self._lib, f"host_{kernel}")
        run.restype = None
        run.argtypes = [ctypes.c_int64] * (2 + len(args))
        run(self._grid, BLOCK, *args)

    def digests(self, layout: KVLayout, regions: Sequence[int], blocks: Ints, slices: int = 1) -> U64:
        """uint64[n]: `fast` digests of full blocks."""
        planes, nbytes, pitch = digest_rows(layout, regions)
        ids = np.ascontiguousarray(blocks, np.int64)
        sums = np.zeros(len(planes) * len(ids) * LANES, np.uint64)
        out = np.zeros(len(ids), np.uint64)
        pointers = (planes.ctypes.data, ids.ctypes.data, sums.ctypes.data)
        self._launch("kv_lane_sums", *pointers, len(planes), len(ids), nbytes, pitch, slices)
        self._launch("kv_finish_digests", sums.ctypes.data, out.ctypes.data, len(planes), len(ids), 0)
        return out
