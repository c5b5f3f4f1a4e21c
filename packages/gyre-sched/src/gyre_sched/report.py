"""A plan as text, as JSON and as one self-contained HTML page with the role lanes of the cells.

Pure functions from a ``Plan`` to strings.
"""

from __future__ import annotations

import html
import json
from typing import Any

from .plan import Plan, Row
from .sim.result import SimResult

__all__ = ["as_html", "as_json", "as_text", "published"]

COLOURS = {
    "ROLLOUT": "#4c8bf5",
    "TRAIN": "#e8833a",
    "DRAINING": "#9dbff9",
    "FLUSHING": "#f3c49d",
    "SWITCHING": "#7a7a7a",
    "LOST": "#c62828",
}


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 7200 else f"{seconds:.1f} s"


def _versus(plan: Plan, row: Row) -> str:
    names = {r.name for r in plan.rows}
    base = "static" if "static" in names else "colocate"
    return f"{plan.row(base).result.seconds / row.result.seconds:.2f}x" if base in names else ""


def _stale(result: SimResult) -> float:
    total = sum(result.staleness)
    return sum(i * n for i, n in enumerate(result.staleness)) / total if total else 0.0


def as_text(plan: Plan) -> str:
    """A table and what it says."""
    head = f"{'':22}{'time':>11}{'vs static':>11}{'idle':>7}{'switches':>10}{'stale':>7}{'moves':>8}{'cut':>7}"
    lines = [f"{plan.name}: {plan.about}", f"{plan.cells} cells, {plan.steps} steps", "", head]
    for row in plan.rows:
        r = row.result
        cut = f"{r.cut / r.executions:.1%}" if r.cut else "-"
        lines.append(
            f"{row.name:22}{_time(r.seconds):>11}{_versus(plan, row):>11}{r.idle_share:>7.0%}{r.switches:>10}"
            f"{_stale(r):>7.2f}{r.moves:>8}{cut:>7}"
        )
    lines.append(f"{'bound (all work)':22}{_time(plan.bound.seconds):>11}")
    lines += ["", "how each ran:"]
    lines += [f"  {row.name}: {row.what}" for row in plan.rows]
    lines += ["", *_verdict(plan)]
    return "\n".join(lines)


def _verdict(plan: Plan) -> list[str]:
    out: list[str] = []
    try:
        best = plan.row("elastic")
    except ValueError:
        return out
    names = {r.name for r in plan.rows}
    bound = plan.bound.without(best.result.skipped_cell_s, plan.cells)
    out.append(
        f"elastic ({best.name}) is {best.result.seconds / bound:.2f} times the bound for the work it did; "
        f"a work bound of {_time(plan.bound.work_s)} and a longest chain of {_time(plan.bound.chain_s)}"
    )
    if "static" in names and "colocate" in names:
        gain = min(plan.ratio("static", "elastic"), plan.ratio("colocate", "elastic"))
        worth = "worth it" if gain > 1.05 else "not worth the trouble"
        out.append(f"against the better baseline it is {gain:.2f}x: {worth}")
    out += [
        f"published {pair['pair']}: {pair['published']:.2f} ({pair['source']}); predicted {pair['predicted']:.2f} "
        f"({pair['off']:+.0%}{'' if pair['fitted'] else ', not fitted'})"
        for pair in published(plan)
    ]
    if plan.preset is not None:
        known = {"fitted": plan.preset.fitted, "taken": plan.preset.taken, "assumed": plan.preset.assumed}
        out += [f"{how}: {what}" for how, what in known.items() if what]
    return out


def published(plan: Plan) -> list[dict[str, Any]]:
    """The preset's published pairs beside what was predicted. ``off``: relative error; ``fitted``: whether parameters
    were chosen so that it comes out.
    """
    out: list[dict[str, Any]] = []
    names = {r.name for r in plan.rows}
    for pair in () if plan.preset is None else plan.preset.published:
        if {pair.worse, pair.better} - {"elastic"} <= names:
            ours = plan.ratio(pair.worse, pair.better)
            out.append(
                {
                    "pair": f"{pair.worse}/{pair.better}",
                    "published": pair.ratio,
                    "predicted": ours,
                    "off": ours / pair.ratio - 1.0,
                    "fitted": pair.fitted,
                    "source": pair.source,
                }
            )
    return out


