"""What the machine remembers of each thing, in slots.

Mutable, private to the machine: the outside sees ``view.py``. Two hundred thousand sessions live in these, so they
hold references and small numbers, and notes are tuples that are put into words only when somebody asks.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from .events import Batch
from .ids import CellId, CellState, EndStatus, Role, SessionPhase

Note: TypeAlias = tuple[Any, ...]
"""(time, format, *arguments)"""

MAX_NOTES = 8


def add_note(notes: list[Note], note: Note, limit: int = MAX_NOTES) -> None:
    """Remember ``note``; beyond ``limit`` the oldest but the first are forgotten."""
    notes.append(note)
    if len(notes) > limit:
        del notes[1]


class Cell:
    """One life of a cell."""

    __slots__ = (
        "calling",
        "core",
        "growth_tps",
        "id",
        "kv_held",
        "kv_tokens",
        "lease",
        "moves_in",
        "moves_out",
        "notes",
        "order",
        "quiet",
        "report",
        "role",
        "role_since",
        "sessions",
        "since",
        "slots",
        "state",
        "syncing",
        "target",
        "turn_why",
        "version",
    )

    def __init__(self, cell: CellId, core: bool, order: int, now: float) -> None:
        self.id = cell
        self.core = core
        self.order = order
        self.state = CellState.JOINING
        self.role: Role | None = None
        self.target: Role | None = None
        """Role it is on its way to, from DRAINING or FLUSHING on."""
        self.turn_why = ""
        """Why it is being turned."""
        self.slots = 0
        self.kv_tokens = 0
        self.version = -1
        self.syncing: int | None = None
        self.sessions: dict[str, Session] = {}
        self.calling = 0
        self.kv_held = 0
        self.moves_out = 0
        self.moves_in = 0
        self.quiet = False
        """The engine confirmed that it takes no new calls."""
        self.lease: Lease | None = None
        self.report: tuple[int, int, int] | None = None
        """What its engine said of itself while it last took sessions: calls running, calls queued, KV tokens."""
        self.growth_tps = 0.0
        """Tokens per second by which its running contexts grow, as its engine said."""
        self.since = now
        self.role_since = now
        self.notes: list[Note] = []

    def load(self) -> float:
        """Calls (and, a quarter each, paused sessions) against slots, or KV against cache, whichever is fuller."""
        calls = (3 * (self.calling + self.moves_in) + len(self.sessions)) / (4 * self.slots)
        return max(calls, self.kv_held / self.kv_tokens)

    def roomy(self, tokens: int) -> bool:
        """Whether a context of ``tokens`` fits, as far as we and its engine know, and its engine queues nothing."""
        _, queued, held = self.report or (0, 0, 0)
        return not queued and max(self.kv_held, held) + tokens <= self.kv_tokens

    def has_slot(self, overload: float) -> bool:
        """Whether one more call may be given to it."""
        return self.calling + self.moves_in < overload * self.slots


class Session:
    """One conversation. ``home`` is the one cell that owns it. While a move is under way the destination is already
    its home and ``src`` is the cell that its KV comes from; ``wants``: its caller waits for a route meanwhile.
    ``version``: its group's, kept here because every call asks for it and a group is two records further away.
    """

    __slots__ = ("context", "execution", "home", "id", "move", "notes", "phase", "since", "src", "version", "wants")

    def __init__(self, name: str, execution: Execution, now: float) -> None:
        self.id = name
        self.execution = execution
        self.version = execution.group.version
        self.home: Cell | None = None
        self.src: Cell | None = None
        self.wants = False
        self.move = 0
        self.phase = SessionPhase.PAUSED
        self.context = 0
        self.since = now
        self.notes: list[Note] = []


class Execution:
    """One attempt at a task."""

    __slots__ = ("attempt", "cut", "deadline", "group", "id", "notes", "running", "sessions", "started", "status")

    def __init__(self, name: str, group: Group) -> None:
        self.id = name
        self.group = group
        self.attempt = 0
        self.running = False
        self.cut = False
        self.started = 0.0
        self.deadline: float | None = None
        self.status: EndStatus | None = None
        self.sessions: dict[str, Session] = {}
        self.notes: list[Note] = []


class Group:
    """The attempts at one task inside one step."""

    __slots__ = ("evaluation", "executions", "id", "notes", "order", "size", "stage", "step", "unfinished", "version")

    def __init__(self, name: str, size: int, evaluation: bool = False) -> None:
        self.id = name
        self.size = size
        self.evaluation = evaluation
        self.version = -1
        """Policy version at admission: no token of the group is older."""
        self.stage = "queued"
        """queued → running → ended → building → batched (then trained, or dropped at any point)"""
        self.step = -1
        self.order = 0
        """Counts admissions; calls of older groups are served first."""
        self.unfinished = size
        self.executions: dict[str, Execution] = {}
        self.notes: list[Note] = []


class MicroBatch:
    """A ledger line. ``lease`` while somebody computes it, ``done`` once its gradient is in the sum."""

    __slots__ = ("batch", "done", "failures", "group", "lease")

    def __init__(self, batch: Batch, group: str) -> None:
        self.batch = batch
        self.group = group
        self.lease: int | None = None
        self.done = False
        self.failures = 0


class Lease:
    """The right of one cell to compute some micro-batches."""

    __slots__ = ("batches", "cell", "id", "notes", "recalled", "since", "step")

    def __init__(self, number: int, cell: Cell, step: int, batches: tuple[MicroBatch, ...], now: float) -> None:
        self.id = number
        self.cell = cell
        self.step = step
        self.batches = batches
        self.recalled = False
        self.since = now
        self.notes: list[Note] = []
