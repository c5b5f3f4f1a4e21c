"""The trajectory store: executions, sessions and calls in one SQLite file (WAL).

Invariants: one writer, any number of readers in any process, and neither blocks the other. A call that `add_call` has
returned for is on disk. Arrays come back bit for bit. The store keeps calls; trees are built from them on demand.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from gyre_tito import schema
from gyre_tito.pack import Packer
from gyre_tito.records import CallRecord, ExecutionInfo, ExecutionSpec, Score, SessionInfo, Status
from gyre_tito.schema import StoreError
from gyre_tito.tree import TrajectoryTree
from gyre_tito.writer import Writer


def key_hash(api_key: str) -> bytes:
    """What the store keeps of an API key."""
    return hashlib.sha256(api_key.encode()).digest()


class Store:
    """A store that is open. Readers: `Store.open(path)`. The proxy: `Store.open(path, writable=True)`."""

    def __init__(self, path: Path, reader: sqlite3.Connection, writer: Writer | None) -> None:
        self.path = path
        self._reader = reader
        self._writer = writer
        self._lock = threading.Lock()
        self._packer = Packer()

    @classmethod
    def open(cls, path: str | Path, *, writable: bool = False, durability: str = "power") -> Store:
        """Open `path`; with `writable` create it if need be.

        `durability`: `power` syncs every group commit to the disk, `process` leaves that to the system (a killed
        process loses nothing, a power cut may). Errors: `StoreError`.
        """
        where = Path(path)
        writer = Writer(where, durability) if writable else None
        return cls(where, schema.connect_reader(where), writer)

    def close(self) -> None:
        """Write what is queued and close. The last writer to leave folds the log into the file."""
        self._reader.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def writable(self) -> bool:
        """Whether this store was opened for writing."""
        return self._writer is not None

    @property
    def writer(self) -> Writer:
        """The writer. Error: the store was opened for reading."""
        if self._writer is None:
            raise StoreError(f"writing to {self.path}: it was opened for reading; pass writable=True")
        return self._writer

    # -- writing -------------------------------------------------------------------------------------------------

    async def add_execution(self, spec: ExecutionSpec, api_key: str | None = None) -> None:
        """Record a new execution. Error: one of that name exists."""
        row = (
            spec.execution,
            spec.task,
            spec.group,
            spec.step,
            spec.purpose,
            schema.dumps(dict(spec.metadata)),
            str(Status.OPEN),
            time.time(),
            key_hash(api_key) if api_key else None,
            None if spec.prescribed is None else schema.dumps(spec.prescribed),
        )

        def job(db: sqlite3.Connection, _: Packer) -> None:
            db.execute(
                "INSERT INTO executions (execution, task, grp, step, purpose, metadata, status, opened_at, key_hash, "
                "prescribed) VALUES (?,?,?,?,?,?,?,?,?,?)",
                row,
            )

        await self.writer.write(job)

    async def set_key(self, execution: str, api_key: str) -> None:
        """Replace the key of an execution."""
        row = (key_hash(api_key), execution)

        def job(db: sqlite3.Connection, _: Packer) -> None:
            db.execute("UPDATE executions SET key_hash=? WHERE execution=?", row)

        await self.writer.write(job)

    async def add_session(self, execution: str, session: SessionInfo) -> None:
        """Record a session, or its corrected label."""
        row = (execution, session.session, session.kind, session.parent, int(session.inferred))

        def job(db: sqlite3.Connection, _: Packer) -> None:
            db.execute("INSERT OR REPLACE INTO sessions VALUES (?,?,?,?,?)", row)

        await self.writer.write(job)

    async def add_call(
        self, execution: str, call: CallRecord, match: bytes = b"", session: SessionInfo | None = None
    ) -> None:
        """Record a call (and its session, when that is new). Returns when both are on disk."""

        def job(db: sqlite3.Connection, packer: Packer) -> None:
            if session is not None:
                db.execute(
                    "INSERT OR IGNORE INTO sessions VALUES (?,?,?,?,?)",
                    (execution, session.session, session.kind, session.parent, int(session.inferred)),
                )
            marks = ",".join("?" * (schema.CALL_COLUMNS.count(",") + 1))
            db.execute(
                f"INSERT INTO calls ({schema.CALL_COLUMNS}) VALUES ({marks})",
                schema.call_to_row(execution, call, match, packer),
            )

        await self.writer.write(job)

    async def close_execution(
        self,
        execution: str,
        status: Status,
        score: Score | None = None,
        cause: str = "",
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Record how an execution ended. Closing again overwrites the verdict (a late score, a reclassification).

        `metadata` is added to what the execution was opened with, by key.
        """
        more = schema.dumps(dict(metadata or {}))
        milestones = None if score is None else schema.dumps(dict(score.milestones))
        value = None if score is None else score.value

        def job(db: sqlite3.Connection, _: Packer) -> None:
            done = db.execute(
                "UPDATE executions SET status=?, score=?, milestones=?, cause=?, closed_at=?, "
                "metadata=json_patch(metadata, ?) WHERE execution=?",
                (str(status), value, milestones, cause, time.time(), more, execution),
            )
            if done.rowcount == 0:
                raise StoreError(f"closing execution {execution!r}: there is no such execution")

        await self.writer.write(job)

    # -- reading -------------------------------------------------------------------------------------------------

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._reader.execute(query, values).fetchall()
            except sqlite3.Error as error:
                raise StoreError(f"reading {self.path}: {error}") from error

    def executions(
        self,
        *,
        step: int | None = None,
        group: str | None = None,
        status: Status | None = None,
        execution: str | None = None,
    ) -> list[ExecutionInfo]:
        """Executions with status, score and counts, in the order in which they were opened."""
        wanted = {"e.step": step, "e.grp": group, "e.status": status, "e.execution": execution}
        chosen = {column: value for column, value in wanted.items() if value is not None}
        where = " AND ".join(f"{column}=?" for column in chosen) or "1"
        rows = self._rows(
            f"SELECT {schema.EXECUTION_COLUMNS}, COUNT(c.idx), COALESCE(SUM(c.n_context),0), "
            "COALESCE(SUM(c.n_sampled),0) FROM executions e LEFT JOIN calls c ON c.execution=e.execution "
            f"WHERE {where} GROUP BY e.execution ORDER BY e.opened_at, e.execution",
            tuple(str(value) if isinstance(value, Status) else value for value in chosen.values()),
        )
        return [schema.row_to_execution(row) for row in rows]

    def execution(self, execution: str) -> ExecutionInfo:
        """One execution. Error: no such one."""
        found = self.executions(execution=execution)
        if not found:
            raise StoreError(f"reading {self.path}: there is no execution {execution!r}")
        return found[0]

    def execution_of_key(self, api_key: str) -> ExecutionInfo | None:
        """The execution that an API key belongs to, if any."""
        rows = self._rows("SELECT execution FROM executions WHERE key_hash=?", (key_hash(api_key),))
        return self.execution(rows[0][0]) if rows else None

    def sessions(self, execution: str) -> list[SessionInfo]:
        """The sessions of an execution."""
        rows = self._rows(
            "SELECT session, kind, parent, inferred FROM sessions WHERE execution=? ORDER BY session", (execution,)
        )
        return [schema.row_to_session(row) for row in rows]

    def calls(self, execution: str) -> list[CallRecord]:
        """The calls of an execution in the order in which they reached the disk, so that parents come first."""
        return [call for call, _ in self.calls_with_match(execution)]

    def calls_with_match(self, execution: str, only: Sequence[int] | None = None) -> list[tuple[CallRecord, bytes]]:
        """Calls with the proxy's own note about which request each one answered. `only`: these, in this order."""
        chosen = "" if only is None else f" AND idx IN ({','.join('?' * len(only))})"
        rows = self._rows(
            f"SELECT {schema.CALL_COLUMNS} FROM calls WHERE execution=?{chosen} ORDER BY rowid",
            (execution, *(only or ())),
        )
        with self._lock:
            found = [(schema.row_to_call(row, self._packer), row[22] or b"") for row in rows]
        if only is None:
            return found
        by_index = {call.index: (call, note) for call, note in found}
        if len(by_index) != len(set(only)):
            raise StoreError(f"reading {self.path}: not all of calls {list(only)} of {execution!r} are there")
        return [by_index[index] for index in only]

    def load_tree(self, execution: str) -> TrajectoryTree:
        """The trajectory tree of an execution. Error: no such execution."""
        self.execution(execution)
        return TrajectoryTree.from_records(self.calls(execution))
