"""The work of a TRAIN cell: leases, one after the other, each committed once or not at all.

Invariant: a lease ends in exactly one `LeaseDone`. A recalled lease commits the batches that are done; a failure
discards the open sum, so that nothing of a failed lease can be counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from gyre_core import CellId, GyreError, Trainer

from gyre_rl.cell.messages import Lease, LeaseDone
from gyre_rl.cell.snapshots import Snapshots
from gyre_rl.procs.link import Link

log = logging.getLogger("gyre.cell")


SLOWEST_S = 5.0
"""Longest wait before a failed lease is given back, when those before it have failed too."""


class LeaseWorker:
    """Computes leases in the order they come."""

    def __init__(self, trainer: Trainer, cell: CellId, snapshots: Snapshots) -> None:
        self._trainer, self._cell, self._snapshots = trainer, cell, snapshots
        self._queue: asyncio.Queue[Lease] = asyncio.Queue()
        self._recalled: set[int] = set()
        self._torn = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._task: asyncio.Task[None] | None = None

    def open(self, link: Link) -> None:
        """Start working; results go out by `link`."""
        self._task = asyncio.create_task(self._work(link))

    def take(self, lease: Lease) -> None:
        """Add a lease to the queue."""
        self._idle.clear()
        self._queue.put_nowait(lease)

    def recall(self, lease: int) -> None:
        """Stop that lease after the batch that is being computed."""
        self._recalled.add(lease)

    async def flush(self) -> None:
        """Wait until every lease has ended."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop; what is not committed is not counted."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self, link: Link) -> None:
        failures = 0  # in a row: a cell that cannot work must not spin through everybody's micro-batches
        while True:
            lease = await self._queue.get()
            began = time.perf_counter()
            try:
                done = await self._compute(lease)
                failures = 0
            except Exception as error:  # boundary: a failed lease returns to the ledger; the cell lives on
                log.exception("lease %d failed", lease.lease)
                await self._clear(lease.lease)
                await asyncio.sleep(min(SLOWEST_S, failures * 0.5))
                failures += 1
                done = LeaseDone(lease.lease, None, f"{type(error).__name__}: {error}")
            self._recalled.discard(lease.lease)
            try:
                await link.send("lease_done", replace(done, seconds=time.perf_counter() - began))
            except GyreError as error:
                log.warning("the run is gone: %s", error)
                return
            if self._queue.empty():
                self._idle.set()

    async def _clear(self, lease: int) -> None:
        """Discard what a failed lease has summed up; if that fails too, the next lease has to do it first."""
        self._torn = True
        try:
            await self._trainer.discard_contribution()
            self._torn = False
        except Exception:  # boundary: the lease must be told as failed, whatever state the trainer is in
            log.exception("discarding what lease %d has summed up failed", lease)

    async def _compute(self, lease: Lease) -> LeaseDone:
        if self._torn:  # a gradient of the failed lease would go in with this one's
            await self._trainer.discard_contribution()
            self._torn = False
        if self._trainer.version != lease.source.version:
            await self._trainer.load_weights(await self._snapshots.near(lease.source))
        computed = 0
        for batch in lease.batches:
            if lease.lease in self._recalled:
                break
            await self._trainer.accumulate(batch)
            computed += 1
        if not computed:
            return LeaseDone(lease.lease, None, "recalled before a batch was done")
        name = f"{lease.step:06d}.{lease.lease:06d}.{self._cell.name}"
        contribution = await self._trainer.export_contribution(name, lease.step, lease.folder)
        return LeaseDone(lease.lease, contribution)