def _row(plan: Plan, row: Row) -> dict[str, Any]:
    r = row.result
    return {
        "name": row.name,
        "what": row.what,
        "seconds": r.seconds,
        "hours": r.hours,
        "idle_share": r.idle_share,
        "sampling_share": r.sampling_share,
        "training_share": r.training_share,
        "switches": r.switches,
        "moves": r.moves,
        "moves_carried": r.moves_carried,
        "staleness": list(r.staleness),
        "cut": r.cut,
        "executions": r.executions,
        "lost_cells": r.lost_cells,
        "computed_again": r.computed_again,
        "vs_bound": r.seconds / plan.bound.without(r.skipped_cell_s, plan.cells),
    }


def as_json(plan: Plan) -> str:
    """One JSON object."""
    preset = plan.preset
    data = {
        "name": plan.name,
        "about": plan.about,
        "cells": plan.cells,
        "steps": plan.steps,
        "rows": [_row(plan, row) for row in plan.rows],
        "bound": {"seconds": plan.bound.seconds, "work_s": plan.bound.work_s, "chain_s": plan.bound.chain_s},
        "published": published(plan),
        "verdict": _verdict(plan),
    }
    if preset is not None:
        data["preset"] = {"fitted": preset.fitted, "taken": preset.taken, "assumed": preset.assumed}
    return json.dumps(data)


def as_html(plan: Plan) -> str:
    """A page of its own: table, verdict, role lanes."""
    rows = "".join(
        f"<tr><td>{html.escape(r.name)}</td><td>{_time(r.result.seconds)}</td><td>{_versus(plan, r)}</td>"
        f"<td>{r.result.idle_share:.0%}</td><td>{r.result.switches}</td><td>{_stale(r.result):.2f}</td>"
        f"<td>{r.result.moves_carried} of {r.result.moves}</td><td>{r.result.cut}</td>"
        f"<td>{html.escape(r.what)}</td></tr>"
        for r in plan.rows
    )
    verdict = "".join(f"<p>{html.escape(line)}</p>" for line in _verdict(plan))
    longest = max((r.result.seconds for r in plan.rows), default=1.0)
    lanes = "".join(_lanes(row, longest) for row in plan.rows if row.result.lanes)
    legend = "".join(f'<span style="background:{c}">{s}</span>' for s, c in COLOURS.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(plan.name)}: plan</title>
<style>body{{font:14px/1.5 system-ui,sans-serif;margin:2em;max-width:1200px}}table{{border-collapse:collapse}}
td,th{{padding:3px 10px;border-bottom:1px solid #ddd;text-align:right}}td:first-child,td:last-child{{text-align:left}}
.legend span{{color:#fff;padding:1px 8px;margin-right:6px;border-radius:3px}}
svg{{width:100%;background:#f6f6f6}}</style>
<h1>{html.escape(plan.name)}</h1><p>{html.escape(plan.about)}; {plan.cells} cells, {plan.steps} steps</p>
<table><tr><th></th><th>time</th><th>vs static</th><th>idle</th><th>switches</th><th>staleness</th><th>KV moves</th>
<th>cut</th><th>how</th></tr>{rows}<tr><td>bound (all work)</td><td>{_time(plan.bound.seconds)}</td>
<td colspan="7"></td></tr></table>{verdict}<h2>Roles over time</h2><p class="legend">{legend}</p>{lanes}</html>"""


def _lanes(row: Row, longest: float, limit: int = 48) -> str:
    """One bar per cell (at most ``limit`` of them), one colour per state, a line at the end of each step."""
    cells = list(dict.fromkeys(lane.cell for lane in row.result.lanes))
    cells = sorted(cells, key=lambda name: int(name[1:]) if name[1:].isdigit() else 0)[:limit]
    place = {name: i for i, name in enumerate(cells)}
    bars = []
    for lane in row.result.lanes:
        if lane.cell in place:
            x, width = lane.start / longest * 1000, (lane.end - lane.start) / longest * 1000
            colour = COLOURS.get(lane.state, "#ccc")
            bars.append(
                f'<rect x="{x:.2f}" y="{place[lane.cell] * 7}" width="{width:.2f}" height="6" fill="{colour}"/>'
            )
    high = len(cells) * 7
    ticks = "".join(
        f'<line x1="{t / longest * 1000:.2f}" x2="{t / longest * 1000:.2f}" y1="0" y2="{high}" stroke="#000" '
        'stroke-width="0.4"/>'
        for t in row.result.step_ends
    )
    title = f"<h3>{html.escape(row.name)}: {_time(row.result.seconds)}</h3>"
    return (
        f'{title}<svg viewBox="0 0 1000 {high}" preserveAspectRatio="none" height="{high}">{"".join(bars)}{ticks}</svg>'
    )
