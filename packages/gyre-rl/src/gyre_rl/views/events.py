"""The events of a run: what the ring emits and every view and sink reads.

One frozen dataclass a kind; its fields are the event's data, JSON-able as they are. The ring emits
`StepStarted(step=3, version=3, tasks=8).at(now)`, a `gyre_core.RunEvent`; `parse` gives the dataclass back. Invariants:
an event says what has happened, never what is planned; times are seconds since the epoch in `RunEvent.time`, durations
are seconds; a cell is named `name#incarnation`; a reader skips kinds and fields that it does not know, so that an old
log stays readable. The scheduler's own events (its write-ahead log) are another vocabulary: `gyre_sched.events`.

| kind | when |
|---|---|
| run_started, run_ended | the run has its directory; every process of it is gone |
| cell_state | a cell came into a state, LOST with its reason |
| switch | a change of role was carried out or failed; its reason with the numbers |
| session_moved | a session went from one cell to another, with its KV or without |
| step_started, step_sealed, step_applied | the step admits groups; its groups are fixed; the optimizer stepped |
| execution_started, execution_went_on, execution_ended | one attempt at a task |
| group_ready | a group's baseline, advantages and denominators are fixed, its micro-batches are in the ledger |
| lease, contribution, lease_returned | work for a training cell; its gradient is in the sum; or the work came back |
| weights_synced | an engine samples with a version from now on |
| eval | a split was judged |
| sample | load against capacity and marks, about once a second |
| checkpoint | a resume can begin here |
| notice | something a person should read |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import msgspec
from gyre_core.runtime import RunEvent

from gyre_rl.views.log import decode_lines as decode_lines
from gyre_rl.views.log import read_log as read_log


@dataclass(frozen=True, slots=True)
class Event:
    """Base of the kinds: knows its name and its way into a `RunEvent`."""

    kind: ClassVar[str] = ""

    def at(self, time: float) -> RunEvent:
        """This event, happened at `time` (seconds since the epoch)."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return RunEvent(time, self.kind, data)


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The run (or its resume) has its directory and begins."""

    kind: ClassVar[str] = "run_started"
    name: str
    run_dir: str
    steps: int
    """Optimizer steps it shall reach."""
    cells: int
    seed: int = 0
    policy: str = ""
    tasks_per_step: int = 0
    group_size: int = 0
    resumed: bool = False
    first_step: int = 0
    """Step that it begins with: 0, or the one that a resume goes on with."""


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """Every process is gone."""

    kind: ClassVar[str] = "run_ended"
    status: str
    """"finished" (all steps), "stopped" (in order, resumable) or "failed"."""
    reason: str = ""
    wall_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CellStateChanged(Event):
    """A cell came into a state of `gyre_core.CellState`."""

    kind: ClassVar[str] = "cell_state"
    cell: str
    state: str
    core: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Switched(Event):
    """A change of role ended: `ok`, or the cell went back."""

    kind: ClassVar[str] = "switch"
    cell: str
    role: str
    """The role it was turned to."""
    seconds: float
    """Of the change itself, without draining."""
    reason: str = ""
    """Why it was asked for, with the numbers."""
    drain_s: float = 0.0
    """Seconds of draining or flushing before it."""
    ok: bool = True


@dataclass(frozen=True, slots=True)
class SessionMoved(Event):
    """A session goes on at another cell."""

    kind: ClassVar[str] = "session_moved"
    session: str
    src: str
    dst: str
    carried: bool
    """With its KV; else it is prefilled again."""
    tokens: int = 0
    """Context of the session, tokens: carried as KV, or to be prefilled again."""
    bytes: int = 0
    seconds: float = 0.0
    interrupt: bool = False
    """A call was running and went on elsewhere from the tokens it had."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StepStarted(Event):
    """The step admits its groups, sampled under `version` or later."""

    kind: ClassVar[str] = "step_started"
    step: int
    version: int
    tasks: int


@dataclass(frozen=True, slots=True)
class StepSealed(Event):
    """The number of tasks of the step is known; no group is added any more."""

    kind: ClassVar[str] = "step_sealed"
    step: int
    groups: int
    cut: int = 0
    """Executions cut because the step closed."""


@dataclass(frozen=True, slots=True)
class StepApplied(Event):
    """The optimizer stepped, or skipped for the reason given."""

    kind: ClassVar[str] = "step_applied"
    step: int
    version: int
    """Policy version after it."""
    score: float
    """Mean score of the executions that are in the step's baselines."""
    seconds: float
    """From the step before it (or the start) to this one."""
    executions: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    """Tree tokens that went through the trainer."""
    trained_tokens: int = 0
    """Sampled tokens with loss."""
    staleness_mean: float = 0.0
    """Policy versions behind, over the trained tokens."""
    staleness_max: int = 0
    contributions: int = 0
    satellites: int = 0
    """Cells other than the core that contributed."""
    skipped: str | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Everything else that loss and trainer report (ratio, KL, clip share, gap between engine and trainer)."""


@dataclass(frozen=True, slots=True)
class Compared(Event):
    """Trainer and engine were compared on the first step's tokens: |difference of log-probabilities| in nats."""

    kind: ClassVar[str] = "compared"
    step: int
    mean: float
    largest: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ExecutionStarted(Event):
    """An attempt at a task began."""

    kind: ClassVar[str] = "execution_started"
    execution: str
    task: str
    group: str = ""
    step: int = -1
    purpose: str = "train"
    attempt: int = 0
    """Counts retries after failures of ours, from 0."""


