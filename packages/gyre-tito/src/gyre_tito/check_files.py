"""`check` on files: trajectory stores of this package and rollout files of others.

Reads; never writes. A damaged store yields findings, not a crash.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_tito.chat_format import ChatFormat
from gyre_tito.check import Reader, check_rollouts
from gyre_tito.findings import Finding
from gyre_tito.foreign import read_rollouts
from gyre_tito.records import CallRecord, ExecutionInfo, Link
from gyre_tito.rollouts import Rollout, Turn
from gyre_tito.schema import StoreError
from gyre_tito.store import Store

STORE_NAMES = ("trajectories.db", "store.db")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a check: what was read and what was found."""

    path: str
    form: str
    rollouts: int
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> int:
        """Findings that break a law."""
        return sum(finding.severity == "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        counts: dict[str, int] = {}
        for finding in self.findings:
            counts[finding.code] = counts.get(finding.code, 0) + 1
        return {
            "path": self.path,
            "format": self.form,
            "rollouts": self.rollouts,
            "errors": self.errors,
            "counts": counts,
            "findings": [finding.as_json() for finding in self.findings],
        }


def reader_of(chat: ChatFormat) -> Reader:
    """What the checks may know of a model."""
    openers = [chat.tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|start_header_id|>")]
    template = tuple(token for token in openers if token is not None)
    return Reader(chat.decode, chat.stop_ids, template, len(chat.tokenizer))


def check_path(path: str | Path, form: str | None = None, reader: Reader | None = None) -> Report:
    """Check a store, a run directory that holds one, or a foreign rollout file.

    Errors: `StoreError` or `ForeignFileError` if the path cannot be read at all.
    """
    where = Path(path)
    if where.is_dir():
        where = store_in(where)
    if form in (None, "gyre") and is_store(where):
        return _check_store(where, reader)
    name, rollouts = read_rollouts(where, form)
    return Report(str(where), name, len(rollouts), tuple(check_rollouts(rollouts, reader)))


def store_in(directory: Path) -> Path:
    """The store of a run directory. Error: there is none."""
    found = [directory / name for name in STORE_NAMES if (directory / name).is_file()]
    found = found or sorted(one for one in directory.glob("*.db") if is_store(one))
    if not found:
        raise StoreError(f"looking for a trajectory store in {directory}: there is no {STORE_NAMES[0]}")
    return found[0]


def is_store(file: Path) -> bool:
    """Whether a file is an SQLite database."""
    if not file.is_file():
        return False
    with file.open("rb") as handle:
        return handle.read(16) == b"SQLite format 3\x00"


def _check_store(where: Path, reader: Reader | None) -> Report:
    findings: list[Finding] = []
    rollouts: list[Rollout] = []
    with Store.open(where) as store:
        for info in store.executions():
            try:
                calls = store.calls(info.execution)
                sessions = {one.session for one in store.sessions(info.execution)}
            except (ValueError, StoreError) as error:
                findings.append(Finding("damaged", info.execution, str(error)))
                continue
            broken = list(_structure(info.execution, calls, sessions))
            findings.extend(broken)
            if not any(one.code == "broken-link" for one in broken):
                rollouts.append(_as_rollout(info, calls))
    findings.extend(check_rollouts(rollouts, reader))
    return Report(str(where), "gyre", len(rollouts), tuple(findings))


def _structure(execution: str, calls: list[CallRecord], sessions: set[str]) -> Iterator[Finding]:
    lengths: dict[int, int] = {}
    for call in calls:
        if call.prefix_len and lengths.get(call.parent, -1) < call.prefix_len:
            message = f"needs {call.prefix_len} tokens of call {call.parent}, which has {lengths.get(call.parent, 0)}"
            yield Finding("broken-link", execution, message, call=call.index)
        elif _too_little(call, lengths):
            message = f"continues {call.prefix_len} of {lengths.get(call.parent)} tokens"
            yield Finding("extends-too-little", execution, message, call=call.index)
        if call.session not in sessions:
            yield Finding("unknown-session", execution, f"session {call.session!r}", call=call.index)
        lengths[call.index] = call.path_len


def _too_little(call: CallRecord, lengths: dict[int, int]) -> bool:
    """Whether a call claims to continue its parent but does not take all of its path (plain text may stop earlier)."""
    if call.link is not Link.EXTEND or call.parent < 0 or call.meta.get("dialect") == "completions":
        return False
    return lengths.get(call.parent) != call.prefix_len


def _as_rollout(info: ExecutionInfo, calls: list[CallRecord]) -> Rollout:
    """A stored execution for the common checks. That paths continue is true by how the store keeps them."""
    at = {call.index: number for number, call in enumerate(calls)}
    turns = tuple(
        Turn(
            prompt=call.context_ids,
            sampled=call.sampled_ids.tolist(),
            logprobs=call.logprobs.tolist(),
            versions=call.versions.tolist(),
            parent=at.get(call.parent),
            stop_after=call.finish if call.finish in ("stop", "length") else None,
            cached=call.cached_tokens,
            session=call.session,
            continues=call.prefix_len,
            started_at=call.started_at,
            ended_at=call.ended_at,
            place=f"call {call.index}",
        )
        for call in calls
    )
    return Rollout(
        execution=info.execution,
        turns=turns,
        group=info.group or None,
        task=info.task or None,
        step=info.step,
        status=info.status,
        score=None if info.score is None else info.score.value,
        version_span=tuple(info.metadata.get("version_span", ())) if "imported_from" in info.metadata else (),
        metadata=dict(info.metadata),
        purpose=info.purpose,
    )
