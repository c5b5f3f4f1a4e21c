"""Recorded rollouts of any origin in one plain shape, for checking and importing.

Invariant: what a file does not say is None here, never a guess. The shape can hold broken data (lengths that disagree,
masks over context), because finding those is the point. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_tito.records import Purpose, Status

Ids = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One model call: exact prompt ids and what came back, as the file has them.

    `trains` says which sampled tokens carry loss, `prompt_trains` the same for prompt tokens; None: not said.
    `stop_after`: the engine's reason, if known. `cached`: prompt tokens taken from a cache. `session` names the
    conversation, `parent` the turn that this one continues, where that is known. `continues` None: `prompt` is the
    whole prompt; a number: the prompt is that many tokens of `parent`'s prompt and sampled tokens, then `prompt`.
    `started_at` and `ended_at`: seconds since the epoch, if known. `trainer_logprobs`: what the trainer computed for
    the sampled tokens, if the file has that too. `place`: where in the file.
    """

    prompt: Ids
    sampled: Sequence[int]
    logprobs: Sequence[float] | None = None
    versions: Sequence[int] | None = None
    trains: Sequence[int] | None = None
    prompt_trains: Sequence[int] | None = None
    stop_after: str | None = None
    cached: int | None = None
    session: str = "main"
    parent: int | None = None
    continues: int | None = None
    started_at: float | None = None
    ended_at: float | None = None
    trainer_logprobs: Sequence[float | None] | None = None
    place: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One attempt at a task. `row` tells several rows of one execution apart; `prompt_text` and `text` are kept where a
    file has no tokens. `version_span`: policy versions named for the whole rollout, where tokens do not say."""

    execution: str
    turns: tuple[Turn, ...]
    group: str | None = None
    task: str | None = None
    step: int | None = None
    status: Status | None = None
    score: float | None = None
    advantage: float | None = None
    row: int = 0
    place: str = ""
    prompt_text: str | None = None
    text: str | None = None
    version_span: tuple[int, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    in_progress: bool = False
    purpose: Purpose = "train"


def packed_turns(
    ids: Sequence[int],
    prompt_len: int,
    mask: Sequence[int] | None,
    logprobs: Sequence[float] | None,
    place: str,
    versions: Sequence[int] | None = None,
) -> tuple[Turn, ...]:
    """A row that packs several turns (prompt, then sampled and context tokens told apart by `mask`) as turns.

    `mask`, `logprobs` and `versions` cover the tokens after `prompt_len`. Without a mask everything after the prompt
    counts as sampled. Context after the last sampled token is left out: no call saw it. Each turn continues the one
    before it, so that the row is kept once however many turns it has.
    """
    rest = len(ids) - prompt_len
    if mask is None or len(mask) != rest:
        return (Turn(ids[:prompt_len], ids[prompt_len:], logprobs, versions, mask, place=place),)
    turns: list[Turn] = []
    at = taken = 0
    while at < rest:
        while at < rest and not mask[at]:
            at += 1
        end = at
        while end < rest and mask[end]:
            end += 1
        if end > at:
            begin = prompt_len + at
            turns.append(
                Turn(
                    ids[taken:begin],
                    ids[begin : prompt_len + end],
                    None if logprobs is None else logprobs[at:end],
                    None if versions is None else versions[at:end],
                    mask[at:end],
                    parent=len(turns) - 1 if turns else None,
                    continues=taken if turns else None,
                    place=place,
                )
            )
            taken = prompt_len + end
        at = end
    return tuple(turns)
