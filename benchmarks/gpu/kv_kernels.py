"""Kernels for paged KV on a GPU, against the device's own copy bandwidth in the same run.

Gather (scattered blocks of 16 tokens into a dense staging pool), scatter (back), re-sharding (one rank's heads out of
a full pool, other block size), conversion and the digest; each checked against the host first. Prints one JSON object
as its last line. Needs a GPU and the extra `cuda12` or `cuda13`.

python benchmarks/gpu/kv_kernels.py [--json] [--blocks 2048] [--repeat 20]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from gyre_kvxfer import KVLayout, plan_transfer
from gyre_kvxfer.blocks import block_digests
from gyre_kvxfer.copy import execute
from gyre_kvxfer.kernels.calls import plan_calls
from gyre_kvxfer.kernels.device import DeviceKernels
from gyre_kvxfer.plan import TransferPlan

POOL = KVLayout(layers=16, kv_heads=8, head_dim=128, block_size=16, num_blocks=4096, dtype="bfloat16", axes="BTHD")


class Bench:
    """Pools on the device and a clock made of events."""

    def __init__(self, cp: Any, repeat: int) -> None:
        self.cp, self.repeat = cp, repeat
        self.kernels = DeviceKernels()

    def pool(self, layout: KVLayout, seed: int) -> list[Any]:
        """Random regions (finite bfloat16 numbers)."""
        rng = self.cp.random.default_rng(seed)
        words = layout.region_nbytes // 2
        return [
            rng.integers(0x3000, 0x4000, words, dtype=self.cp.uint16).view(self.cp.uint8)
            for _ in range(layout.region_count)
        ]

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time on the device."""
        cp, times = self.cp, []
        for _ in range(self.repeat):
            a, b = cp.cuda.Event(), cp.cuda.Event()
            a.record()
            call()
            b.record()
            b.synchronize()
            times.append(cp.cuda.get_elapsed_time(a, b) / 1e3)
        return float(np.median(times))

    def moves(self, plan: TransferPlan, src: list[Any], dst: list[Any]) -> dict[str, float]:
        """Check a plan against the host, then time it. Bytes count once read and once written."""
        cp = self.cp
        host = [cp.asnumpy(r) for r in dst]
        execute(plan, [cp.asnumpy(r) for r in src], host)
        calls = plan_calls(plan, [r.data.ptr for r in src], [r.data.ptr for r in dst])
        prepared = [self.kernels.prepare(c) for c in calls]

        def run() -> None:
            for one in prepared:
                self.kernels.run(one)

        run()
        for got, want in zip(dst, host, strict=True):
            if not (cp.asnumpy(got) == want).all():
                raise RuntimeError("the device and the host disagree")
        took = self.seconds(run)
        return {"gb_per_s": round((plan.nbytes + written(plan)) / took / 1e9, 1), "ms": round(took * 1e3, 4)}


def written(plan: TransferPlan) -> int:
    """Bytes written at the destination."""
    return sum(b.runs * b.dst.run_nbytes for b in plan.boxes)


def measure(blocks: int, repeat: int) -> dict[str, Any]:
    """All figures; ratios against the device's copy bandwidth."""
    import cupy as cp

    bench = Bench(cp, repeat)
    rng = np.random.default_rng(0)
    ids = rng.permutation(POOL.num_blocks)[:blocks]
    dense = replace(POOL, num_blocks=blocks)
    tokens = blocks * POOL.block_size
    pool, staging = bench.pool(POOL, 1), bench.pool(dense, 2)
    a, b = cp.concatenate(staging), cp.concatenate(staging)
    copy = 2 * a.nbytes / bench.seconds(lambda: cp.copyto(b, a)) / 1e9
    order = np.arange(blocks)
    out: dict[str, Any] = {
        "device": cp.cuda.runtime.getDeviceProperties(0)["name"].decode(),
        "copy_gb_per_s": round(copy, 1),
    }
    out["gather"] = bench.moves(plan_transfer(POOL, dense, ids, order, stop=tokens), pool, staging)
    out["scatter"] = bench.moves(plan_transfer(dense, POOL, order, ids, stop=tokens), staging, pool)
    half = replace(POOL, axes="BHTD", tp_size=2, tp_rank=1, block_size=32, num_blocks=blocks // 2)
    target = bench.pool(half, 3)
    out["reshard"] = bench.moves(plan_transfer(POOL, half, ids, np.arange(blocks // 2), stop=tokens), pool, target)
    single = replace(dense, dtype="float32")
    wide = [cp.zeros(single.region_nbytes, cp.uint8) for _ in range(single.region_count)]
    out["convert"] = bench.moves(plan_transfer(POOL, single, ids, order, stop=tokens), pool, wide)
    out["digest"] = digest(bench, pool, ids)
    for name in ("gather", "scatter", "reshard", "convert"):
        out[f"{name}_vs_copy"] = round(out[name]["gb_per_s"] / copy, 3)
    return out


def digest(bench: Bench, pool: list[Any], ids: np.ndarray) -> dict[str, float]:
    """The digest of all blocks: checked on a few, timed on all. Bytes are read once."""
    cp = bench.cp
    where = [r.data.ptr for r in pool]
    few = ids[:4]
    host = [cp.asnumpy(r) for r in pool]
    want = block_digests("fast", POOL, host, few, 0, 4, 4 * POOL.block_size)
    if not (cp.asnumpy(bench.kernels.digests(POOL, where, few)) == want).all():
        raise RuntimeError("the device and the host disagree about a digest")
    took = bench.seconds(lambda: bench.kernels.digests(POOL, where, ids))
    return {"gb_per_s": round(len(ids) * POOL.block_nbytes / took / 1e9, 1), "ms": round(took * 1e3, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=20)
    args = parser.parse_args()
    result = measure(args.blocks, args.repeat)
    if not args.json:
        for name in ("gather", "scatter", "reshard", "convert", "digest"):
            print(f"{name:8} {result[name]['gb_per_s']:8.1f} GB/s (copy {result['copy_gb_per_s']})")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
