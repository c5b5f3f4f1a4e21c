"""What a run looks like now: a pure fold over its events.

`reduce(state, event)` gives the next `RunState`; the live view and the summary are functions of it, and replaying a
run's log gives the same state as watching it. Invariants: the reducer is total (an unknown kind changes nothing but
the clock), never looks at a clock of its own, and its memory does not grow with the length of the run. The kinds of
events and their fields are in `gyre_rl.views.events`. Series over the whole run are `gyre_rl.views.timeline`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gyre_core.roles import CellState
from gyre_core.runtime import RunEvent

from gyre_rl.views import events as ev

RECENT = 8
"""Switches and notices that are remembered."""
SCORES = 60
"""Steps whose scores are remembered."""
RATE_SAMPLES = 12
"""Load samples that token rates are computed over."""


@dataclass(frozen=True, slots=True)
class CellView:
    """A cell in its present life."""

    cell: str
    state: str
    core: bool
    since: float
    """Time of its last change of state."""
    version: int | None = None
    """Policy version its engine samples with, once it synced."""
    batches_leased: int = 0


@dataclass(frozen=True, slots=True)
class StepView:
    """A step between its start and its application; several may be open when sampling runs ahead."""

    step: int
    started: float
    tasks: int
    groups_ready: int = 0
    sealed: bool = False
    satellites: frozenset[str] = frozenset()
    """Satellites that hold or held a lease in it."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """An event that is remembered, and its time."""

    time: float
    event: ev.Event


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over the whole run."""

    executions: int = 0
    """Ended, of training."""
    retries: int = 0
    went_on: int = 0
    """Times that an execution went on from where it rested, over both purposes."""
    partial_scores: int = 0
    branches: int = 0
    sub_agents: int = 0
    compactions: int = 0
    switches: int = 0
    failed_switches: int = 0
    satellite_joins: int = 0
    """Satellites that took their first lease in a step and had become TRAIN after that step began."""
    sessions_rerouted: int = 0
    kv_moved_sessions: int = 0
    kv_moved_bytes: int = 0
    prefilled_again_tokens: int = 0
    contributions: int = 0
    leases_returned: int = 0
    cells_lost: int = 0
    skipped_steps: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    """How executions ended, over both purposes."""


@dataclass(frozen=True, slots=True)
class RunState:
    """A run at one moment; every field is of the time `time`."""

    time: float = 0.0
    run: ev.RunStarted | None = None
    started: float = 0.0
    """Time of the run's (or the resume's) start."""
    ended: ev.RunEnded | None = None
    cells: Mapping[str, CellView] = field(default_factory=dict)
    """By name without incarnation; a lost cell stays until its next life begins."""
    open_steps: Mapping[int, StepView] = field(default_factory=dict)
    steps_applied: int = 0
    version: int = 0
    last_step: ev.StepApplied | None = None
    scores: tuple[float, ...] = ()
    """Mean scores of the last steps."""
    compared: ev.Compared | None = None
    first_eval: ev.Evaluated | None = None
    last_eval: ev.Evaluated | None = None
    running: Mapping[str, int] = field(default_factory=dict)
    """Executions running, by purpose."""
    samples: tuple[Stamped, ...] = ()
    switches: tuple[Stamped, ...] = ()
    notices: tuple[Stamped, ...] = ()
    totals: Totals = Totals()

    @property
    def load(self) -> ev.LoadSampled | None:
        """The last load sample."""
        return self.samples[-1].event if self.samples else None  # type: ignore[return-value]

    def rate(self, counter: str) -> float | None:
        """Tokens per second of a counter of the load samples, over the last few; None before there are two."""
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0], self.samples[-1]
        seconds = last.time - first.time
        grown = float(getattr(last.event, counter) - getattr(first.event, counter))
        return grown / seconds if seconds > 0 and grown >= 0 else None

    @property
    def step(self) -> StepView | None:
        """The step that will be applied next; None between the last one and the end."""
        return self.open_steps[min(self.open_steps)] if self.open_steps else None

    def cells_by_state(self) -> Mapping[str, int]:
        """How many cells are in each state."""
        return Counter(cell.state for cell in self.cells.values())


def reduce(state: RunState, event: RunEvent) -> RunState:
    """The state after `event`. ValueError when a known kind lacks what it must have."""
    parsed = ev.parse(event)
    state = replace(state, time=max(state.time, event.time))
    handler = _HANDLERS.get(type(parsed))
    return state if handler is None else handler(state, parsed, event.time)


