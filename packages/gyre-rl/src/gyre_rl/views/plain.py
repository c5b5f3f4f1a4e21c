"""Lines of text for logs and pipes: one for each thing that a person would want to read afterwards.

Invariant: a pure function from an event and the state after it to a line or nothing.
"""

from __future__ import annotations

from gyre_core.roles import CellState
from gyre_core.runtime import RunEvent

from gyre_rl.views import events as ev
from gyre_rl.views import words
from gyre_rl.views.model import RunState


def line_of(event: RunEvent, state: RunState) -> str | None:
    """The line that tells `event`; `state` is the state after it. None for events too small to tell."""
    text = _text(ev.parse(event), state)
    return None if text is None else f"[{words.clock(event.time - state.started):>7}] {text}"


def _text(event: ev.Event | None, state: RunState) -> str | None:
    match event:
        case ev.RunStarted():
            how = f"goes on at step {event.first_step}" if event.resumed else "begins"
            return f"run {event.name} {how}: {event.steps} steps, {event.cells} cells, seed {event.seed}"
        case ev.RunEnded():
            return f"run {event.status}" + (f": {event.reason}" if event.reason else "")
        case ev.Evaluated(tasks=0):
            return f"eval at step {event.step}: there are no {event.split} tasks, so none was judged"
        case ev.Evaluated():
            return f"eval {event.split} at step {event.step}: score {event.score:.3f} over {event.tasks} tasks"
        case ev.StepApplied():
            return _step(event, state)
        case ev.Compared():
            return (
                f"trainer and engine agree to {event.mean:.2g} nats on average, {event.largest:.2g} at most, over "
                f"{words.count(event.tokens)} tokens"
            )
        case ev.Switched():
            return (
                f"{event.cell} to {event.role} "
                + (f"in {words.seconds(event.seconds)}" if event.ok else "failed, it went back")
                + (f": {event.reason}" if event.reason else "")
            )
        case ev.CellStateChanged(state=CellState.LOST):
            return f"{event.cell} is lost" + (f": {event.reason}" if event.reason else "")
        case ev.LeaseReturned():
            return f"{event.batches} micro-batches came back from {event.cell}: {event.reason}"
        case ev.Notice():
            return f"{event.level}: {event.text}"
    return None


def _step(event: ev.StepApplied, state: RunState) -> str:
    of = f"/{state.run.steps}" if state.run else ""
    if event.skipped is not None:
        return f"step {event.step + 1}{of} was skipped: {event.skipped}"
    cells = ", ".join(f"{n} {name}" for name, n in sorted(state.cells_by_state().items()))
    rate = state.rate("sampled_tokens")
    speed = f", {words.count(rate)} tokens/s" if rate is not None else ""
    return (
        f"step {event.step + 1}{of}: score {event.score:.3f}, {words.seconds(event.seconds)}, "
        f"{event.executions} executions, {words.count(event.trained_tokens)} trained tokens, "
        f"staleness {event.staleness_mean:.2f}, satellites {event.satellites}{speed}; cells: {cells}"
    )
