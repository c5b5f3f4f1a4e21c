"""Digests of full blocks, made when a block fills, while its bytes are still in the processor's cache.

A mover that compares digests then reads no full block when a session moves. Invariant: a digest that is known is that
of the bytes its block holds now: it dies when the block is given to somebody else or cleared, and all die when the
weights change. How a digest is made is the mover's business (`gyre_core.kv.DigestBlocks`). Runs between two passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from gyre_core import DigestBlocks, MemoryRegion

CATCH_UP = 8
"""Blocks a pass that fills none may sum besides: those that came in by a move, or from before digests were wanted."""


class BlockDigests:
    """uint64 of each block of a pool, where it is known."""

    def __init__(self, make: DigestBlocks, regions: Sequence[MemoryRegion], blocks: int) -> None:
        self._make, self._regions = make, regions
        self._value = np.zeros(blocks, np.uint64)
        self._known = np.zeros(blocks, np.bool_)

    def fill(self, blocks: Sequence[int], new: int) -> None:
        """`blocks` are a context's full blocks in order, `new` of them filled just now: sum these, and a few of the
        others that are not known yet."""
        ids = np.asarray(blocks, np.int32)
        missing = ids[~self._known[ids]][: new + CATCH_UP]
        if len(missing):
            self._value[missing] = np.asarray(self._make(self._regions, missing), np.uint64)
            self._known[missing] = True

    def of(self, blocks: Sequence[int]) -> npt.NDArray[np.uint64]:
        """uint64 [k]: of the first k of these blocks, up to the first that is not known."""
        ids = np.asarray(blocks, np.int32)
        unknown = np.flatnonzero(~self._known[ids])
        held: npt.NDArray[np.uint64] = self._value[ids[: unknown[0]] if len(unknown) else ids]
        return held

    def drop(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is about to change."""
        self._known[list(blocks)] = False

    def drop_all(self) -> None:
        """Nothing is known any more."""
        self._known[:] = False
