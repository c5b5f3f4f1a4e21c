"""The one thread that writes a store: group commit without delay.

Invariant: a submitted job's future resolves only after the transaction that contains the job is committed. Jobs that
wait while a commit runs share the next one. Jobs run in the order in which they were submitted; one that fails does not
take its neighbours with it. Reads nothing back.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gyre_tito.pack import Packer
from gyre_tito.schema import StoreError, connect_writer

Job = Callable[[sqlite3.Connection, Packer], None]
_MAX_GROUP = 512


def _tell(loop: asyncio.AbstractEventLoop, landed: asyncio.Future[None], done: Future[None]) -> None:
    """In the writer's thread: let the loop know what became of a job. A loop that has ended waits for nothing."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, landed, done)


def _settle(landed: asyncio.Future[None], done: Future[None]) -> None:
    if landed.done():  # whoever waited was cancelled
        return
    error = done.exception()
    if error is None:
        landed.set_result(None)
    else:
        landed.set_exception(error)


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    job: Job
    done: Future[None]


class Writer:
    """Owns the writing connection and its thread."""

    def __init__(self, path: Path, durability: str = "power") -> None:
        self._path = path
        self._db = connect_writer(path, durability)
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gyre-tito-writer", daemon=True)
        self._thread.start()
        self.commits = 0
        self.jobs = 0

    def submit(self, job: Job) -> Future[None]:
        """Queue a job; the future resolves when it is on disk, or fails with `StoreError`."""
        if self._closed:
            raise StoreError(f"writing to {self._path}: the store is closed")
        done: Future[None] = Future()
        self._queue.put(_Pending(job, done))
        return done

    async def write(self, job: Job) -> None:
        """Run a job and return when it is on disk. Cancelling the caller does not take the job back."""
        loop = asyncio.get_running_loop()
        landed: asyncio.Future[None] = loop.create_future()
        self.submit(job).add_done_callback(partial(_tell, loop, landed))
        await landed

    @property
    def backlog(self) -> int:
        """Jobs that wait."""
        return self._queue.qsize()

    def close(self) -> None:
        """Write what is queued, then stop. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._db.close()

    def _run(self) -> None:
        packer = Packer()
        while True:
            first = self._queue.get()
            if first is None:
                return
            group = [first]
            last = False
            while len(group) < _MAX_GROUP:
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
                if item is None:
                    last = True
                    break
                group.append(item)
            self._commit(group, packer)
            if last:
                return

    def _commit(self, group: list[_Pending], packer: Packer) -> None:
        """One transaction for the group; if it fails, one for each job, so that only the guilty one fails."""
        group = [item for item in group if item.done.set_running_or_notify_cancel()]
        error = self._transaction(group, packer)
        for item in group:
            failed = self._transaction([item], packer) if error is not None and len(group) > 1 else error
            if failed is None:
                item.done.set_result(None)
            else:
                item.done.set_exception(StoreError(f"writing to {self._path}: {failed}"))

    def _transaction(self, group: list[_Pending], packer: Packer) -> Exception | None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for item in group:
                item.job(self._db, packer)
            self._db.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - the boundary: the failure goes to the job's future
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            return error
        self.commits += 1
        self.jobs += len(group)
        return None
