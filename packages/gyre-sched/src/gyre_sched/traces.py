"""Traces of other people's serving, and the event log of an own run, as workloads.

Formats, told by their fields: Mooncake JSONL (``timestamp`` ms, ``input_length``, ``output_length``, ``hash_ids`` of
512-token blocks), Azure CSV (``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``), JSONL of this package
(``{"turns": [[fed, sampled, pause_s], ...], "train_tokens": n}``), the same columns as Parquet (needs pyarrow), and the
event log of a run. Absolute timestamps become think time between the turns of a session: replaying them as they are
would overstate tails.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from .errors import LogError
from .events import CallEnded, CallRequested, Event, ExecutionEnded, SessionStarted
from .log import read_log
from .sim.workload import ExecutionPlan, TraceWorkload, Turn

__all__ = ["from_events", "load_trace", "read_plans"]

BLOCK = 512


def load_trace(
    path: str | Path, *, steps: int = 8, groups_per_step: int = 8, group_size: int = 8, max_staleness: int = 1
) -> TraceWorkload:
    """A workload of the executions in the file at ``path``."""
    plans = tuple(read_plans(Path(path)))
    if not plans:
        raise LogError(f"{path} holds no executions")
    return TraceWorkload(plans, steps, groups_per_step, group_size, max_staleness)


def read_plans(path: Path) -> list[ExecutionPlan]:
    """The executions in a file of any of the formats."""
    suffix = path.suffix.lower()
    if suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return _azure(csv.DictReader(file), path)
    if suffix == ".parquet":
        return _records(_parquet(path), path)
    with path.open(encoding="utf-8") as file:
        first = file.readline()
    if '"gyre-sched-log' in first:
        return from_events(read_log(path))
    return _records(_jsonl(path), path)


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except ValueError as err:
                    raise LogError(f"{path}, line {number} is not JSON: {line[:80]!r}") from err


def _parquet(path: Path) -> Iterable[dict[str, Any]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as err:
        raise LogError(f"reading {path} needs pyarrow: pip install 'gyre-sched[parquet]'") from err
    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def _records(records: Iterable[dict[str, Any]], path: Path) -> list[ExecutionPlan]:
    rows = list(records)
    if not rows:
        return []
    fields = set(rows[0])
    if "turns" in fields:
        return [_own(row, path, i) for i, row in enumerate(rows, 1)]
    if {"timestamp", "input_length", "output_length"} <= fields:
        return _mooncake(rows)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= fields:
        return _azure(rows, path)
    raise LogError(
        f"{path} has the fields {sorted(fields)}; expected `turns`, or Mooncake's timestamp, input_length and "
        "output_length, or Azure's TIMESTAMP, ContextTokens and GeneratedTokens"
    )


def _own(row: dict[str, Any], path: Path, number: int) -> ExecutionPlan:
    try:
        turns = tuple(Turn(int(f), max(1, int(s)), float(p)) for f, s, p in row["turns"])
        total = sum(t.fed + t.sampled for t in turns)
        return ExecutionPlan(turns, int(row.get("train_tokens") or total))
    except (TypeError, ValueError) as err:
        raise LogError(f"{path}, record {number}: turns must be [fed, sampled, pause_s] triples: {err}") from err


def _plan(turns: list[Turn]) -> ExecutionPlan:
    return ExecutionPlan(tuple(turns), sum(t.fed + t.sampled for t in turns))


def _mooncake(rows: list[dict[str, Any]]) -> list[ExecutionPlan]:
    """Requests whose blocks start with all full blocks of an earlier one are later turns of its session."""
    sessions: list[list[Turn]] = []
    tails: dict[int, tuple[int, int, float]] = {}
    for row in rows:
        at = float(row["timestamp"]) / 1000.0
        length, output = int(row["input_length"]), max(1, int(row["output_length"]))
        blocks = list(row.get("hash_ids") or ())
        found = next((b for b in reversed(blocks) if b in tails), None)
        if found is None:
            number, context = len(sessions), 0
            sessions.append([])
        else:
            number, context, before = tails.pop(found)
            last = sessions[number][-1]
            sessions[number][-1] = Turn(last.fed, last.sampled, max(0.0, at - before))
        sessions[number].append(Turn(max(0, length - context), output, 0.0))
        full = length // BLOCK
        if blocks and full:
            tails[blocks[min(full, len(blocks)) - 1]] = (number, length + output, at)
    return [_plan(turns) for turns in sessions]


def _azure(rows: Iterable[dict[str, Any]], path: Path) -> list[ExecutionPlan]:
    """Every request is an execution of one turn; Azure's traces name no sessions."""
    plans = []
    for number, row in enumerate(rows, 2):
        try:
            datetime.fromisoformat(str(row["TIMESTAMP"])[:26])
            fed, sampled = int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))
        except (KeyError, ValueError) as err:
            raise LogError(f"{path}, line {number} is no Azure trace line: {row}") from err
        plans.append(_plan([Turn(fed, sampled, 0.0)]))
    return plans


def from_events(events: Iterable[Event]) -> list[ExecutionPlan]:
    """Executions as an own run saw them. Sessions of one execution are played one after another."""
    owner: dict[str, str] = {}
    turns: dict[str, list[Turn]] = {}
    context: dict[str, int] = {}
    asked: dict[str, tuple[int, float]] = {}
    ended: dict[str, float] = {}
    over: dict[str, None] = {}
    for event in events:
        if isinstance(event, SessionStarted):
            owner[event.session] = event.execution
        elif isinstance(event, CallRequested):
            line = turns.setdefault(owner[event.session], [])
            if event.session in ended and line:
                last = line[-1]
                line[-1] = Turn(last.fed, last.sampled, event.time - ended.pop(event.session))
            asked[event.session] = (event.prompt_tokens, event.time)
        elif isinstance(event, CallEnded) and event.session in asked:
            prompt, _ = asked.pop(event.session)
            fed = max(0, prompt - context.get(event.session, 0))
            turn = Turn(fed, max(1, event.context_tokens - prompt), 0.0)
            turns.setdefault(owner[event.session], []).append(turn)
            context[event.session] = event.context_tokens
            ended[event.session] = event.time
        elif isinstance(event, ExecutionEnded):
            over[event.execution] = None
    return [_plan(turns[name]) for name in over if turns.get(name)]
