"""The kernels on a GPU, through CuPy. Regions are device addresses; nothing is copied to the host.

Needs the extra `cuda12` or `cuda13`. Invariant: work is queued on the given stream and nothing waits for it here;
a call's tables are uploaded on that stream, too, so they are there before the kernel and, since CuPy's pool gives
memory back to the stream it was taken on, stay until it is done with them.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from gyre_kvxfer.digest import LANES
from gyre_kvxfer.kernels.calls import BLOCK, Call, digest_rows, plan_calls
from gyre_kvxfer.kernels.compile import source
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.plan import Ints, TransferPlan

WAVES = 16
"""Blocks a multiprocessor is given; the kernels stride over the rest."""


class DeviceKernels:
    """kv.cu on CuPy's current device."""

    def __init__(self) -> None:
        self._cp: Any = importlib.import_module("cupy")
        self._module = self._cp.RawModule(code=source(), options=("--std=c++17",), backend="nvrtc")
        self._grid = int(self._cp.cuda.Device().attributes["MultiProcessorCount"]) * WAVES

    def execute(self, plan: TransferPlan, src: Sequence[int], dst: Sequence[int], stream: Any = None) -> None:
        """Queue `plan` between device regions at these addresses: gather, scatter, re-sharding and conversion
        alike.
        """
        with contextlib.nullcontext() if stream is None else stream:
            for call in plan_calls(plan, src, dst):
                self.run(self.prepare(call), stream)

    def prepare(self, call: Call) -> tuple[Any, ...]:
        """A call with its tables uploaded on the current stream; `run` may then be called many times, on that one."""
        cp = self._cp
        tables = [cp.asarray(x) for x in (call.src_plane, call.dst_plane, call.src_segment, call.dst_segment)]
        box = cp.asarray(call.box([t.data.ptr for t in tables]).view(np.uint8))
        numbers = [call.lanes] if call.units is None else [call.units, call.lanes]
        grid = max(1, min(-(-call.threads // BLOCK), self._grid))
        return call.kernel, grid, (box, *(np.int64(n) for n in numbers)), tables

    def run(self, prepared: tuple[Any, ...], stream: Any = None) -> None:
        """Queue a prepared call."""
        kernel, grid, args, _ = prepared
        self._module.get_function(kernel)((grid,), (BLOCK,), args, stream=stream)

    def digests(self, layout: KVLayout, regions: Sequence[int], blocks: Ints, slices: int = 4) -> Any:
        """cupy uint64[n]: `fast` digests of full blocks, queued on the current stream."""
        cp = self._cp
        planes, nbytes, pitch = digest_rows(layout, regions)
        ids, where = cp.asarray(np.asarray(blocks, np.int64)), cp.asarray(planes)
        sums = cp.zeros(len(planes) * len(ids) * LANES, cp.uint64)
        out = cp.zeros(len(ids), cp.uint64)
        sizes = (np.int64(len(planes)), np.int64(len(ids)))
        grid = (self._grid,)
        first = (where, ids, sums, *sizes, np.int64(nbytes), np.int64(pitch), np.int64(slices))
        self._module.get_function("kv_lane_sums")(grid, (BLOCK,), first)
        self._module.get_function("kv_finish_digests")(grid, (BLOCK,), (sums, out, *sizes, np.int64(0)))
        return out
