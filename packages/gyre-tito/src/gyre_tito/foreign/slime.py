"""slime: dumps of `--save-debug-rollout-data` (`.pt`), and JSON lines of the same samples.

A sample is a row of tokens with a loss mask after its prompt. An execution that was split into several samples names
itself in each of them (`rollout_id`). `weight_versions` lists the policies that took part; with more than one of them
no token says which was its own.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gyre_tito.foreign import torch_file
from gyre_tito.foreign.base import ForeignFileError, lines, text_of
from gyre_tito.records import Status
from gyre_tito.rollouts import Rollout, packed_turns

_STATUS = {
    "completed": Status.COMPLETED,
    "truncated": Status.TRUNCATED,
    "aborted": Status.FAILED,
    "failed": Status.FAILED,
}
_STOPS = {"completed": "stop", "truncated": "length"}  # what its engine said of the last call


def read(where: Path) -> Iterator[Rollout]:
    """Rollouts of a dump, or of the same samples as JSON lines."""
    if zipfile.is_zipfile(where):
        loaded = torch_file.load(where)
        if not isinstance(loaded, dict) or "samples" not in loaded:
            raise ForeignFileError(f"reading {where}: expected a mapping with 'samples'")
        samples: Iterable[tuple[str, Mapping[str, Any]]] = (
            (f"sample {at}", sample) for at, sample in enumerate(_flat(loaded["samples"]))
        )
        step = loaded.get("rollout_id")
    else:
        samples = ((f"line {number}", row) for number, row in lines(where))
        step = None
    rows: Counter[str] = Counter()
    for place, sample in samples:
        rollout = _sample(sample, place, step)
        yield replace(rollout, row=rows[rollout.execution])
        rows[rollout.execution] += 1


def _flat(samples: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for one in samples:
        if isinstance(one, list):
            yield from _flat(one)
        else:
            yield one


def _list(values: Any) -> list[Any] | None:
    """A list of numbers, which may have been saved as a tensor."""
    return None if values is None else values.reshape(-1).tolist() if isinstance(values, np.ndarray) else list(values)


def _execution(sample: Mapping[str, Any], place: str) -> str:
    for name in ("rollout_id", "index"):
        if sample.get(name) is not None:
            return str(sample[name])
    return place


def _sample(sample: Mapping[str, Any], place: str, step: int | None) -> Rollout:
    ids = _list(sample["tokens"]) or []
    prompt_len = len(ids) - int(sample["response_length"])
    named = [int(one) for one in sample.get("weight_versions") or () if str(one).lstrip("-").isdigit()]
    size = len(ids) - prompt_len
    versions = [named[0]] * size if len(set(named)) == 1 else None
    reward = sample.get("reward")
    value = str(sample.get("status") or "")
    removed = bool(sample.get("remove_sample"))
    mask = _list(sample.get("loss_mask"))
    logprobs = _list(sample.get("rollout_log_probs"))
    turns = packed_turns(ids, prompt_len, mask, logprobs, place, versions)
    if turns and value in _STOPS:
        turns = (*turns[:-1], replace(turns[-1], stop_after=_STOPS[value]))
    return Rollout(
        execution=_execution(sample, place),
        turns=turns,
        group=None if sample.get("group_index") is None else str(sample["group_index"]),
        task=text_of(sample.get("prompt")),
        step=step,
        status=_STATUS.get(value),
        score=float(reward) if isinstance(reward, int | float) else None,
        place=place,
        version_span=tuple(named),
        metadata={
            "removed": removed,
            "all_masked": mask is not None and len(mask) > 0 and not any(mask),
            "status": value,
        },
        in_progress=value == "pending",
    )
