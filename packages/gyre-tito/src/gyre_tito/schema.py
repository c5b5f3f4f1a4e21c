"""The store's tables and their version, and how records become rows.

Invariant: a file says which schema it has (`meta.schema_version`); a file of another version is refused, never guessed
at. Connection set-up lives here so that readers and the writer agree on it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gyre_tito.pack import Packer
from gyre_tito.records import CallRecord, ExecutionInfo, Link, Prescribed, Score, SessionInfo, Status

SCHEMA_VERSION = 2
_CACHE_KB = 512  # calls are written once and read in order: a larger page cache holds nothing that is used again

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE executions (
    execution TEXT PRIMARY KEY, task TEXT NOT NULL, grp TEXT NOT NULL, step INTEGER NOT NULL, purpose TEXT NOT NULL,
    metadata TEXT NOT NULL, status TEXT NOT NULL, score REAL, milestones TEXT, cause TEXT NOT NULL DEFAULT '',
    opened_at REAL NOT NULL, closed_at REAL, key_hash BLOB UNIQUE, prescribed TEXT
) WITHOUT ROWID;
CREATE INDEX executions_by_step ON executions (step, grp);
CREATE TABLE sessions (
    execution TEXT NOT NULL, session TEXT NOT NULL, kind TEXT NOT NULL, parent TEXT, inferred INTEGER NOT NULL,
    PRIMARY KEY (execution, session)
) WITHOUT ROWID;
CREATE TABLE calls (
    execution TEXT NOT NULL, idx INTEGER NOT NULL, session TEXT NOT NULL, parent INTEGER NOT NULL,
    prefix_len INTEGER NOT NULL, n_context INTEGER NOT NULL, n_sampled INTEGER NOT NULL,
    context BLOB NOT NULL, sampled BLOB NOT NULL, logprobs BLOB NOT NULL, versions BLOB NOT NULL,
    routed BLOB, routed_from INTEGER, routed_layers INTEGER, routed_k INTEGER,
    finish TEXT NOT NULL, link TEXT NOT NULL, cached INTEGER, started_at REAL NOT NULL, ended_at REAL NOT NULL,
    sampling TEXT NOT NULL, meta TEXT NOT NULL, match BLOB
);
CREATE UNIQUE INDEX calls_by_execution ON calls (execution, idx);
CREATE INDEX calls_sizes ON calls (execution, idx, n_context, n_sampled);
"""

CALL_COLUMNS = (
    "execution, idx, session, parent, prefix_len, n_context, n_sampled, context, sampled, logprobs, versions, routed, "
    "routed_from, routed_layers, routed_k, finish, link, cached, started_at, ended_at, sampling, meta, match"
)
EXECUTION_COLUMNS = (
    "e.execution, e.task, e.grp, e.step, e.purpose, e.metadata, e.status, e.score, e.milestones, e.cause, "
    "e.opened_at, e.closed_at, e.prescribed"
)


class StoreError(RuntimeError):
    """The store could not be opened, read or written; the message says which file and what to do."""


