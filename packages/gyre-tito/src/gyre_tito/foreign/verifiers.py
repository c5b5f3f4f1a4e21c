"""verifiers: `traces.jsonl` (see `gyre_tito.foreign.traces`), and the older `results.jsonl`.

A line of `results.jsonl` is a rollout, with token ids in `trajectory` if those were saved. It knows no policy versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre_tito.foreign import traces
from gyre_tito.foreign.base import lines, text_of
from gyre_tito.records import Status
from gyre_tito.rollouts import Rollout, Turn


def read(where: Path) -> Iterator[Rollout]:
    """Rollouts of either file."""
    _, first = next(lines(where), (0, {}))
    return traces.read(where) if "traces" in first or "nodes" in first else _results(where)


def _results(where: Path) -> Iterator[Rollout]:
    for number, row in lines(where):
        place = f"line {number}"
        turns = tuple(
            _turn(step, f"{place}, step {at}")
            for at, step in enumerate(row.get("trajectory") or ())
            if step.get("tokens")
        )
        group = str(row["example_id"]) if row.get("example_id") is not None else None
        yield Rollout(
            execution=str(row.get("trajectory_id") or f"{group}/{number}"),
            turns=turns,
            group=group,
            task=row.get("task"),
            status=_status(row),
            score=row.get("reward"),
            advantage=row.get("advantage"),
            place=place,
            text=None if turns else text_of(row.get("completion")),
            prompt_text=None if turns else text_of(row.get("prompt")),
            metadata={"stop_condition": row.get("stop_condition")},
        )


def _turn(step: Mapping[str, Any], place: str) -> Turn:
    tokens = step["tokens"]
    cut = bool(step.get("is_truncated") or tokens.get("is_truncated"))
    extras = step.get("extras") or {}
    return Turn(
        prompt=tokens["prompt_ids"],
        sampled=tokens["completion_ids"],
        logprobs=tokens.get("completion_logprobs"),
        trains=tokens.get("completion_mask"),
        prompt_trains=tokens.get("prompt_mask"),
        stop_after="length" if cut else None,
        session=str(extras.get("session") or step.get("trajectory_id") or "main"),
        place=place,
    )


def _status(row: Mapping[str, Any]) -> Status | None:
    if row.get("error"):
        return Status.FAILED
    condition = str(row.get("stop_condition") or "")
    if "timeout" in condition:
        return Status.TIMEOUT
    if row.get("is_truncated") and row.get("is_completed") is not True:
        return Status.TRUNCATED
    return Status.COMPLETED if row.get("is_completed") else None
