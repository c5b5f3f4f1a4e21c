"""What the asynchronous runner needs from whoever owns the cells.

``CellDriver`` is the whole contract between the scheduler and a stack of cells. Every method may take as
long as it needs, may be cancelled, and says that it failed by raising; the runner turns the outcome into an
event. Work whose result arrives later (a lease, a built group, a step) is *started* here and reported with
``SchedulerRunner.post``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .ids import CellId, Role

__all__ = ["CellDriver", "MoveRefused", "MoveReport"]


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What a move did: KV ``carried`` or not, its ``bytes`` and ``tokens``, and how long it took."""

    carried: bool
    bytes: int = 0
    tokens: int = 0
    seconds: float = 0.0


class MoveRefused(Exception):  # noqa: N818 - an answer, not a fault
    """The destination has no room for the KV; the session prefills again instead."""


@runtime_checkable
class CellDriver(Protocol):
    """Carries out commands on real cells."""

    async def drain(self, cell: CellId) -> None:
        """Stop the intake of new calls; running ones go on."""

    async def undrain(self, cell: CellId) -> None:
        """Take calls again after a drain that was given up."""

    async def switch(self, cell: CellId, role: Role) -> float:
        """Change an empty cell to ``role``; return the seconds it took. Also called to undo a failed
        change.
        """

    async def move_session(
        self, session: str, src: CellId, dst: CellId, *, carry_kv: bool, interrupt: bool
    ) -> MoveReport:
        """Bring a session to ``dst``; ``interrupt``: stop its running call at a token border first."""

    async def sync_weights(self, cell: CellId, version: int) -> float:
        """Load ``version`` on the cell; return the seconds it took."""

    async def admit(self, group: str, version: int) -> None:
        """Start the executions of an admitted group. ``SchedulerRunner.admit`` waiters are woken as well."""

    async def retry(self, execution: str, group: str, attempt: int) -> None:
        """Start a failed execution again."""

    async def cut(self, execution: str, reason: str) -> None:
        """End an execution and score what it reached; post ``ExecutionEnded(status=timeout)``."""

    async def build_group(self, group: str, step: int, executions: tuple[str, ...], left_out: tuple[str, ...]) -> None:
        """Compute advantages and micro-batches over ``executions``; post ``GroupBatched``."""

    async def drop_group(self, group: str, reason: str) -> None:
        """Forget a group of which too little is left."""

    async def evaluated(self, group: str, executions: tuple[str, ...]) -> None:
        """Every execution of an evaluation group has ended for good."""

    async def lease(self, cell: CellId, lease: int, step: int, batches: tuple[str, ...]) -> None:
        """Start computing; post ``ContributionCommitted`` or ``LeaseFailed`` when it ends."""

    async def recall_lease(self, cell: CellId, lease: int) -> None:
        """Make the cell commit what it has (or fail the lease if it has nothing) and stop."""

    async def seal(self, step: int, groups: tuple[str, ...]) -> None:
        """The groups of ``step`` are fixed: the number of tasks is known."""

    async def apply_step(self, step: int, groups: tuple[str, ...]) -> None:
        """Step the optimizer; post ``StepApplied`` and then ``WeightsPublished``."""

    async def alarm(self, subject: str, reason: str) -> None:
        """Tell a person: something fails again and again and cannot be mended from here."""
