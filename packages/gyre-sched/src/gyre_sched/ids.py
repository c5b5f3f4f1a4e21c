"""Names and states of the scheduler's world.

Plain data only. ``CellId`` is a ``NamedTuple`` so that it compares equal to any other package's cell id of
the same shape; that is how packages meet without importing one another. Holds no behaviour.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

__all__ = ["CellId", "CellState", "EndStatus", "Role", "SessionPhase"]


class CellId(NamedTuple):
    """One life of one cell. ``incarnation`` counts its lives from 0; a restart has a higher one."""

    name: str
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class Role(StrEnum):
    """What a cell does: runs an inference engine, or a training replica."""

    ROLLOUT = "ROLLOUT"
    TRAIN = "TRAIN"

    @property
    def other(self) -> Role:
        """The role a switch would lead to."""
        return Role.TRAIN if self is Role.ROLLOUT else Role.ROLLOUT


class CellState(StrEnum):
    """Where a cell is in its life. The allowed transitions are in ``cells.TRANSITIONS``."""

    JOINING = "JOINING"
    ROLLOUT = "ROLLOUT"
    DRAINING = "DRAINING"
    SWITCHING = "SWITCHING"
    TRAIN = "TRAIN"
    FLUSHING = "FLUSHING"
    LOST = "LOST"


class EndStatus(StrEnum):
    """How an execution ended. ``completed``, ``timeout`` and ``truncated`` train; ``failed`` is retried
    and, like ``stale``, is in no baseline.
    """

    COMPLETED = "completed"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"
    FAILED = "failed"
    STALE = "stale"

    @property
    def trains(self) -> bool:
        """Whether an execution with this status is a member of its group's baseline."""
        return self in (EndStatus.COMPLETED, EndStatus.TIMEOUT, EndStatus.TRUNCATED)


class SessionPhase(StrEnum):
    """What a session is doing: waiting for a cell, in a model call, in a tool pause, or being moved."""

    WAITING = "WAITING"
    CALLING = "CALLING"
    PAUSED = "PAUSED"
    MOVING = "MOVING"