def connect_writer(path: Path, durability: str) -> sqlite3.Connection:
    """Open (or create) a store for writing. `durability`: `power` (survives power loss) or `process` (kill -9)."""
    if durability not in ("power", "process"):
        raise ValueError(f"opening {path}: durability must be 'power' or 'process', got {durability!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={'FULL' if durability == 'power' else 'NORMAL'}")
        db.execute("PRAGMA busy_timeout=30000")
        db.execute(f"PRAGMA cache_size=-{_CACHE_KB}")
        db.execute("BEGIN IMMEDIATE")
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone():
            for statement in TABLES.split(";\n"):
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (str(SCHEMA_VERSION),))
        db.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"opening the trajectory store {path} for writing: {error}") from error
    check_version(db, path)
    return db


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a store for reading only. A writer may be at work; neither blocks the other."""
    if not path.is_file():
        raise StoreError(f"opening the trajectory store {path}: there is no such file")
    try:
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False, timeout=30
        )
        db.execute("PRAGMA busy_timeout=30000")
        db.execute(f"PRAGMA cache_size=-{_CACHE_KB}")
        check_version(db, path)
    except sqlite3.Error as error:
        raise StoreError(f"opening the trajectory store {path}: {error}; is it a gyre-tito store?") from error
    return db


def check_version(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file of another schema version."""
    try:
        row = db.execute("SELECT value FROM meta WHERE key='schema_version'").fetchone()
    except sqlite3.Error as error:
        raise StoreError(f"opening {path}: not a trajectory store ({error})") from error
    if row is None or row[0] != str(SCHEMA_VERSION):
        found = row[0] if row else "none"
        raise StoreError(
            f"opening {path}: it has schema version {found}, this gyre-tito reads version {SCHEMA_VERSION}; "
            "use the gyre-tito that wrote it, or export and import it"
        )


def call_to_row(execution: str, call: CallRecord, match: bytes, packer: Packer) -> tuple[Any, ...]:
    """A call as a row for `CALL_COLUMNS`."""
    routed = call.routed_experts
    shape = routed.shape if routed is not None else (0, None, None)
    return (
        execution,
        call.index,
        call.session,
        call.parent,
        call.prefix_len,
        len(call.context_ids),
        len(call.sampled_ids),
        packer.planes(call.context_ids),
        packer.planes(call.sampled_ids),
        packer.planes(call.logprobs),
        packer.runs(call.versions),
        packer.planes(routed) if routed is not None else None,
        call.routed_from,
        shape[1],
        shape[2],
        call.finish,
        str(call.link),
        call.cached_tokens,
        call.started_at,
        call.ended_at,
        dumps(call.sampling),
        dumps(call.meta),
        match,
    )


def row_to_call(row: tuple[Any, ...], packer: Packer) -> CallRecord:
    """The call that `call_to_row` wrote."""
    routed = None
    if row[11] is not None:
        routed = packer.unpack(row[11], np.int16).reshape(-1, row[13], row[14])
    return CallRecord(
        index=row[1],
        session=row[2],
        parent=row[3],
        prefix_len=row[4],
        context_ids=packer.unpack(row[7], np.int32),
        sampled_ids=packer.unpack(row[8], np.int32),
        logprobs=packer.unpack(row[9], np.float32),
        versions=packer.unpack(row[10], np.int32),
        routed_experts=routed,
        routed_from=row[12] or 0,
        finish=row[15],
        link=Link(row[16]),
        cached_tokens=row[17],
        started_at=row[18],
        ended_at=row[19],
        sampling=loads(row[20]),
        meta=loads(row[21]),
    )


def row_to_execution(row: tuple[Any, ...]) -> ExecutionInfo:
    """An execution from `EXECUTION_COLUMNS` followed by calls, context tokens, sampled tokens."""
    score = None if row[7] is None else Score(row[7], loads(row[8] or "{}"))
    return ExecutionInfo(
        execution=row[0],
        task=row[1],
        group=row[2],
        step=row[3],
        purpose=row[4],
        metadata=loads(row[5]),
        status=Status(row[6]),
        score=score,
        cause=row[9],
        opened_at=row[10],
        closed_at=row[11],
        prescribed=None if row[12] is None else Prescribed(**loads(row[12])),
        calls=row[13],
        context_tokens=row[14],
        sampled_tokens=row[15],
    )


def row_to_session(row: tuple[Any, ...]) -> SessionInfo:
    """A session from (session, kind, parent, inferred)."""
    return SessionInfo(row[0], row[1], row[2], bool(row[3]))


def dumps(value: Any) -> str:
    """JSON text."""
    return msgspec.json.encode(value).decode()


def loads(text: str) -> Any:
    """Parsed JSON."""
    return msgspec.json.decode(text)
