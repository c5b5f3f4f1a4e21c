"""Where a cell finds a version's weights: on its machine, else with the core, whose machine has it.

Invariants: `near` gives folders that this machine can open, fetched whole and compared with their digests; of a
machine's cells one fetches a version and the others find it. What is fetched lies in shared memory and goes with the
last cell that used it. Not here: how engines and trainers read a folder. The run's directory is the same on all its
machines.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gyre_core import InfrastructureError, WeightSource
from gyre_weights import WeightsError, open_version
from gyre_weights.handover import Endpoint, Holder, nearest
from gyre_weights.shm import join, part, shm_root, sweep

from gyre_rl.procs.address import is_loopback
from gyre_rl.procs.child import ChildSpec

ENDPOINT = "snapshots.json"
PART_S = 2.0
KEEP = 3
"""Versions that stay on a machine: as many as a trainer keeps, so that a cell may lag behind."""


class Snapshots:
    """One cell's way to weights. `idle_s`: longest silence of the other side; `total_s`: longest fetch."""

    def __init__(self, spec: ChildSpec, *, idle_s: float = 60.0, total_s: float = 3600.0) -> None:
        self._run, self._address = Path(spec.run_dir), spec.address
        self._idle, self._total = idle_s, total_s
        self._holder: Holder | None = None
        self._endpoint: Endpoint | None = None
        self._into: Path | None = None
        self._share = -1
        self._one = threading.Lock()
        self._closed = False

    def offer(self, folder: str) -> None:
        """Core: give the versions under `folder` to other machines. Nothing is opened where there are none."""
        if is_loopback(self._address) or self._holder is not None:
            return
        self._holder = Holder(folder, host=self._address, idle_s=self._idle, total_s=self._total)
        self._endpoint = self._holder.start()
        self._endpoint.save(self._run / ENDPOINT)

    async def near(self, source: WeightSource) -> WeightSource:
        """`source` as this machine can open it. InfrastructureError when nobody has it, or the fetch fails. In a run of
        one machine it is what it was: whoever opens it tells what is wrong with it. A folder without a digest counts as
        common to all machines."""
        if is_loopback(self._address) or (not source.digest and Path(source.location).is_dir()):
            return source
        return await asyncio.to_thread(self._look, source)

    def _look(self, source: WeightSource) -> WeightSource:
        try:
            with suppress(WeightsError):
                open_version(source.location, version=source.version, digest=source.digest or None)
                return source
            with self._one:
                found = nearest(
                    source.location, source.version, self._run / ENDPOINT, self._place(),
                    digest=source.digest or None, keep=KEEP, idle_s=self._idle, total_s=self._total,
                )  # fmt: skip
        except (WeightsError, OSError) as error:
            raise InfrastructureError(
                f"finding policy version {source.version} for a cell at {self._address}", got=str(error),
                expected=f"{source.location} on this machine, or a core that gives it",
                fix=getattr(error, "fix", "") or "Is the core up, and does this machine reach it?",
            ) from error  # fmt: skip
        return replace(source, location=str(found.folder), kind="delta" if found.is_delta else "shm")

    def _place(self) -> Path:
        """Where this machine's fetched versions lie, from now on with this cell as one of its users."""
        if self._closed:
            raise InfrastructureError("fetching weights", got="a cell that is closing", expected="one that works")
        if self._into is None:
            sweep()
            self._into = shm_root(self._run)
            self._share = join(self._into)
        return self._into

    def _part(self) -> None:
        if self._one.acquire(timeout=PART_S):  # else a fetch is under way, and the kernel parts when this process ends
            if self._into is not None:
                part(self._into, self._share)
                self._into = None
            self._one.release()

    async def close(self) -> None:
        """Give nothing any more, and leave nothing in this machine's memory that no other cell uses."""
        self._closed = True
        if self._holder is not None:
            await asyncio.to_thread(self._holder.close)
            with suppress(WeightsError):
                if Endpoint.load(self._run / ENDPOINT) == self._endpoint:  # another core may have taken the place
                    (self._run / ENDPOINT).unlink(missing_ok=True)
        await asyncio.to_thread(self._part)
