"""verl: `<step>.jsonl` of `trainer.rollout_data_dir`. Text only: tokens made of it are not those that ran."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gyre_tito.foreign.base import lines
from gyre_tito.rollouts import Rollout


def read(where: Path) -> Iterator[Rollout]:
    """Rollouts of a file."""
    for number, row in lines(where):
        score = row.get("score")
        yield Rollout(
            execution=str(row.get("request_id") or row.get("uid") or f"line-{number}"),
            turns=(),
            group=None if row.get("uid") is None else str(row["uid"]),
            task=row.get("input"),
            step=row.get("step"),
            score=float(score) if isinstance(score, int | float) else None,
            place=f"line {number}",
            prompt_text=row["input"],
            text=row["output"],
        )