def fold(events: Iterable[RunEvent], state: RunState | None = None) -> RunState:
    """The state after all `events`, beginning with `state`."""
    state = state or RunState()
    for event in events:
        state = reduce(state, event)
    return state


def cell_name(cell: str) -> str:
    """The stable name in `name#incarnation`."""
    return cell.partition("#")[0]


def _run_started(state: RunState, event: ev.RunStarted, time: float) -> RunState:
    """A resume keeps what was counted and forgets what ran in processes that are gone.

    The first start keeps the cells that came up before it.
    """
    fresh = state if event.resumed else RunState()
    cells = state.cells if state.run is None else {}
    return replace(
        fresh,
        time=time,
        run=event,
        started=time,
        ended=None,
        cells=cells,
        running={},
        samples=(),
        open_steps={},
        steps_applied=event.first_step,
    )


def _run_ended(state: RunState, event: ev.RunEnded, time: float) -> RunState:
    return replace(state, ended=event, running={})


def _cell_state(state: RunState, event: ev.CellStateChanged, time: float) -> RunState:
    name = cell_name(event.cell)
    old = state.cells.get(name)
    same_life = old is not None and old.cell == event.cell
    view = CellView(event.cell, event.state, event.core or (same_life and old is not None and old.core), time)
    if same_life and old is not None:
        view = replace(view, version=old.version, batches_leased=old.batches_leased)
    if event.state != CellState.LOST:
        return replace(state, cells={**state.cells, name: view})
    if old is not None and not same_life:
        return state
    totals = replace(state.totals, cells_lost=state.totals.cells_lost + 1)
    return replace(state, cells={**state.cells, name: replace(view, batches_leased=0)}, totals=totals)


def _change_cell(state: RunState, cell: str, **changes: Any) -> RunState:
    """Change a cell's view; a message of another life changes nothing."""
    view = state.cells.get(cell_name(cell))
    if view is None or view.cell != cell:
        return state
    return replace(state, cells={**state.cells, cell_name(cell): replace(view, **changes)})


def _switched(state: RunState, event: ev.Switched, time: float) -> RunState:
    totals = state.totals
    totals = (
        replace(totals, switches=totals.switches + 1)
        if event.ok
        else replace(totals, failed_switches=totals.failed_switches + 1)
    )
    return replace(state, totals=totals, switches=(*state.switches, Stamped(time, event))[-RECENT:])


def _session_moved(state: RunState, event: ev.SessionMoved, time: float) -> RunState:
    totals = replace(state.totals, sessions_rerouted=state.totals.sessions_rerouted + 1)
    if event.carried:
        totals = replace(
            totals,
            kv_moved_sessions=totals.kv_moved_sessions + 1,
            kv_moved_bytes=totals.kv_moved_bytes + event.bytes,
        )
    else:
        totals = replace(totals, prefilled_again_tokens=totals.prefilled_again_tokens + event.tokens)
    return replace(state, totals=totals)


def _step_started(state: RunState, event: ev.StepStarted, time: float) -> RunState:
    opened = StepView(event.step, time, event.tasks)
    return replace(state, open_steps={**state.open_steps, event.step: opened})


def _change_step(state: RunState, step: int, **changes: Any) -> RunState:
    view = state.open_steps.get(step)
    if view is None:
        return state
    return replace(state, open_steps={**state.open_steps, step: replace(view, **changes)})


def _step_sealed(state: RunState, event: ev.StepSealed, time: float) -> RunState:
    return _change_step(state, event.step, sealed=True, tasks=event.groups)


def _step_applied(state: RunState, event: ev.StepApplied, time: float) -> RunState:
    skipped = state.totals.skipped_steps + (event.skipped is not None)
    return replace(
        state,
        last_step=event,
        scores=(*state.scores, event.score)[-SCORES:],
        version=event.version,
        steps_applied=event.step + 1,
        open_steps={number: view for number, view in state.open_steps.items() if number > event.step},
        totals=replace(state.totals, skipped_steps=skipped),
    )


def _execution_started(state: RunState, event: ev.ExecutionStarted, time: float) -> RunState:
    totals = replace(state.totals, retries=state.totals.retries + (event.attempt > 0))
    running = {**state.running, event.purpose: state.running.get(event.purpose, 0) + 1}
    return replace(state, running=running, totals=totals)


