"""Which groups are offered to the scheduler, and when to offer another one.

Invariant: over the whole run exactly `steps * tasks_per_step` groups train, in the order of the task stream; a group
that leaves without training is replaced by the next task. Pure bookkeeping; the scheduler paces.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Feed:
    """Counts seats. `ahead`: groups that may be offered beyond those that trained."""

    seats: int
    """Groups that still have to train."""
    ahead: int
    next_index: int = 0
    open: set[str] = field(default_factory=set)
    """Groups that were offered and have neither trained nor left."""

    def due(self) -> int:
        """How many groups to offer now."""
        return max(0, min(self.ahead, self.seats) - len(self.open))

    def take(self, name: str) -> None:
        """A group was offered."""
        self.open.add(name)
        self.next_index += 1

    def left(self, name: str) -> None:
        """A group left without training."""
        self.open.discard(name)

    def trained(self, names: tuple[str, ...]) -> None:
        """A step was applied over these groups."""
        self.open.difference_update(names)
        self.seats -= len(names)
