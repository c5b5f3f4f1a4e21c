"""A whole run in series: what the report and the dash draw.

`timeline(events)` folds a log once. Invariants: every lane covers its cell's lives without overlap, in order; a run
that was resumed has several lives and the time between them belongs to no lane; nothing is interpolated. What a run
looks like at one moment is `gyre_rl.views.model`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gyre_core.roles import CellState
from gyre_core.runtime import RunEvent

from gyre_rl.views import events as ev
from gyre_rl.views.model import RunState, Stamped, cell_name, reduce


@dataclass(frozen=True, slots=True)
class Segment:
    """A cell in one state from `start` to `end` (seconds since the epoch)."""

    cell: str
    state: str
    start: float
    end: float
    reason: str = ""

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Life:
    """From a start or resume to its end, or to the last event when it was killed."""

    start: float
    end: float
    resumed: bool
    status: str
    """"finished", "stopped", "failed", or "cut" when the log just ends."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Series of a run, each in the order of time; `final` is the state after the last event."""

    final: RunState
    lives: tuple[Life, ...] = ()
    steps: tuple[Stamped, ...] = ()
    evals: tuple[Stamped, ...] = ()
    samples: tuple[Stamped, ...] = ()
    switches: tuple[Stamped, ...] = ()
    moves: tuple[Stamped, ...] = ()
    returned: tuple[Stamped, ...] = ()
    notices: tuple[Stamped, ...] = ()
    lanes: Mapping[str, tuple[Segment, ...]] = field(default_factory=dict)
    """By cell name, in the order in which cells appeared."""
    core: frozenset[str] = frozenset()
    """Names of core cells."""
    scored: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Training executions by status: how many were scored, and their mean score."""

    @property
    def start(self) -> float:
        """Time of the first event of a life."""
        return self.lives[0].start if self.lives else self.final.time

    @property
    def end(self) -> float:
        """Time of the last event."""
        return self.lives[-1].end if self.lives else self.final.time

    @property
    def active_s(self) -> float:
        """Seconds in which the run lived."""
        return sum(life.end - life.start for life in self.lives)

    def seconds_by_state(self) -> Mapping[str, float]:
        """Cell seconds in each state, LOST left out."""
        total: dict[str, float] = {}
        for lane in self.lanes.values():
            for segment in lane:
                if segment.state != CellState.LOST:
                    total[segment.state] = total.get(segment.state, 0.0) + segment.seconds
        return total


@dataclass(slots=True)
class _Builder:
    """The fold's working memory."""

    state: RunState = field(default_factory=RunState)
    lives: list[Life] = field(default_factory=list)
    kept: dict[type[ev.Event], list[Stamped]] = field(default_factory=dict)
    lanes: dict[str, list[Segment]] = field(default_factory=dict)
    open: dict[str, Segment] = field(default_factory=dict)
    core: set[str] = field(default_factory=set)
    scores: dict[str, list[float]] = field(default_factory=dict)

    def take(self, event: RunEvent) -> None:
        parsed = ev.parse(event)
        if isinstance(parsed, ev.RunStarted):
            if self.lives:
                self._end_life(self.state.time, "cut")
            begun = min((segment.start for segment in self.open.values()), default=event.time)
            self.lives.append(Life(begun, event.time, parsed.resumed, "cut"))
        self.state = reduce(self.state, event)
        if parsed is None:
            return
        if type(parsed) in _KEPT:
            self.kept.setdefault(type(parsed), []).append(Stamped(event.time, parsed))
        if isinstance(parsed, ev.CellStateChanged):
            self._cell(parsed, event.time)
        elif isinstance(parsed, ev.ExecutionEnded) and parsed.purpose == "train" and parsed.score is not None:
            self.scores.setdefault(parsed.status, []).append(parsed.score)
        elif isinstance(parsed, ev.RunEnded):
            self._end_life(event.time, parsed.status)

    def _cell(self, event: ev.CellStateChanged, time: float) -> None:
        name = cell_name(event.cell)
        if event.core:
            self.core.add(name)
        before = self.open.get(name)
        if event.state == CellState.LOST and before is not None and before.cell != event.cell:
            return
        self._close(name, time)
        self.open[name] = Segment(event.cell, event.state, time, time, event.reason)

    def _close(self, name: str, time: float) -> None:
        segment = self.open.pop(name, None)
        if segment is not None:
            ended = Segment(segment.cell, segment.state, segment.start, time, segment.reason)
            self.lanes.setdefault(name, []).append(ended)

    def _end_life(self, time: float, status: str) -> None:
        for name in list(self.open):
            self._close(name, time)
        if self.lives and self.lives[-1].status == "cut":
            life = self.lives[-1]
            self.lives[-1] = Life(life.start, max(life.start, time), life.resumed, status)

    def series(self, kind: type[ev.Event]) -> tuple[Stamped, ...]:
        return tuple(self.kept.get(kind, ()))


_KEPT = frozenset(
    {ev.StepApplied, ev.Evaluated, ev.LoadSampled, ev.Switched, ev.SessionMoved, ev.LeaseReturned, ev.Notice}
)


def timeline(events: Iterable[RunEvent]) -> Timeline:
    """Fold a log; events that cannot be read become notices."""
    builder = _Builder()
    for event in events:
        try:
            builder.take(event)
        except ValueError as error:
            builder.take(ev.Notice(str(error)).at(event.time))
    builder._end_life(builder.state.time, "cut")
    return Timeline(
        final=builder.state,
        lives=tuple(builder.lives),
        steps=builder.series(ev.StepApplied),
        evals=builder.series(ev.Evaluated),
        samples=builder.series(ev.LoadSampled),
        switches=builder.series(ev.Switched),
        moves=builder.series(ev.SessionMoved),
        returned=builder.series(ev.LeaseReturned),
        notices=builder.series(ev.Notice),
        lanes={name: tuple(lane) for name, lane in builder.lanes.items()},
        core=frozenset(builder.core),
        scored={status: (len(s), sum(s) / len(s)) for status, s in builder.scores.items()},
    )