def _went_on(state: RunState, event: ev.ExecutionWentOn, time: float) -> RunState:
    return replace(state, totals=replace(state.totals, went_on=state.totals.went_on + 1))


def _execution_ended(state: RunState, event: ev.ExecutionEnded, time: float) -> RunState:
    running = {**state.running, event.purpose: max(0, state.running.get(event.purpose, 0) - 1)}
    old = state.totals
    trained = event.purpose == "train"
    totals = replace(
        old,
        executions=old.executions + trained,
        partial_scores=old.partial_scores + (event.partial and trained),
        branches=old.branches + (event.branches if trained else 0),
        sub_agents=old.sub_agents + (event.sub_agents if trained else 0),
        compactions=old.compactions + (event.compactions if trained else 0),
        statuses={**old.statuses, event.status: old.statuses.get(event.status, 0) + 1},
    )
    return replace(state, running=running, totals=totals)


def _group_ready(state: RunState, event: ev.GroupReady, time: float) -> RunState:
    view = state.open_steps.get(event.step)
    return state if view is None else _change_step(state, event.step, groups_ready=view.groups_ready + 1)


def _leased(state: RunState, event: ev.Leased, time: float) -> RunState:
    cell = state.cells.get(cell_name(event.cell))
    step = state.open_steps.get(event.step)
    if cell is None or cell.cell != event.cell:
        return state
    state = _change_cell(state, event.cell, batches_leased=cell.batches_leased + event.batches)
    if event.core or step is None or event.cell in step.satellites:
        return state
    state = _change_step(state, event.step, satellites=step.satellites | {event.cell})
    joins = state.totals.satellite_joins + (cell.since >= step.started)
    return replace(state, totals=replace(state.totals, satellite_joins=joins))


def _contributed(state: RunState, event: ev.Contributed, time: float) -> RunState:
    totals = replace(state.totals, contributions=state.totals.contributions + 1)
    return _less_leased(replace(state, totals=totals), event.cell, event.batches)


def _lease_returned(state: RunState, event: ev.LeaseReturned, time: float) -> RunState:
    totals = replace(state.totals, leases_returned=state.totals.leases_returned + 1)
    return _less_leased(replace(state, totals=totals), event.cell, event.batches)


def _less_leased(state: RunState, cell: str, batches: int) -> RunState:
    view = state.cells.get(cell_name(cell))
    held = view.batches_leased if view is not None else 0
    return _change_cell(state, cell, batches_leased=max(0, held - batches))


def _weights_synced(state: RunState, event: ev.WeightsSynced, time: float) -> RunState:
    return _change_cell(state, event.cell, version=event.version)


def _evaluated(state: RunState, event: ev.Evaluated, time: float) -> RunState:
    if event.tasks == 0:  # nothing was judged, which is no score
        return state
    return replace(state, first_eval=state.first_eval or event, last_eval=event)


def _compared(state: RunState, event: ev.Compared, time: float) -> RunState:
    return replace(state, compared=event)


def _sampled(state: RunState, event: ev.LoadSampled, time: float) -> RunState:
    return replace(state, samples=(*state.samples, Stamped(time, event))[-RATE_SAMPLES:])


def _notice(state: RunState, event: ev.Notice, time: float) -> RunState:
    return replace(state, notices=(*state.notices, Stamped(time, event))[-RECENT:])


_HANDLERS: Mapping[type[Any], Callable[[RunState, Any, float], RunState]] = {
    ev.RunStarted: _run_started,
    ev.RunEnded: _run_ended,
    ev.CellStateChanged: _cell_state,
    ev.Switched: _switched,
    ev.SessionMoved: _session_moved,
    ev.StepStarted: _step_started,
    ev.StepSealed: _step_sealed,
    ev.StepApplied: _step_applied,
    ev.ExecutionStarted: _execution_started,
    ev.ExecutionWentOn: _went_on,
    ev.ExecutionEnded: _execution_ended,
    ev.GroupReady: _group_ready,
    ev.Leased: _leased,
    ev.Contributed: _contributed,
    ev.LeaseReturned: _lease_returned,
    ev.WeightsSynced: _weights_synced,
    ev.Evaluated: _evaluated,
    ev.Compared: _compared,
    ev.LoadSampled: _sampled,
    ev.Notice: _notice,
}
