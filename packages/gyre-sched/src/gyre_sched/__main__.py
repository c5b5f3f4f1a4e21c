"""``python -m gyre_sched``: plan a cluster, list presets, replay a log. The only file of the package that prints."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .errors import SchedError

__all__ = ["main"]


def _plan(args: argparse.Namespace) -> int:
    from .plan import make_plan
    from .report import as_html, as_json, as_text
    from .sim.presets import preset
    from .sim.workload import Workload
    from .traces import load_trace

    base = preset(args.preset)
    hardware = replace(base.hardware, cells=args.cells) if args.cells else base.hardware
    if args.mtbf:
        hardware = replace(hardware, mtbf_s=args.mtbf * 3600.0, repair_s=args.repair)
    load: Workload
    if args.trace:
        shape = base.workload
        load = load_trace(
            args.trace,
            steps=args.steps or min(shape.steps, 8),
            groups_per_step=shape.groups_per_step,
            group_size=shape.group_size,
            max_staleness=shape.max_staleness,
        )
        about, known, trial = f"{args.trace} on the cluster of {base.name}", None, None
    else:
        shape = replace(base.workload, steps=args.steps or base.workload.steps, seed=args.seed)
        load, about, known = shape, base.about, base
        trial = replace(shape, steps=min(shape.steps, 8))
    say = (lambda text: print(f"… {text}", file=sys.stderr, flush=True)) if not args.quiet else None  # noqa: T201
    plan = make_plan(
        Path(args.trace).stem if args.trace else base.name,
        hardware,
        load,
        about=about,
        preset=known,
        trial=trial,
        seed=args.seed,
        lanes=bool(args.html),
        cut=base.cut_tail_share if args.cut is None else args.cut,
        say=say,
    )
    if args.html:
        Path(args.html).write_text(as_html(plan), encoding="utf-8")
    print(as_json(plan) if args.json else as_text(plan))  # noqa: T201
    return 0


def _presets(args: argparse.Namespace) -> int:
    from .sim.presets import PRESETS

    del args
    for item in PRESETS.values():
        print(f"{item.name:14} {item.about} (fitted: {item.fitted.split(':')[0]})")  # noqa: T201
    return 0


def _replay(args: argparse.Namespace) -> int:
    from .invariants import check
    from .replay import replay

    machine = replay(args.log)
    check(machine)
    print(f"{machine.seq} events, all laws hold")  # noqa: T201
    for name in args.story:
        print(machine.story(name))  # noqa: T201
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gyre_sched", description="elastic cells: plan and look back")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="compare ways of scheduling on a workload")
    plan.add_argument("trace", nargs="?", help="trace file or event log; without it, the preset's own workload")
    plan.add_argument("--preset", default="qwengyre", help="cluster (and workload); see `presets`")
    plan.add_argument("--cells", type=int, help="another number of cells")
    plan.add_argument("--steps", type=int, help="another number of steps")
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument("--cut", type=float, help="share of a step that may be cut and scored partially")
    plan.add_argument("--mtbf", type=float, metavar="HOURS", help="each cell dies once in this time on average")
    plan.add_argument("--repair", type=float, default=300.0, metavar="S", help="until a dead cell is back (300)")
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.add_argument("--html", metavar="FILE", help="write a page with the role lanes")
    plan.add_argument("--quiet", action="store_true", help="no progress on stderr")
    plan.set_defaults(run=_plan)
    commands.add_parser("presets", help="list presets").set_defaults(run=_presets)
    look = commands.add_parser("replay", help="rebuild the machine from an event log and check it")
    look.add_argument("log")
    look.add_argument("--story", action="append", default=[], metavar="NAME", help="tell the story of NAME")
    look.set_defaults(run=_replay)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 2 for a mistake in what was asked."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (SchedError, OSError) as err:
        print(f"gyre_sched: {err}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())
