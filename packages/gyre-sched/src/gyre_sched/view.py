"""What a policy (or a dashboard) may see of the machine: read-only, cheap, always current.

A ``View`` is a window, not a copy: it costs nothing to make and must not be kept across events. ``CellView`` and
``Picture`` are frozen copies for people.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .config import SchedConfig
from .costs import Costs, CostTable
from .ids import CellId, CellState, Role
from .records import Cell
from .world import World

__all__ = ["CellView", "LeaseView", "Picture", "View"]


@dataclass(frozen=True, slots=True)
class CellView:
    """One cell now. ``load``: share of slots or KV, whichever is fuller; ``since``: when it got its state."""

    id: CellId
    core: bool
    state: CellState
    role: Role | None
    version: int
    slots: int
    kv_tokens: int
    sessions: int
    calling: int
    kv_held: int
    load: float
    lease: int | None
    since: float
    role_since: float


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One open lease."""

    id: int
    cell: CellId
    step: int
    batches: tuple[str, ...]
    since: float


@dataclass(frozen=True, slots=True)
class Picture:
    """The whole machine at one moment, for dashboards. ``utilisation``: demand as a share of capacity."""

    now: float
    cells: tuple[CellView, ...]
    utilisation: float
    low: float
    high: float
    step: int
    published: int
    seated: int
    groups_per_step: int
    sealed: bool
    ready_tokens: int
    leased_tokens: int
    done_tokens: int
    queued_groups: int
    running_executions: int
    sessions: int
    calling: int
    waiting: int
    moves: int
    switches: int
    leases: tuple[LeaseView, ...]
    costs: CostTable


def look(cell: Cell) -> CellView:
    """A frozen copy of one cell."""
    return CellView(
        cell.id,
        cell.core,
        cell.state,
        cell.role,
        cell.version,
        cell.slots,
        cell.kv_tokens,
        len(cell.sessions),
        cell.calling,
        cell.kv_held,
        cell.load() if cell.slots else 0.0,
        None if cell.lease is None else cell.lease.id,
        cell.since,
        cell.role_since,
    )


