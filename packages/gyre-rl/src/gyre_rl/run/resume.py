"""What an earlier life of a run left: read from its event log and store, used once at a resume.

Invariant: an execution that ended and was scored is used as it is; one that is at rest goes on from there under its
name; any other is started again under the next attempt's name; a contribution at rest of the open step counts if its
batches are still wanted. Nothing is guessed: what cannot be read is done again. Pure reading.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from gyre_core import ExecutionEnd, ExecutionStatus, InfrastructureError, RunEvent
from gyre_tito import Store

from gyre_rl.agents.rests import Rests
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.rollout import Finished
from gyre_rl.run.stream import group_index
from gyre_rl.views import events as ev


@dataclass(frozen=True, slots=True)
class OpenGroup:
    """A group that was admitted and has not trained: what ended of it, attempts used up by execution, and the recorded
    names of those that are at rest."""

    name: str
    finished: dict[str, Finished]
    attempts: dict[str, int]
    at_rest: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a run that goes on."""

    version: int
    """Of the newest whole checkpoint; -1 if there is none and the run begins anew."""
    groups: tuple[OpenGroup, ...]
    evaluations: dict[str, OpenGroup]
    """Evaluation groups that were begun, by name."""
    next_group: int
    score_before: float | None
    counts: dict[str, int]
    """Sums of the summary's counters over the earlier lives."""


def read_past(directory: RunDirectory, log: Iterable[RunEvent], store: Store, rests: Rests) -> Past:
    """Fold the log of all earlier lives; raises InfrastructureError when log and checkpoints contradict."""
    saved = directory.versions_saved()
    version = saved[-1] if saved else -1
    applied, seats, purposes = -1, {}, {}
    attempts: dict[str, dict[str, int]] = defaultdict(dict)
    score_before: float | None = None
    counts: dict[str, int] = defaultdict(int)
    for record in log:
        event = ev.parse(record)
        match event:
            case ev.StepApplied():
                applied = max(applied, event.step)
            case ev.GroupReady():
                seats[event.group] = event.step
            case ev.ExecutionStarted():
                purposes[event.group] = event.purpose
                base = event.execution.removesuffix(f".r{event.attempt}") if event.attempt else event.execution
                attempts[event.group][base] = max(attempts[event.group].get(base, 0), event.attempt)
            case ev.Evaluated(step=0):
                score_before = event.score
            case _:
                _count(event, counts)
    if applied + 1 > max(version, 0) and version >= 0:
        raise InfrastructureError(
            f"resuming {directory.root}",
            got=f"a log in which step {applied} is applied and a newest checkpoint of version {version}",
            expected="a checkpoint at least as new as the log",
            fix="Set checkpoint.every = 1, or restore the missing checkpoint folder.",
        )
    trained = {group for group, step in seats.items() if step < max(version, 0)}
    drawn = sorted(name for name, purpose in purposes.items() if purpose == "train")
    groups = tuple(_open_group(name, attempts[name], store, rests) for name in drawn if name not in trained)
    judged = {name: _open_group(name, attempts[name], store, rests) for name in purposes if purposes[name] == "eval"}
    following = max((group_index(name) + 1 for name in drawn), default=0)
    return Past(version, groups, judged, following, score_before, dict(counts))


def _count(event: ev.Event | None, counts: dict[str, int]) -> None:
    match event:
        case ev.Switched(ok=True):
            counts["role_switches"] += 1
        case ev.SessionMoved():
            counts["sessions_rerouted"] += 1
            counts["kv_moved_sessions"] += event.carried
        case ev.ExecutionEnded():
            counts["partial_scores"] += event.partial and (event.score or 0.0) > 0
            counts["branches"] += event.branches
        case _:
            return


def _open_group(name: str, attempts: dict[str, int], store: Store, rests: Rests) -> OpenGroup:
    recorded = {info.execution: info for info in store.executions(group=name)}
    finished: dict[str, Finished] = {}
    used: dict[str, int] = {}
    at_rest: set[str] = set()
    for execution, attempt in attempts.items():
        at = execution if attempt == 0 else f"{execution}.r{attempt}"
        info = recorded.get(at)
        if info is not None and info.closed_at is not None and info.status.value not in ("open", "failed"):
            status = ExecutionStatus(info.status.value)
            score = None if info.score is None else info.score.value
            end = ExecutionEnd(status, info.cause)
            finished[execution] = Finished(execution, at, end, score, status.partial and score is not None)
        elif info is not None and info.closed_at is None and rests.find(at) is not None:
            used[execution] = attempt
            at_rest.add(at)
        else:
            used[execution] = attempt + 1
    return OpenGroup(name, finished, used, frozenset(at_rest))
