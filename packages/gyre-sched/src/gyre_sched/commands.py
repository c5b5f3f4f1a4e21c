"""Everything the machine can ask for.

A command carries its reason with the numbers that led to it. It is a request: its outcome comes back as an
event, and the machine counts on nothing before that. Holds no behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .ids import CellId, Role


@dataclass(frozen=True, slots=True)
class DrainCell:
    """Take no new calls on ``cell``; running ones go on until they end or are moved. → DrainDone,
    DrainFailed
    """

    cell: CellId
    reason: str


@dataclass(frozen=True, slots=True)
class UndrainCell:
    """Serve again: the drain was given up. No answer needed."""

    cell: CellId
    reason: str


@dataclass(frozen=True, slots=True)
class SwitchCell:
    """Change ``cell`` to ``role``; it is empty (no session, no lease). → SwitchDone, SwitchFailed,
    CellLost
    """

    cell: CellId
    role: Role
    reason: str


@dataclass(frozen=True, slots=True)
class MoveSession:
    """Bring ``session`` from ``src`` to ``dst``; with its KV if ``carry_kv``. ``interrupt``: a call is
    running; stop it at a token border, keep what it sampled, and let the caller continue at ``dst``. →
    MoveDone, MoveFailed
    """

    move: int
    session: str
    src: CellId
    dst: CellId
    carry_kv: bool
    interrupt: bool
    tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class RouteCall:
    """The call that ``session`` asked for goes to ``cell``. → CallEnded"""

    session: str
    cell: CellId
    reason: str


@dataclass(frozen=True, slots=True)
class SyncWeights:
    """Load weights of ``version`` on ``cell``. → WeightsLoaded, WeightsFailed"""

    cell: CellId
    version: int


@dataclass(frozen=True, slots=True)
class AdmitGroup:
    """Start the executions of ``group``, sampled from ``version`` on. → ExecutionStarted, for each"""

    group: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class RetryExecution:
    """Run a failed execution again (``attempt`` counts from 1). → ExecutionStarted"""

    execution: str
    group: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class CutExecution:
    """End ``execution`` now and score what it reached. → ExecutionEnded (``timeout``)"""

    execution: str
    reason: str


@dataclass(frozen=True, slots=True)
class BuildGroup:
    """All of ``group`` ended: fix baseline, advantages and denominators over ``executions`` and cut
    micro-batches for ``step``. ``left_out``: members that ended as ``failed`` or ``stale``. → GroupBatched
    """

    group: str
    step: int
    executions: tuple[str, ...]
    left_out: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class DropGroup:
    """Too few members of ``group`` are left to train; it leaves and its seat is free. No answer needed."""

    group: str
    reason: str


@dataclass(frozen=True, slots=True)
class GroupEvaluated:
    """All ``executions`` of an evaluation group have ended for good. No answer needed."""

    group: str
    executions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrantLease:
    """Compute the gradient of ``batches`` on ``cell``. → ContributionCommitted, LeaseFailed"""

    cell: CellId
    lease: int
    step: int
    batches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecallLease:
    """Commit what is done of ``lease`` and leave the rest. → ContributionCommitted, LeaseFailed"""

    cell: CellId
    lease: int
    reason: str


@dataclass(frozen=True, slots=True)
class SealStep:
    """No group will be added to ``step``: these are its ``groups``, and |τ| is their number. No answer
    needed.
    """

    step: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Every micro-batch of ``step`` is committed: divide, clip, step. → StepApplied, then WeightsPublished"""

    step: int
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that a person should look at: the machine goes on, but cannot mend it. No answer needed."""

    subject: str
    reason: str


Command: TypeAlias = (
    DrainCell
    | UndrainCell
    | SwitchCell
    | MoveSession
    | RouteCall
    | SyncWeights
    | AdmitGroup
    | RetryExecution
    | CutExecution
    | BuildGroup
    | DropGroup
    | GroupEvaluated
    | GrantLease
    | RecallLease
    | SealStep
    | ApplyStep
    | Alarm
)

ALL_COMMANDS: tuple[type, ...] = Command.__args__
