"""The machine's memory and the few primitive changes that keep its sums right.

Invariants kept here: a session is on at most one cell; a cell's session set, its KV and the cluster's sums agree; a
cell changes state only along ``TRANSITIONS``. Decides nothing: handlers and policies do.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict, deque

from .commands import Command
from .config import SchedConfig
from .costs import Costs
from .errors import BadValueError, InvalidTransitionError
from .ids import CellId, CellState, Role, SessionPhase
from .ledger import Ledger
from .loads import Fleet
from .records import Cell, Execution, Group, Lease, Note, Session, add_note

__all__ = ["TRANSITIONS", "World"]

S = CellState
TRANSITIONS: dict[CellState, frozenset[CellState]] = {
    S.JOINING: frozenset({S.ROLLOUT, S.TRAIN, S.LOST}),
    S.ROLLOUT: frozenset({S.DRAINING, S.LOST}),
    S.DRAINING: frozenset({S.SWITCHING, S.ROLLOUT, S.LOST}),
    S.SWITCHING: frozenset({S.ROLLOUT, S.TRAIN, S.LOST}),
    S.TRAIN: frozenset({S.FLUSHING, S.LOST}),
    S.FLUSHING: frozenset({S.SWITCHING, S.TRAIN, S.LOST}),
    S.LOST: frozenset(),
}
"""Allowed changes of a cell's state. DRAINING → ROLLOUT and FLUSHING → TRAIN give a turn up."""

_GROWTH_TAU = 60.0
CELL_NOTES = 64
_HISTORY = 256


