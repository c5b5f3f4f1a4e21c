"""The live terminal view: a pure function from the state of a run to something rich can draw.

Invariant: draws what `RunState` says and nothing else; fits 80 columns; a run of thousands of cells takes the same
number of lines as one of four.
"""

from __future__ import annotations

from collections.abc import Iterator

from gyre_core.roles import CellState
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gyre_rl.views import events as ev
from gyre_rl.views import words
from gyre_rl.views.model import CellView, RunState

STYLES = {
    CellState.ROLLOUT: "cyan",
    CellState.TRAIN: "magenta",
    CellState.DRAINING: "yellow",
    CellState.SWITCHING: "yellow",
    CellState.FLUSHING: "yellow",
    CellState.JOINING: "dim",
    CellState.LOST: "bold red",
}
TILES = 8
"""Runs with more cells show counts instead of one tile a cell."""
GAUGE = 24
"""Characters of the load gauge, which ends at GAUGE_TOP times the capacity."""
GAUGE_TOP = 1.5
SWITCHES_SHOWN = 3
NOTICES_SHOWN = 2


def render(state: RunState, now: float) -> RenderableType:
    """The whole view at time `now` (seconds since the epoch)."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", justify="right", min_width=8)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in _rows(state):
        table.add_row(name, text)
    return Group(_head(state, now), table)


def _head(state: RunState, now: float) -> Text:
    run = state.run
    if run is None:
        return Text("gyre: starting", style="bold")
    text = Text(f"gyre {run.name}", style="bold")
    text.append(f"  step {min(state.steps_applied + 1, run.steps)}/{run.steps}")
    text.append(f"  {words.clock(now - state.started)}", style="dim")
    if state.ended is not None:
        text.append(
            f"  {state.ended.status}", style="bold green" if state.ended.status == "finished" else "bold yellow"
        )
    return text


def _rows(state: RunState) -> Iterator[tuple[str, Text]]:
    yield "score", _score(state)
    yield "cells", _cells(state)
    yield "work", _work(state)
    if state.load is not None:
        yield "load", _load(state.load)
        yield "tokens", _tokens(state)
    for stamped in state.switches[-SWITCHES_SHOWN:][::-1]:
        yield "switch", _switch(state, stamped.time, stamped.event)
    for stamped in state.notices[-NOTICES_SHOWN:][::-1]:
        notice = stamped.event
        if isinstance(notice, ev.Notice):
            yield notice.level, Text(notice.text, style={"error": "red", "warning": "yellow"}.get(notice.level, ""))


def _score(state: RunState) -> Text:
    text = Text()
    if state.last_step is None:
        text.append("no step yet", style="dim")
    else:
        text.append(f"{state.last_step.score:.3f} ", style="bold green")
        text.append(words.sparkline(state.scores[-24:], 0.0, 1.0), style="green")
    if state.first_eval is not None:
        text.append(f"  held-out {state.first_eval.score:.3f}", style="dim")
        if state.last_eval is not None and state.last_eval is not state.first_eval:
            text.append(f" → {state.last_eval.score:.3f}", style="bold")
    return text


def _cells(state: RunState) -> Text:
    text = Text()
    if len(state.cells) > TILES:
        for name, n in sorted(state.cells_by_state().items()):
            text.append(f"{n} {name}  ", style=STYLES.get(CellState(name), ""))
        return text
    for cell in sorted(state.cells.values(), key=lambda c: c.cell):
        text.append(_tile(cell), style=STYLES.get(CellState(cell.state), ""))
        text.append("  ")
    return text if state.cells else Text("none yet", style="dim")


def _tile(cell: CellView) -> str:
    star = "*" if cell.core else ""
    return f"{cell.cell.partition('#')[0]}{star} {cell.state}"


def _work(state: RunState) -> Text:
    running = sum(state.running.values())
    text = Text(f"{running} executions")
    if state.running.get("eval"):
        text.append(f" ({state.running['eval']} held-out)", style="dim")
    step = state.step
    if step is not None:
        text.append(f"  groups {step.groups_ready}/{step.tasks} ready")
    if state.last_step is not None:
        text.append(f"  staleness {state.last_step.staleness_mean:.1f} (max {state.last_step.staleness_max})")
    return text


def _load(load: ev.LoadSampled) -> Text:
    share = load.demand / load.capacity if load.capacity > 0 else 0.0
    filled = min(GAUGE, round(share / GAUGE_TOP * GAUGE))
    marked = [m / load.capacity for m in (load.low, load.high) if m is not None and load.capacity > 0]
    marks = {min(GAUGE - 1, int(m / GAUGE_TOP * GAUGE)) for m in marked}
    text = Text()
    for i in range(GAUGE):
        text.append("│" if i in marks else "█" if i < filled else "·", style="bold" if i in marks else "cyan")
    text.append(f" {share:.0%} of {load.capacity:.0f} slots, {load.waiting} waiting")
    text.append(f"  ready {words.count(load.ready_tokens)}", style="dim")
    return text


def _tokens(state: RunState) -> Text:
    sampled, trained = state.rate("sampled_tokens"), state.rate("trained_tokens")
    load = state.load
    text = Text(f"{words.count(sampled or 0)}/s sampled  {words.count(trained or 0)}/s trained")
    if load is not None and load.cached_tokens + load.prefilled_tokens > 0:
        share = load.cached_tokens / (load.cached_tokens + load.prefilled_tokens)
        text.append(f"  {share:.0%} of prompts cached", style="dim")
    return text


def _switch(state: RunState, time: float, event: ev.Event) -> Text:
    if not isinstance(event, ev.Switched):
        return Text()
    text = Text(f"{words.clock(time - state.started)} {event.cell} → {event.role} ")
    text.append(words.seconds(event.seconds) if event.ok else "failed", style="dim" if event.ok else "red")
    if event.reason:
        text.append(f"  {event.reason}", style="dim")
    return text