class View:
    """The window for policies."""

    __slots__ = ("_w",)

    def __init__(self, world: World) -> None:
        self._w = world

    @property
    def now(self) -> float:
        """Time of the last event, seconds."""
        return self._w.now

    @property
    def config(self) -> SchedConfig:
        """The settings."""
        return self._w.config

    @property
    def costs(self) -> Costs:
        """Measured costs."""
        return self._w.costs

    # --- cells ---------------------------------------------------------------------------------------------

    @property
    def living(self) -> int:
        """Cells that are not lost."""
        return sum(1 for cell in self._w.cells.values() if cell.state is not CellState.LOST)

    @property
    def rollout_count(self) -> int:
        """Cells in ROLLOUT."""
        return len(self._w.rollout.members)

    @property
    def train_count(self) -> int:
        """Cells in TRAIN, the core cell included."""
        return len(self._w.trainers)

    @property
    def arriving_train(self) -> int:
        """Cells on their way to TRAIN."""
        return sum(1 for cell in self._w.in_transit.values() if cell.target is Role.TRAIN)

    @property
    def arriving_rollout(self) -> int:
        """Cells on their way to ROLLOUT."""
        return len(self._w.in_transit) - self.arriving_train

    @property
    def switches(self) -> int:
        """Changes of role so far."""
        return self._w.switches

    @property
    def transit_room(self) -> int:
        """How many more cells may start to turn now."""
        limit = max(1, int(self._w.config.max_in_transit * len(self._w.cells)))
        return limit - len(self._w.in_transit)

    def cells(self) -> Iterator[CellView]:
        """Every cell, lost ones included; looks at all of them."""
        return (look(cell) for cell in self._w.cells.values())

    def cell(self, name: str) -> CellView | None:
        """The latest life of the cell ``name``, if there ever was one."""
        cell = self._w.cells.get(name)
        return None if cell is None else look(cell)

    def dwelt(self, cell: Cell) -> bool:
        """Whether ``cell`` has been in its role long enough to be turned again."""
        return self._w.now - cell.role_since >= self._w.config.dwell_s or cell.role_since == 0.0

    def idlest(self) -> CellView | None:
        """The least loaded rollout cell that has dwelt and is not the core."""
        cell = self._w.rollout.least(-1, lambda c: not c.core and self.dwelt(c), tries=8)
        return None if cell is None else look(cell)

    def core(self) -> CellView | None:
        """The core cell, if it lives."""
        cell = self._w.core
        return None if cell is None or cell.state is CellState.LOST else look(cell)

    def satellite(self, idle_only: bool) -> CellView | None:
        """A satellite in TRAIN to turn back: one without a lease if there is one."""
        for cell in self._w.idle.values():
            if not cell.core and self.dwelt(cell):
                return look(cell)
        if not idle_only:
            for cell in self._w.trainers.values():
                if not cell.core and self.dwelt(cell):
                    return look(cell)
        return None

    # --- sampling ------------------------------------------------------------------------------------------

    def utilisation(self, without: CellView | None = None, arriving: bool = True) -> float:
        """Demand as a share of sampling capacity; ``without`` one cell; ``arriving`` cells counted as there."""
        w = self._w
        slots = kv = 0
        if arriving:
            for cell in w.in_transit.values():
                if cell.target is Role.ROLLOUT:
                    slots += cell.slots
                    kv += cell.kv_tokens
        gone = None if without is None else w.cells[without.id.name]
        return w.utilisation(gone, (slots, kv))

    @property
    def demand(self) -> tuple[float, float]:
        """Unfinished work as (slots, KV tokens)."""
        return self._w.demand()

    @property
    def live_executions(self) -> int:
        """Executions that run or are about to."""
        return self._w.live

    @property
    def waiting_sessions(self) -> int:
        """Sessions in a call without a cell."""
        return len(self._w.waiting)

    def tail_s(self) -> float:
        """Predicted seconds until every group that the open step must contain has ended; 0 if none is missing.

        For an execution that has run for ``t``, the mean over finished executions that ran longer than ``t`` of what
        they still had to go.
        """
        w, led = self._w, self._w.ledger
        oldest = led.version - w.config.max_staleness
        worst = 0.0
        for group in led.outstanding.values():
            if group.version > oldest:
                break
            for execution in group.executions.values():
                if execution.running:
                    worst = max(worst, w.residual_s(w.now - execution.started))
        return worst

    def step_left_s(self) -> float:
        """Predicted seconds until the step that still takes groups has all of them: the open one, or the next if that
        is sealed; ``inf`` if nothing is known about steps yet.

        The larger of the tail of those that it must contain and of the seats that are still free, taken at the pace of
        the steps before (or the expected one).
        """
        w, led = self._w, self._w.ledger
        usual = w.costs["step_s"] or math.inf
        if led.sealed:
            return usual
        free = w.config.groups_per_step - len(led.seated) - len(led.ended)
        pace = usual * free / w.config.groups_per_step if free > 0 else 0.0
        return max(pace, self.tail_s())

    # --- training ------------------------------------------------------------------------------------------

    @property
    def ready_tokens(self) -> int:
        """Training tokens that nobody computes yet."""
        return self._w.ledger.ready_tokens

    @property
    def leased_tokens(self) -> int:
        """Training tokens on open leases."""
        return self._w.ledger.leased_tokens

    @property
    def step(self) -> int:
        """The open step; it starts from weights of the same number."""
        return self._w.ledger.version

    @property
    def published(self) -> int:
        """Newest version that cells can load."""
        return self._w.ledger.published

    @property
    def sealed(self) -> bool:
        """Whether the open step gets no further group."""
        return self._w.ledger.sealed

    @property
    def applying(self) -> bool:
        """Whether the optimizer is stepping."""
        return self._w.ledger.applying

    @property
    def undone_batches(self) -> int:
        """Micro-batches of the open step that are not in the gradient sum."""
        return self._w.ledger.undone

    @property
    def building_groups(self) -> int:
        """Groups whose micro-batches are being built."""
        return self._w.ledger.building

    @property
    def held_groups(self) -> int:
        """Groups that ended and wait for a seat in a later step."""
        return len(self._w.ledger.ended)

    def picture(self) -> Picture:
        """A frozen copy of everything, for people; looks at all cells and leases."""
        w, led = self._w, self._w.ledger
        leases = tuple(
            LeaseView(le.id, le.cell.id, le.step, tuple(x.batch.id for x in le.batches), le.since)
            for le in led.leases.values()
        )
        return Picture(
            now=w.now,
            cells=tuple(self.cells()),
            utilisation=w.utilisation(),
            low=w.config.low,
            high=w.config.high,
            step=led.version,
            published=led.published,
            seated=len(led.seated),
            groups_per_step=w.config.groups_per_step,
            sealed=led.sealed,
            ready_tokens=led.ready_tokens,
            leased_tokens=led.leased_tokens,
            done_tokens=led.done_tokens,
            queued_groups=len(w.queue),
            running_executions=sum(e.running for e in w.executions.values()),
            sessions=len(w.sessions),
            calling=w.calling,
            waiting=len(w.waiting),
            moves=len(w.moves),
            switches=w.switches,
            leases=leases,
            costs=w.costs.table(),
        )