class World:
    """Everything the machine knows. Changed by handlers only, and only after an event was found valid."""

    def __init__(self, config: SchedConfig) -> None:
        self.config = config
        self.now = 0.0
        self.started = False
        self.seq = 0
        self.out: list[Command] = []
        self.touched: list[Cell] = []
        """Draining or flushing cells whose progress must be looked at before the event is over."""
        self.dirty = False
        """Something changed that a policy may react to."""
        self.ledger = Ledger(config.first_version, config.groups_per_step)
        self.costs = Costs(config.priors)
        self.deadlines: list[tuple[float, str]] = []
        """Heap of (time, execution) at which executions are cut."""
        self.graves: OrderedDict[str, list[Note]] = OrderedDict()
        self.step_opened = 0.0
        """When the open step's weights were published (or the first group was admitted)."""
        self._no_cells()
        self._no_work()
        self._no_sums()

    def _no_cells(self) -> None:
        self.cells: dict[str, Cell] = {}
        """The latest life of each cell name; a lost one stays until it is replaced."""
        self.core: Cell | None = None
        self.joined = 0
        self.rollout = Fleet(self.config.overload)
        self.trainers: dict[int, Cell] = {}
        """Cells in state TRAIN, by order of joining."""
        self.idle: dict[int, Cell] = {}
        """Those of them that hold no lease."""
        self.behind: dict[int, Cell] = {}
        """Cells whose weight load failed and that are to be asked again."""
        self.in_transit: dict[int, Cell] = {}
        """Cells in DRAINING, FLUSHING or SWITCHING."""
        self.switches = 0

    def _no_work(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.executions: dict[str, Execution] = {}
        self.groups: dict[str, Group] = {}
        self.queue: OrderedDict[str, Group] = OrderedDict()
        """Groups that wait for admission, oldest first."""
        self.closed = False
        """No further group will be queued."""
        self.waiting: dict[str, Session] = {}
        """Sessions that want a call for which there is no cell or no slot."""
        self.line: list[tuple[int, int, str]] = []
        """Heap of them by (admission of their group, arrival); entries of sessions that left are skipped."""
        self.arrivals = 0
        self.freed = False
        """Somebody who waits may be served now."""
        self.call_s = 0.0
        """Running mean of how long calls take."""
        self.admissions = 0
        self.durations: list[float] = []
        """How long the last executions ran, sorted; ``recent`` has them in order of ending."""
        self.recent: deque[float] = deque()
        self.moves: dict[int, Session] = {}
        self.next_move = 1
        self.prefixes: OrderedDict[int, int] = OrderedDict()
        """Prefix hash → order of the cell that last served it; least recently used first."""

    def _no_sums(self) -> None:
        """Sums over the things above, kept right by the methods below."""
        self.slots = 0
        self.kv_tokens = 0
        self.all_slots = 0
        self.all_kv = 0
        self.kv_held = 0
        self.calling = 0
        self.homed = 0
        self.unstarted = 0
        """Executions of admitted groups that do not run (yet, or again)."""
        self.live = 0
        """Executions of admitted groups that have not ended for good."""
        self.bare = 0
        """Running executions without a session."""
        self.growth = 0.0
        self.growth_at = 0.0
        self.reported_growth = 0.0
        """Of the rollout cells whose engines say it."""
        self.ended_contexts = 0.0
        self.ended_sessions = 0

    # --- notes ---------------------------------------------------------------------------------------------

    def note(self, thing: Cell | Session | Execution | Group | Lease, text: str, *args: object) -> None:
        """Remember what happened to ``thing``; put into words only on demand."""
        limit = CELL_NOTES if type(thing) is Cell else 8
        add_note(thing.notes, (self.now, text, *args), limit)

    def bury(self, key: str, notes: list[Note]) -> None:
        """Keep the story of something that is over, for a while."""
        if self.config.story_keep:
            self.graves[key] = notes
            self.graves.move_to_end(key)
            while len(self.graves) > self.config.story_keep:
                self.graves.popitem(last=False)

    # --- cells ---------------------------------------------------------------------------------------------

    def set_state(self, cell: Cell, state: CellState, why: str) -> None:
        """Change a cell's state along the table and keep the capacity sums."""
        old = cell.state
        if state not in TRANSITIONS[old]:
            raise InvalidTransitionError(None, f"{cell.id} cannot go from {old} to {state}")
        if old is S.ROLLOUT:
            self.rollout.remove(cell)
            self.slots -= cell.slots
            self.kv_tokens -= cell.kv_tokens
            self.reported_growth -= cell.growth_tps
            cell.growth_tps, cell.report = 0.0, None
        elif old is S.TRAIN:
            self.trainers.pop(cell.order, None)
            self.idle.pop(cell.order, None)
        if state is S.ROLLOUT:
            self.freed = True
            self.rollout.add(cell)
            self.slots += cell.slots
            self.kv_tokens += cell.kv_tokens
        elif state is S.TRAIN:
            self.trainers[cell.order] = cell
            if cell.lease is None:
                self.idle[cell.order] = cell
        if state is S.LOST:
            self.all_slots -= cell.slots
            self.all_kv -= cell.kv_tokens
        if state in (S.DRAINING, S.FLUSHING, S.SWITCHING):
            self.in_transit[cell.order] = cell
        else:
            self.in_transit.pop(cell.order, None)
            cell.target = None
        if state in (S.ROLLOUT, S.TRAIN):
            role = Role(state.value)
            if cell.role is not role:
                cell.role_since = self.now
            cell.role = role
        cell.state = state
        cell.since = self.now
        self.dirty = True
        self.note(cell, "{} → {}: {}", old.value, state.value, why)

    def set_version(self, cell: Cell, version: int) -> None:
        """``cell`` holds weights of ``version`` now."""
        member = cell.order in self.rollout.members
        if member:
            self.rollout.remove(cell)
        cell.version = version
        if member:
            self.rollout.add(cell)
            self.freed = True

    # --- sessions ------------------------------------------------------------------------------------------

    def attach(self, session: Session, cell: Cell) -> None:
        """Give a homeless session a home."""
        session.home = cell
        cell.sessions[session.id] = session
        self.homed += 1
        cell.kv_held += session.context
        if session.phase is SessionPhase.CALLING:
            cell.calling += 1
            self.rollout.recount(cell)

    def detach(self, session: Session) -> Cell | None:
        """Take a session off its cell, KV and all."""
        cell = session.home
        if cell is not None:
            session.home = None
            del cell.sessions[session.id]
            self.homed -= 1
            cell.kv_held -= session.context
            if session.phase is SessionPhase.CALLING:
                cell.calling -= 1
                self.rollout.recount(cell)
            self.rollout.lighter(cell)
            self.freed = True
        return cell

    def set_phase(self, session: Session, phase: SessionPhase) -> None:
        """Change what a session is doing and keep the counts."""
        old = session.phase
        if old is phase:
            return
        if old is SessionPhase.CALLING:
            self.calling -= 1
            self.freed = True
            if session.home is not None:
                session.home.calling -= 1
                self.rollout.recount(session.home)
                self.rollout.lighter(session.home)
        elif old is SessionPhase.WAITING:
            del self.waiting[session.id]
        if phase is SessionPhase.CALLING:
            self.calling += 1
            if session.home is not None:
                session.home.calling += 1
                self.rollout.recount(session.home)
        elif phase is SessionPhase.WAITING:
            self.waiting[session.id] = session
            self.arrivals += 1
            first = session.execution.group.order if self.config.oldest_first else 0
            heapq.heappush(self.line, (first, self.arrivals, session.id))
        session.phase = phase
        session.since = self.now

    def set_context(self, session: Session, tokens: int) -> None:
        """A session's context has ``tokens`` now."""
        change = tokens - session.context
        session.context = tokens
        self.kv_held += change
        cell = session.home
        if cell is not None:
            cell.kv_held += change
            if change < 0:
                self.rollout.lighter(cell)
        if change > 0:
            self.growth = self.growth_now() + change / _GROWTH_TAU
            self.growth_at = self.now

    def growth_now(self) -> float:
        """Tokens per second by which the running contexts grew at their calls' ends, averaged over a minute or so."""
        return self.growth * math.exp((self.growth_at - self.now) / _GROWTH_TAU)

    def ran(self, seconds: float) -> None:
        """An execution that was not cut ran for ``seconds``."""
        bisect.insort(self.durations, seconds)
        self.recent.append(seconds)
        if len(self.recent) > _HISTORY:
            del self.durations[bisect.bisect_left(self.durations, self.recent.popleft())]

    def residual_s(self, elapsed: float) -> float:
        """Predicted seconds to go of an execution that has run for ``elapsed``."""
        first = bisect.bisect_right(self.durations, elapsed)
        longer = self.durations[first:]
        return sum(longer) / len(longer) - elapsed if longer else 0.1 * elapsed

    # --- demand against capacity ---------------------------------------------------------------------------

    def demand(self) -> tuple[float, float]:
        """Unfinished work as (slots, KV tokens), growth of the running contexts allowed for."""
        calls = self.calling + len(self.waiting)
        paused = len(self.sessions) - calls
        ahead = self.unstarted + self.bare
        slots = calls + self.config.pause_weight * paused + ahead
        mean = self.ended_contexts / self.ended_sessions if self.ended_sessions else 0.0
        grown = max(self.growth_now(), self.reported_growth) * self.config.growth_horizon_s
        return slots, self.kv_held + grown + ahead * mean * 0.5

    def utilisation(self, without: Cell | None = None, more: tuple[int, int] = (0, 0)) -> float:
        """Demand as a share of the sampling capacity of the rollout cells, ``without`` one, plus ``more``."""
        slots, kv = self.slots + more[0], self.kv_tokens + more[1]
        if without is not None:
            slots -= without.slots
            kv -= without.kv_tokens
        need_slots, need_kv = self.demand()
        if slots <= 0 or kv <= 0:
            return math.inf if need_slots > 0 else 0.0
        return max(need_slots / slots, need_kv / kv)

    # --- the clock -----------------------------------------------------------------------------------------

    def check_time(self, event: object, time: float) -> None:
        """Refuse a time that is no number."""
        if not math.isfinite(time):
            raise BadValueError(event, f"its time is {time}; expected a finite number of seconds")

    def wake_for(self, execution: Execution, at: float) -> None:
        """Look at ``execution`` again at ``at``."""
        execution.deadline = at
        heapq.heappush(self.deadlines, (at, execution.id))

    def find_cell(self, cell: CellId) -> Cell | None:
        """The record of exactly this life, lost or not."""
        rec = self.cells.get(cell[0])
        return rec if rec is not None and rec.id == cell else None
