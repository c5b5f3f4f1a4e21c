"""How far is the planner off, for each published pair of every preset that was not fitted to it?

The published ratio stands beside the predicted one; the peer here is the published system's own figure. Virtual time:
the figures depend on no machine. Prints one JSON object as its last line; ``docs/reference/sched-presets.md`` has
them as a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace

from gyre_sched.plan import make_plan
from gyre_sched.report import published
from gyre_sched.sim.presets import PRESETS, Preset


def compared(item: Preset, seed: int) -> list[dict]:
    """The preset's pairs, published and predicted."""
    load = replace(item.workload, seed=seed)
    trial = replace(load, steps=min(8, load.steps))
    plan = make_plan(item.name, item.hardware, load, preset=item, trial=trial, seed=seed, cut=item.cut_tail_share)
    rows = {r.name: round(r.result.hours, 3) for r in plan.rows}
    return [{"preset": item.name, **pair, "hours": rows} for pair in published(plan)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--presets", default=",".join(n for n, p in PRESETS.items() if p.published))
    args = parser.parse_args()
    began = time.perf_counter()
    pairs = []
    for name in args.presets.split(","):
        pairs += compared(PRESETS[name], args.seed)
        if not args.json:
            print(json.dumps(pairs[-1]), flush=True)
    for pair in pairs:
        pair["predicted"], pair["off"] = round(pair["predicted"], 3), round(pair["off"], 3)
    out = {
        "benchmark": "plan_presets",
        "hardware": f"{platform.machine()}, one process, Python {platform.python_version()}; virtual time",
        "seed": args.seed,
        "pairs": pairs,
        "worst_off": max((p["off"] for p in pairs), key=abs),
        "wall_s": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