@dataclass(frozen=True, slots=True)
class ExecutionWentOn(Event):
    """Its agents' process (or the whole run) had died; it goes on from where it last rested."""

    kind: ClassVar[str] = "execution_went_on"
    execution: str
    group: str = ""
    purpose: str = "train"


@dataclass(frozen=True, slots=True)
class ExecutionEnded(Event):
    """An attempt ended and was scored."""

    kind: ClassVar[str] = "execution_ended"
    execution: str
    status: str
    """A `gyre_core.ExecutionStatus`."""
    score: float | None = None
    """None when it was not scored (failed, stale)."""
    partial: bool = False
    """The score is credit for unfinished work."""
    purpose: str = "train"
    group: str = ""
    step: int = -1
    turns: int = 0
    sampled_tokens: int = 0
    branches: int = 0
    """Paths of its tree beyond the first."""
    sub_agents: int = 0
    compactions: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupReady(Event):
    """All executions of a group ended and its part of the loss is fixed."""

    kind: ClassVar[str] = "group_ready"
    group: str
    step: int
    members: int
    """Executions in baseline and loss."""
    left_out: int = 0
    baseline: float = 0.0
    spread: float = 0.0
    """Standard deviation of the members' scores."""
    batches: int = 0
    tokens: int = 0
    """Tree tokens of its micro-batches."""
    note: str = ""
    """Why it has no gradient, when it has none (all scores equal, gated, empty)."""


@dataclass(frozen=True, slots=True)
class Leased(Event):
    """A training cell got micro-batches."""

    kind: ClassVar[str] = "lease"
    lease: int
    cell: str
    step: int
    batches: int
    tokens: int = 0
    core: bool = False


@dataclass(frozen=True, slots=True)
class Contributed(Event):
    """A lease's gradient is in the core's sum."""

    kind: ClassVar[str] = "contribution"
    lease: int
    cell: str
    step: int
    batches: int
    tokens: int = 0
    seconds: float = 0.0
    core: bool = False


@dataclass(frozen=True, slots=True)
class LeaseReturned(Event):
    """Micro-batches came back uncounted: their cell failed, was recalled or is lost."""

    kind: ClassVar[str] = "lease_returned"
    lease: int
    cell: str
    step: int
    batches: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WeightsSynced(Event):
    """An engine samples with `version` from now on."""

    kind: ClassVar[str] = "weights_synced"
    cell: str
    version: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """A split was judged under `version`."""

    kind: ClassVar[str] = "eval"
    split: str
    version: int
    step: int
    """Steps applied so far."""
    score: float
    """Mean over tasks of the mean over their executions."""
    tasks: int
    executions: int
    seconds: float = 0.0
    completed: int = 0
    failed: int = 0
    """Ours; in no mean."""


@dataclass(frozen=True, slots=True)
class LoadSampled(Event):
    """Load and marks at one moment. Marks are None for policies that have none."""

    kind: ClassVar[str] = "sample"
    in_flight: int
    """Executions running."""
    waiting: int
    """Calls that wait at engines."""
    running: int
    """Calls that sample."""
    demand: float
    """Unfinished work, in slots."""
    capacity: float
    """What the rollout cells can take, in slots: the smaller of slots and KV."""
    low: float | None = None
    """Demand, in slots, below which a rollout cell may be released."""
    high: float | None = None
    """Demand, in slots, above which a satellite is claimed back."""
    ready_tokens: int = 0
    """Training data in the ledger that nobody computes yet."""
    leased_tokens: int = 0
    kv_used: int = 0
    """KV tokens held by running calls, all rollout cells."""
    kv_total: int = 0
    sampled_tokens: int = 0
    """Sampled since the run began (a counter)."""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    trained_tokens: int = 0
    """Tree tokens through the trainers since the run began (a counter)."""


@dataclass(frozen=True, slots=True)
class Checkpointed(Event):
    """The core cell's state is on disk."""

    kind: ClassVar[str] = "checkpoint"
    step: int
    version: int
    location: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A sentence for a person."""

    kind: ClassVar[str] = "notice"
    text: str
    level: str = "warning"
    """"info", "warning" or "error"."""


KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {
        cls.kind: cls
        for cls in (
            RunStarted,
            RunEnded,
            CellStateChanged,
            Switched,
            SessionMoved,
            StepStarted,
            StepSealed,
            StepApplied,
            ExecutionStarted,
            ExecutionWentOn,
            ExecutionEnded,
            GroupReady,
            Leased,
            Contributed,
            LeaseReturned,
            WeightsSynced,
            Evaluated,
            LoadSampled,
            Checkpointed,
            Compared,
            Notice,
        )
    }
)
"""Kind -> its dataclass."""


def parse(event: RunEvent) -> Event | None:
    """The typed event, or None for a kind that is not of this vocabulary.

    Fields that the dataclass does not have are skipped. Raises ValueError when one that it needs is missing or wrong.
    """
    cls = KINDS.get(event.kind)
    if cls is None:
        return None
    try:
        return msgspec.convert(dict(event.data), cls, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(f"reading a {event.kind} event of time {event.time}: {error}") from error


def encode(event: RunEvent) -> bytes:
    """One JSON line, without its newline."""
    return msgspec.json.encode({"time": event.time, "kind": event.kind, "data": event.data})
