"""Does elastic scheduling earn what was published, and does it ever lose?

Two parts. ``qwengyre``: the preset under all ways of scheduling over several seeds; static takes its best
split, found by search; the bound is proven (docs/why/sched-bound.md). ``random``: seeded random workloads
and clusters; one elastic policy with one set of settings (cost-aware that lends its core, no cutting) against the
better baseline of each workload, colocate with its best sync size and static with its best split. The other elastic
policies are reported beside it. ``holdout`` is the same over numbers that nobody looked at while the policies were
made. The peers here are the baselines, run through the same machine. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gyre_sched
from gyre_sched.plan import best_split, elastic_config, make_plan, pipeline_config
from gyre_sched.policies import static
from gyre_sched.sim.models import Hardware
from gyre_sched.sim.presets import preset
from gyre_sched.sim.run import simulate
from gyre_sched.sim.workload import Shape

KINDS = ("short", "long", "bursty", "heavy-tail", "tool-bound", "train-bound")
FULL = ("colocate-sync", "colocate", "switching", "joining", "moving", "cost-aware", "cutting", "cost-aware+cutting")
QUICK = ("colocate-sync", "colocate", "cutting", "cost-aware+cutting")


def one_seed(job: tuple[int, int, int, bool]) -> dict:
    """All rows of the preset for one seed; ``split`` training cells for the static rows."""
    seed, steps, split, full = job
    p = preset("qwengyre")
    load = replace(p.workload, steps=steps, seed=seed)
    plan = make_plan(p.name, p.hardware, load, seed=seed, cut=p.cut_tail_share, only=FULL if full else QUICK)
    pipe = pipeline_config(p.hardware, load)
    rows = {r.name: r.result for r in plan.rows}
    rows["static"] = simulate(p.hardware, load, pipe, static, train_cells=split, seed=seed)
    if full:
        stream = elastic_config(p.hardware, load)
        rows["static-streaming"] = simulate(p.hardware, load, stream, static, train_cells=split, seed=seed)
    best = min(
        (r for n, r in rows.items() if n in ("cutting", "cost-aware+cutting", "moving", "cost-aware")),
        key=lambda r: r.seconds,
    )
    bound = plan.bound.without(best.skipped_cell_s, p.hardware.cells)
    return {
        "seed": seed,
        "hours": {n: round(r.hours, 2) for n, r in rows.items()},
        "idle_share": {n: round(r.idle_share, 3) for n, r in rows.items()},
        "switches": best.switches,
        "staleness": best.staleness,
        "cut_share": round(best.cut / best.executions, 4),
        "skipped_work_share": round(best.skipped_cell_s / (plan.bound.work_s * p.hardware.cells), 4),
        "elastic_vs_static": rows["static"].seconds / best.seconds,
        "elastic_vs_colocate": rows["colocate"].seconds / best.seconds,
        "elastic_vs_bound": best.seconds / bound,
    }


def random_case(number: int) -> tuple[str, Hardware, Shape]:
    """Cluster and workload number ``number``: kinds in turn, sizes log-uniform from 4 to 2048 cells."""
    rng = random.Random(f"plan/{number}")
    kind = KINDS[number % len(KINDS)]
    exponent = rng.uniform(2, 6) if number % 20 else rng.uniform(9, 11)
    cells = max(4, min(2048, round(2**exponent)))
    big = cells > 128
    slots = rng.choice((4, 8, 16)) if not big else 2
    hw = Hardware(
        cells=cells,
        slots=slots,
        kv_tokens=slots * rng.choice((20_000, 60_000)),
        step_s=rng.uniform(0.005, 0.04),
        seq_s=rng.uniform(0.0001, 0.003),
        prefill_tps=rng.uniform(5e3, 5e4),
        train_tps=rng.uniform(2e3, 2e4),
        to_train_s=rng.uniform(1, 15),
        to_rollout_s=rng.uniform(1, 15),
        sync_s=rng.uniform(1, 10),
        apply_s=rng.uniform(0.5, 5),
    )
    size = rng.choice((2, 4, 8)) if not big else 4
    groups = max(2, round(cells * slots * rng.uniform(0.4, 1.2) / size))
    load = Shape(
        steps=4 if not big else 3,
        groups_per_step=min(groups, 160 // size if not big else 256),
        group_size=size,
        max_staleness=rng.choice((0, 1, 1, 2)),
        turns=rng.uniform(2, 4) if not big else 2.0,
        turns_sigma=rng.uniform(0.1, 0.6),
        task_sigma=rng.uniform(0.1, 0.5),
        max_turns=16 if not big else 6,
        first=rng.choice((500, 2000)),
        fed=rng.uniform(100, 1500),
        sampled=rng.uniform(200, 1500),
        pause_s=rng.uniform(0.5, 5),
        seed=number,
    )
    if kind == "short":
        load = replace(load, sampled=load.sampled / 4, fed=load.fed / 4)
    elif kind == "long":
        load = replace(load, sampled=load.sampled * 2, fed=load.fed * 2)
    elif kind == "bursty":
        load = replace(load, burst=max(2, load.groups_per_step // 3), burst_factor=3.0)
    elif kind == "heavy-tail":
        load = replace(load, turns_sigma=0.9, task_sigma=0.7)
    elif kind == "tool-bound":
        load = replace(load, pause_s=load.pause_s * 10)
    else:
        hw = replace(hw, train_tps=hw.train_tps / 5)
    return kind, hw, load


BASELINES = ("colocate-sync", "colocate", "static")
ELASTIC = ("moving", "cost-aware", "lending")
THE_POLICY = "lending"
"""The one policy, with one set of settings, whose worst case is ``worst_vs_best_baseline``."""
HOLD_OUT = 1000
"""Number of the first random workload that is kept for the end."""


def one_random(number: int) -> dict:
    """All rows of random workload ``number``; ``gain``: of the one policy over the better baseline."""
    kind, hw, load = random_case(number)
    trial = replace(load, steps=2 if hw.cells > 64 else 3)
    plan = make_plan(kind, hw, load, only=BASELINES + ELASTIC, trial=trial, seed=number)
    took = {r.name: r.result.seconds for r in plan.rows}
    baseline = min(took["colocate"], took["static"])
    return {
        "number": number,
        "kind": kind,
        "cells": hw.cells,
        "gain": baseline / took[THE_POLICY],
        "better_baseline": "static" if took["static"] < took["colocate"] else "colocate",
        "by_policy": {name: round(baseline / took[name], 4) for name in ELASTIC},
        "vs_bound": took[THE_POLICY] / plan.bound.seconds,
    }


def about(cases: list[dict]) -> dict:
    """What came of ``cases``."""
    gains = [c["gain"] for c in cases]
    return {
        "random_workloads": len(cases),
        "policy": THE_POLICY,
        "worst_vs_best_baseline": round(min(gains), 4),
        "median_vs_best_baseline": round(statistics.median(gains), 4),
        "below_0.97": sum(g < 0.97 for g in gains),
        "worst_by_policy": {n: round(min(c["by_policy"][n] for c in cases), 4) for n in ELASTIC},
        "worst_of_best_policy_each": round(min(max(c["by_policy"].values()) for c in cases), 4),
        "cells": [min(c["cells"] for c in cases), max(c["cells"] for c in cases)],
        "by_kind": {
            k: round(min(c["gain"] for c in cases if c["kind"] == k), 4)
            for k in KINDS
            if any(c["kind"] == k for c in cases)
        },
        "worst_cases": sorted(cases, key=lambda c: c["gain"])[:5],
    }


class Journal:
    """Results as they come, in a file, so that a run that was stopped goes on where it was.

    What was written under other sources of the package or of this file is not taken: a journal never holds anything
    but what this run would compute.
    """

    def __init__(self, path: str | None) -> None:
        self.path = Path(path) if path else None
        digest = hashlib.sha256(Path(__file__).read_bytes())
        for source in sorted(Path(gyre_sched.__file__).parent.rglob("*.py")):
            digest.update(source.read_bytes())
        self.digest = digest.hexdigest()[:16]
        lines = self.path.read_text().splitlines() if self.path and self.path.exists() else []
        self.known = {(x["digest"], x["job"]): x["result"] for x in map(json.loads, lines)}

    def each(self, pool, work: Callable[..., dict], jobs: list, say: bool) -> Iterator[dict]:
        """The result of each job: those that are known, then the others as they end."""
        names = {json.dumps([work.__name__, job]): job for job in jobs}
        missing = [job for name, job in names.items() if (self.digest, name) not in self.known]
        yield from (self.known[self.digest, name] for name in names if (self.digest, name) in self.known)
        for job, result in pool.imap_unordered(Named(work), missing):
            if self.path:
                line = {"digest": self.digest, "job": json.dumps([work.__name__, job]), "result": result}
                with self.path.open("a") as out:
                    out.write(json.dumps(line) + "\n")
            if say:
                print(json.dumps(result), flush=True)
            yield result


class Named:
    """``work`` that says which job it did."""

    def __init__(self, work: Callable[..., dict]) -> None:
        self.work = work

    def __call__(self, job):
        return job, self.work(job)


def spread(values: list[float], worst: str) -> dict:
    ends = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {k: round(v, 4) for k, v in ends.items()} | {"worst": round(ends[worst], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="only the JSON line")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--random", type=int, default=204, help="number of random workloads")
    parser.add_argument("--holdout", type=int, default=102, help="number of random workloads that are kept for the end")
    parser.add_argument("--cases", help="numbers of random workloads, with commas, instead of the first ones")
    parser.add_argument("--journal", metavar="FILE", help="write results here as they come, and go on from there")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    began = time.perf_counter()
    numbers = [int(n) for n in args.cases.split(",")] if args.cases else list(range(args.random))
    numbers += range(HOLD_OUT, HOLD_OUT + args.holdout)
    numbers.sort(key=lambda n: random_case(n)[1].cells)
    p = preset("qwengyre")
    trial = replace(p.workload, steps=min(12, args.steps))
    split = best_split(p.hardware, trial, pipeline_config(p.hardware, trial)) if args.seeds else 0
    journal = Journal(args.journal)
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        jobs = [(seed, args.steps, split, seed == 0) for seed in range(args.seeds)]
        seeds = list(journal.each(pool, one_seed, jobs, not args.json))
        cases = list(journal.each(pool, one_random, numbers, not args.json))
    seeds.sort(key=lambda s: s["seed"])
    seen = [c for c in cases if c["number"] < HOLD_OUT]
    kept = [c for c in cases if c["number"] >= HOLD_OUT]
    out: dict = {
        "benchmark": "plan_paper",
        "hardware": f"{platform.machine()}, {args.workers} processes, Python {platform.python_version()}; "
        "virtual time, so the figures do not depend on it",
    }
    if seeds:
        out |= {
            "preset": "qwengyre",
            "steps": args.steps,
            "static_training_cells": split,
            "static_hours_median": statistics.median(s["hours"]["static"] for s in seeds),
            "colocate_hours_median": statistics.median(s["hours"]["colocate"] for s in seeds),
            "elastic_vs_static": spread([s["elastic_vs_static"] for s in seeds], "min"),
            "elastic_vs_colocate": spread([s["elastic_vs_colocate"] for s in seeds], "min"),
            "elastic_vs_bound": spread([s["elastic_vs_bound"] for s in seeds], "max"),
            "cut_share": spread([s["cut_share"] for s in seeds], "max"),
            "skipped_work_share": spread([s["skipped_work_share"] for s in seeds], "max"),
            "seeds": seeds,
        }
    if seen:
        out |= about(seen)
    if kept:
        out["holdout"] = about(kept)
    out["wall_s"] = round(time.perf_counter() - began, 1)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
