"""Everything that can be told to the machine.

Frozen records; ``time`` is in seconds on any monotone clock and never goes back. An event is a fact: it is
validated before anything changes, and one that cannot be true is refused with the story of what it concerns.
Holds no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .ids import CellId, EndStatus, Role

# --- cells -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CellJoining:
    """A cell is starting up. Optional: ``CellJoined`` alone is enough."""

    time: float
    cell: CellId
    core: bool = False


@dataclass(frozen=True, slots=True)
class CellJoined:
    """A cell is up in ``role`` with weights of ``version``; ``slots`` concurrent calls, ``kv_tokens`` of
    cache.
    """

    time: float
    cell: CellId
    role: Role
    slots: int
    kv_tokens: int
    core: bool = False
    version: int = 0


@dataclass(frozen=True, slots=True)
class CellLost:
    """A cell is gone with all it held. A replacement joins with a higher incarnation."""

    time: float
    cell: CellId
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReported:
    """A rollout cell's measured load: calls running and queued, KV tokens held, speeds in tokens per second.

    ``growth_tps``: tokens per second by which the running contexts grow. ``prefill_tps``: measured prefill
    speed.
    """

    time: float
    cell: CellId
    running: int
    waiting: int
    kv_tokens: int
    growth_tps: float | None = None
    prefill_tps: float | None = None


@dataclass(frozen=True, slots=True)
class DrainDone:
    """The engine on ``cell`` takes no new calls (answer to ``DrainCell``)."""

    time: float
    cell: CellId


@dataclass(frozen=True, slots=True)
class DrainFailed:
    """The engine could not stop its intake and goes on serving."""

    time: float
    cell: CellId
    reason: str


@dataclass(frozen=True, slots=True)
class SwitchDone:
    """``cell`` is in ``role`` now; the change took ``seconds`` (measured, not estimated)."""

    time: float
    cell: CellId
    role: Role
    seconds: float


@dataclass(frozen=True, slots=True)
class SwitchFailed:
    """``cell`` did not reach ``role``. ``fell_back``: it is usable in its old role; otherwise it is lost."""

    time: float
    cell: CellId
    role: Role
    reason: str
    fell_back: bool = True


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """``cell`` samples with weights of ``version`` from now on."""

    time: float
    cell: CellId
    version: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightsFailed:
    """``cell`` could not load ``version`` and keeps the old one; it is asked again."""

    time: float
    cell: CellId
    version: int
    reason: str


# --- groups, executions, sessions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupQueued:
    """A group of ``size`` executions wants to start. Answered by ``AdmitGroup`` when its turn comes.

    ``evaluation``: it is judged, not trained: admitted at once, takes no seat, ends with ``GroupEvaluated``.
    """

    time: float
    group: str
    size: int
    evaluation: bool = False


@dataclass(frozen=True, slots=True)
class GroupsClosed:
    """No further group will be queued: the last step may be sealed with fewer groups than usual."""

    time: float


@dataclass(frozen=True, slots=True)
class ExecutionStarted:
    """An execution of an admitted group runs (also: runs again after ``RetryExecution``)."""

    time: float
    execution: str
    group: str


@dataclass(frozen=True, slots=True)
class ExecutionEnded:
    """An execution ended; its sessions end with it. ``reason`` is kept for the story."""

    time: float
    execution: str
    status: EndStatus
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SessionStarted:
    """A conversation of a running execution begins (main agent, sub-agent)."""

    time: float
    session: str
    execution: str


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A conversation is over; its KV may be forgotten."""

    time: float
    session: str


@dataclass(frozen=True, slots=True)
class CallRequested:
    """A session resumes: it wants a model call with a prompt of ``prompt_tokens``. Answered by ``RouteCall``.

    ``prefix``: hashes of the prompt's leading blocks, shortest prefix first; equal hashes mean equal
    prefixes. Asking again for a session that is in a call is how an interrupted call is resumed elsewhere.
    """

    time: float
    session: str
    prompt_tokens: int
    prefix: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call was answered; the context is now ``context_tokens`` long and the session pauses in its tool.

    ``pause_s``: how long the pause is expected to last, if known.
    """

    time: float
    session: str
    context_tokens: int
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class MoveDone:
    """Move ``move`` arrived at ``dst``. ``carried``: with its KV (``bytes``, ``tokens``, ``seconds``
    measured).
    """

    time: float
    move: int
    session: str
    carried: bool
    bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class MoveFailed:
    """Move ``move`` did not carry the KV. ``refused``: the destination had no room. The session goes on at
    ``dst`` by prefilling again if it can, else on another cell.
    """

    time: float
    move: int
    session: str
    reason: str
    refused: bool = False


# --- training ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: its id and its training cost in tokens (those computed, shared prefixes once)."""

    id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class GroupBatched:
    """All micro-batches of a group, at once (answer to ``BuildGroup``); denominators are fixed from here on.

    ``counts``: the group takes a seat of the step. ``False`` frees the seat (filtered group) and
    ``batches`` must be empty. A group may count with no batches (its gradient is zero).
    """

    time: float
    group: str
    batches: tuple[Batch, ...]
    counts: bool = True


@dataclass(frozen=True, slots=True)
class ContributionCommitted:
    """The gradient over ``batches`` of ``lease`` is in the core's sum. The lease ends; batches it did not
    cover return to the ledger. ``seconds``: computing time, measured.
    """

    time: float
    cell: CellId
    lease: int
    batches: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseFailed:
    """Nothing of ``lease`` was committed; its batches return to the ledger."""

    time: float
    cell: CellId
    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The optimizer stepped (answer to ``ApplyStep``): weights of version ``step + 1`` exist on the core."""

    time: float
    step: int


@dataclass(frozen=True, slots=True)
class WeightsPublished:
    """Weights of ``version`` can be fetched by every cell."""

    time: float
    version: int


# --- time and people ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Deadlines and dwell times are looked at (see ``Scheduler.wake_at``)."""

    time: float


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """A person or another program asks for a cell to be turned to ``role``, whatever the policy thinks."""

    time: float
    cell: CellId
    role: Role
    reason: str = "asked"


@dataclass(frozen=True, slots=True)
class CutAsked:
    """An execution shall be cut now and scored for what it reached."""

    time: float
    execution: str
    reason: str = "asked"


Event: TypeAlias = (
    CellJoining
    | CellJoined
    | CellLost
    | LoadReported
    | DrainDone
    | DrainFailed
    | SwitchDone
    | SwitchFailed
    | WeightsLoaded
    | WeightsFailed
    | GroupQueued
    | GroupsClosed
    | ExecutionStarted
    | ExecutionEnded
    | SessionStarted
    | SessionEnded
    | CallRequested
    | CallEnded
    | MoveDone
    | MoveFailed
    | GroupBatched
    | ContributionCommitted
    | LeaseFailed
    | StepApplied
    | WeightsPublished
    | Tick
    | TurnAsked
    | CutAsked
)

ALL_EVENTS: tuple[type, ...] = Event.__args__
