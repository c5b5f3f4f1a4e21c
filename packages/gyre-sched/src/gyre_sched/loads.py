"""Finds the least loaded rollout cell without looking at all of them.

A heap whose entries are lower bounds: a cell that got emptier is pushed again, a cell that got fuller is noticed and
pushed down only when it comes up. Invariant: every member has an entry whose key is at most its load.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from .records import Cell

__all__ = ["Fleet", "LoadIndex"]


class LoadIndex:
    """Rollout cells ordered by load, ties by order of joining. All operations are amortised O(log cells)."""

    __slots__ = ("_floor", "_heap", "members")

    def __init__(self) -> None:
        self.members: dict[int, Cell] = {}
        self._floor: dict[int, float] = {}
        """Key of each member's one valid entry; other entries of it are leftovers."""
        self._heap: list[tuple[float, int]] = []

    def add(self, cell: Cell) -> None:
        """``cell`` takes sessions from now on."""
        self.members[cell.order] = cell
        self._push(cell.order, cell.load())

    def remove(self, cell: Cell) -> None:
        """``cell`` takes no sessions any more. Its entries go when they come up."""
        self.members.pop(cell.order, None)
        self._floor.pop(cell.order, None)

    def lighter(self, cell: Cell) -> None:
        """The load of ``cell`` went down."""
        floor = self._floor.get(cell.order)
        if floor is not None:
            load = cell.load()
            if load < floor:
                self._push(cell.order, load)

    def _push(self, order: int, load: float) -> None:
        self._floor[order] = load
        heapq.heappush(self._heap, (load, order))
        if len(self._heap) > 4 * len(self.members) + 256:
            self._heap = [(key, o) for o, key in self._floor.items()]
            heapq.heapify(self._heap)

    def least(self, ok: Callable[[Cell], bool] | None = None, tries: int = 16) -> Cell | None:
        """The least loaded member that is ``ok``, looking at no more than ``tries`` that are not."""
        heap, members, floor = self._heap, self.members, self._floor
        skipped: dict[int, float] = {}
        found: Cell | None = None
        while heap and len(skipped) < tries:
            key, order = heap[0]
            if floor.get(order) != key or order in skipped:
                heapq.heappop(heap)  # a leftover, or one that became valid again beside the entry just looked at
                continue
            cell = members[order]
            load = cell.load()
            if load > key:
                floor[order] = load
                heapq.heapreplace(heap, (load, order))
            elif ok is None or ok(cell):
                found = cell
                break
            else:
                skipped[order] = heapq.heappop(heap)[0]
        for order, key in skipped.items():
            heapq.heappush(heap, (key, order))
        return found


class Fleet:
    """All rollout cells that take sessions, one index per weight version. ``free``: those with a slot for one more
    call, so that a cluster that is full answers at once, however many ask.
    """

    __slots__ = ("_by_version", "_overload", "free", "members")

    def __init__(self, overload: float = 1.0) -> None:
        self._overload = overload
        self.members: dict[int, Cell] = {}
        self.free: set[int] = set()
        self._by_version: dict[int, LoadIndex] = {}

    def add(self, cell: Cell) -> None:
        """``cell`` takes sessions from now on."""
        self.members[cell.order] = cell
        self.recount(cell)
        index = self._by_version.get(cell.version)
        if index is None:
            index = self._by_version[cell.version] = LoadIndex()
        index.add(cell)

    def remove(self, cell: Cell) -> None:
        """``cell`` takes no sessions any more."""
        if self.members.pop(cell.order, None) is not None:
            self.free.discard(cell.order)
            index = self._by_version[cell.version]
            index.remove(cell)
            if not index.members:
                del self._by_version[cell.version]

    def recount(self, cell: Cell) -> None:
        """``cell`` got or lost a call."""
        if cell.has_slot(self._overload):
            if cell.order in self.members:
                self.free.add(cell.order)
        else:
            self.free.discard(cell.order)

    def lighter(self, cell: Cell) -> None:
        """The load of ``cell`` went down."""
        index = self._by_version.get(cell.version)
        if index is not None:
            index.lighter(cell)

    def least(self, version: int = -1, ok: Callable[[Cell], bool] | None = None, tries: int = 16) -> Cell | None:
        """The least loaded cell with weights of at least ``version`` that is ``ok``."""
        best: Cell | None = None
        for v, index in self._by_version.items():
            if v >= version:
                cell = index.least(ok, tries)
                if cell is not None and (best is None or (cell.load(), cell.order) < (best.load(), best.order)):
                    best = cell
        return best
