"""The step's ledger: groups with seats, their micro-batches, and who computes what.

Invariants: a micro-batch is ready, on exactly one lease, or done; it is done once; a step that is sealed gets no group;
a step is applied only when sealed and all done. Knows nothing of cells' roles or of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .events import Batch
from .records import Cell, Group, Lease, MicroBatch

__all__ = ["Ledger"]


class Ledger:
    """The open step and the leases on it. Step ``n`` starts from weights of version ``n``."""

    def __init__(self, first_version: int = 0, groups_per_step: int = 1) -> None:
        self.version = first_version
        """Trainer version: the step that is open."""
        self.published = first_version
        self.seated: dict[str, Group] = {}
        """Groups of the open step (building or batched), in order."""
        self.ended: dict[str, Group] = {}
        """Groups that ended and have no seat yet, in order of ending."""
        self.outstanding: dict[str, Group] = {}
        """Admitted groups that have not been seated, in order of admission."""
        self.admitted = first_version * groups_per_step
        """Groups ever admitted that kept (or may still take) a seat."""
        self.batches: dict[str, MicroBatch] = {}
        self.ready: deque[MicroBatch] = deque()
        self.leases: dict[int, Lease] = {}
        self.next_lease = 1
        self.ready_tokens = 0
        self.leased_tokens = 0
        self.done_tokens = 0
        self.undone = 0
        self.building = 0
        """Seated groups whose micro-batches are awaited."""
        self.sealed = False
        self.applying = False

    def add(self, group: Group, batches: Iterable[Batch]) -> int:
        """Enter a group's micro-batches; returns how many."""
        count = 0
        for batch in batches:
            line = MicroBatch(batch, group.id)
            self.batches[batch.id] = line
            self.ready.append(line)
            self.ready_tokens += batch.tokens
            self.undone += 1
            count += 1
        return count

    def grant(self, cell: Cell, limit: int, sharers: int, now: float) -> Lease | None:
        """Lease the next micro-batches to ``cell``: a fair share of half of what is ready, at least one."""
        if not self.ready:
            return None
        budget = self.ready_tokens / (2 * max(1, sharers))
        taken: list[MicroBatch] = []
        tokens = 0
        while self.ready and len(taken) < limit:
            line = self.ready[0]
            if taken and tokens + line.batch.tokens > budget:
                break
            taken.append(self.ready.popleft())
            tokens += line.batch.tokens
        lease = Lease(self.next_lease, cell, self.version, tuple(taken), now)
        self.next_lease += 1
        for line in taken:
            line.lease = lease.id
        self.leases[lease.id] = lease
        self.ready_tokens -= tokens
        self.leased_tokens += tokens
        cell.lease = lease
        return lease

    def close(self, lease: Lease, committed: frozenset[str]) -> int:
        """End a lease: ``committed`` lines are done, the others go back to the front. Returns tokens done."""
        del self.leases[lease.id]
        if lease.cell.lease is lease:
            lease.cell.lease = None
        done = 0
        for line in reversed(lease.batches):
            line.lease = None
            tokens = line.batch.tokens
            self.leased_tokens -= tokens
            if line.batch.id in committed:
                line.done = True
                self.undone -= 1
                self.done_tokens += tokens
                done += tokens
            else:
                self.ready.appendleft(line)
                self.ready_tokens += tokens
        return done

    def defer(self, line: MicroBatch) -> None:
        """A ready line goes behind the others."""
        self.ready.remove(line)
        self.ready.append(line)

    def forget_sum(self) -> int:
        """The core died with the gradient sum: what was done must be done again. Returns how many lines."""
        again = [line for line in self.batches.values() if line.done]
        for line in again:
            line.done = False
            self.ready.append(line)
            self.ready_tokens += line.batch.tokens
            self.done_tokens -= line.batch.tokens
            self.undone += 1
        self.applying = False
        return len(again)

    def advance(self) -> tuple[Group, ...]:
        """The step was applied: open the next one. Returns the groups that trained."""
        trained = tuple(self.seated.values())
        self.version += 1
        self.seated = {}
        self.batches = {}
        self.ready.clear()
        self.ready_tokens = self.leased_tokens = self.done_tokens = self.undone = 0
        self.sealed = self.applying = False
        return trained
