"""The order in which tasks are drawn: the same for the same seed, and every task once before any comes again.

Invariant: group number i has the same task in every life of a run. Pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from gyre_core import ConfigError, Task


@dataclass(frozen=True, slots=True)
class TaskStream:
    """An endless sequence of groups over a finite set of tasks."""

    tasks: Sequence[Task]
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("drawing tasks", got="a split without tasks", expected="at least one task")

    def task(self, index: int) -> Task:
        """The task of group number `index` (from 0)."""
        epoch, place = divmod(index, len(self.tasks))
        if not self.shuffle:
            return self.tasks[place]
        order = list(range(len(self.tasks)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return self.tasks[order[place]]


def group_name(index: int) -> str:
    """Name of group number `index`."""
    return f"g{index:06d}"


def group_index(name: str) -> int:
    """Number of the group `name`."""
    return int(name[1:])
