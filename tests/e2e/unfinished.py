"""A trainer of these tests' own, whose satellites compute and never finish: what they hold is certainly open.

Invariant: the core is the embedded trainer as it is.
"""

from __future__ import annotations

import asyncio

from gyre_core import BatchStats, MicroBatch, WeightSource
from gyre_local.train.trainer import LocalTrainer


class Unfinished(LocalTrainer):
    """The embedded trainer, which as a satellite keeps its first micro-batch for ever."""

    _satellite = False

    async def start(self, source: WeightSource, *, core: bool) -> None:
        """As it is."""
        self._satellite = not core
        await super().start(source, core=core)

    async def accumulate(self, batch: MicroBatch) -> BatchStats:
        """Compute; on a satellite nobody hears of it."""
        stats = await super().accumulate(batch)
        if self._satellite:
            await asyncio.Event().wait()
        return stats
