"""Advantages of a group, over its executions.

A group is the n attempts at one task inside one step. The invariant: baseline and loss have the same members. An
execution that does not train (an infrastructure failure, a stale one, one without a trained token) is in no baseline,
and one that is in the baseline trains. Branches, rows and sub-agents are not counted here: an execution is one vote
however many rows it fanned out into. Pure functions over scores; no tensors, no tokens. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail

_DOING = "computing a group's advantages"
Estimator = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Scores of a group's members float64[n], n >= 2, to advantages float64[n]."""


class Status(StrEnum):
    """How an execution ended. The value is the word that records and metrics use."""

    COMPLETED = "completed"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"
    FAILED = "failed"
    STALE = "stale"

    @property
    def trains(self) -> bool:
        """Whether executions of this status are in the baseline and in the loss."""
        return self not in (Status.FAILED, Status.STALE)


class GroupNote(StrEnum):
    """What became of a group as a whole."""

    TRAINS = "trains"
    EMPTY = "empty"
    SINGLE = "single"
    EQUAL = "equal"
    GATED = "gated"


@dataclass(frozen=True, slots=True)
class GroupAdvantages:
    """Advantages float64[n] of the n executions asked about (0 for those that are no members).

    ``member`` bool[n]: in the baseline and in the loss. ``baseline``: the members' mean score (NaN if none).
    ``note``: why all advantages are zero, if they are.
    """

    advantage: NDArray[np.float64]
    member: NDArray[np.bool_]
    baseline: float
    note: GroupNote

    @property
    def members(self) -> int:
        """K, the executions that the group's loss is divided by."""
        return int(self.member.sum())


def grpo(scores: NDArray[np.float64], *, eps: float = 1e-6, ddof: int = 1) -> NDArray[np.float64]:
    """(r - mean) / (std + eps): GRPO (Shao et al. 2024, arXiv:2402.03300), std over the group, n - ddof below.

    >>> grpo(np.array([0.0, 1.0, 1.0, 0.0]), ddof=0, eps=0.0).tolist()
    [-1.0, 1.0, 1.0, -1.0]
    """
    centred = centre(scores)
    advantage: NDArray[np.float64] = centred / (float(np.std(scores, ddof=ddof)) + eps)
    return advantage


def centre(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), no division by the spread.

    >>> centre(np.array([0.0, 1.0, 1.0, 0.0])).tolist()
    [-0.5, 0.5, 0.5, -0.5]
    """
    centred: NDArray[np.float64] = scores - scores.mean()
    return centred


def leave_one_out(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """r - mean of the others: RLOO (Ahmadian et al. 2024, arXiv:2402.14740); equals centre(r) * n / (n - 1).

    >>> leave_one_out(np.array([0.0, 1.0, 1.0, 0.0])).round(3).tolist()
    [-0.667, 0.667, 0.667, -0.667]
    """
    count = scores.shape[0]
    advantage: NDArray[np.float64] = centre(scores) * (count / (count - 1))
    return advantage


def group_advantages(
    scores: Sequence[float],
    statuses: Sequence[Status | str],
    *,
    trained_tokens: Sequence[int] | None = None,
    solved: Sequence[bool] | None = None,
    estimator: Estimator = grpo,
    gate: float | None = 0.0,
    single: str = "zero",
) -> GroupAdvantages:
    """Advantages of one group's executions.

    ``scores``: one score per execution (partial credit allowed; ignored, NaN allowed, where the status does not
    train). ``trained_tokens``: |T_k|; an execution with none is no member. ``solved``: verified outcomes, if known.
    ``gate``: a group none of whose members has an outcome gets no advantages, so that shaped scores of an all-failed
    group invent no direction. An outcome is ``solved`` where given, else a score above ``gate``. The default, 0.0,
    lets verified milestones (scores above zero) train and stops penalties among failures; ``None`` switches it off.
    ``single``: a group of one gets ``"zero"`` (default) or, if asked for, its ``"raw"`` score.
    Raises ValueError for unequal lengths, an empty group, unknown statuses, scores of members that are not finite.

    >>> group_advantages([1.0, 0.0, 0.0], ["completed", "timeout", "failed"], estimator=centre).advantage.tolist()
    [0.5, -0.5, 0.0]
    """
    states = _statuses(statuses, len(scores))
    member = np.array([status.trains for status in states], np.bool_)
    if trained_tokens is not None:
        member &= _token_counts(trained_tokens, len(scores)) > 0
    values = np.asarray(scores, np.float64)
    for index in np.flatnonzero(member & ~np.isfinite(values)):
        fail(
            _DOING,
            f"scores[{index}] = {values[index]} of a {states[index].value} execution",
            "a finite score",
            "Give an execution without a score the status 'failed'.",
        )
    chosen = values[member]
    note = _note(chosen, None if solved is None else _solved(solved, member), gate, single)
    advantage = np.zeros(len(scores), np.float64)
    if note is GroupNote.TRAINS:
        advantage[member] = estimator(chosen) if chosen.shape[0] > 1 else chosen
    baseline = float(chosen.mean()) if chosen.shape[0] else float("nan")
    return GroupAdvantages(advantage, member, baseline, note)


def _note(chosen: NDArray[np.float64], solved: NDArray[np.bool_] | None, gate: float | None, single: str) -> GroupNote:
    if single not in ("zero", "raw"):
        fail(_DOING, f"single = {single!r}", "'zero' or 'raw'")
    if chosen.shape[0] == 0:
        return GroupNote.EMPTY
    if gate is not None and not np.any(chosen > gate if solved is None else solved):
        return GroupNote.GATED
    if chosen.shape[0] == 1:
        return GroupNote.TRAINS if single == "raw" else GroupNote.SINGLE
    return GroupNote.EQUAL if np.ptp(chosen) == 0.0 else GroupNote.TRAINS


def _statuses(statuses: Sequence[Status | str], count: int) -> list[Status]:
    if count == 0:
        fail(_DOING, "a group without executions", "at least one")
    if len(statuses) != count:
        fail(_DOING, f"{len(statuses)} statuses for {count} scores", "one status per score")
    known = {status.value for status in Status}
    for index, status in enumerate(statuses):
        if (status.value if isinstance(status, Status) else status) not in known:
            fail(_DOING, f"statuses[{index}] = {status!r}", f"one of {sorted(known)}")
    return [Status(status) for status in statuses]


def _token_counts(trained_tokens: Sequence[int], count: int) -> NDArray[np.int64]:
    tokens = np.asarray(trained_tokens, np.int64)
    if tokens.shape != (count,):
        fail(_DOING, f"trained_tokens has shape {tokens.shape}", f"({count},)")
    for index in np.flatnonzero(tokens < 0):
        fail(_DOING, f"trained_tokens[{index}] = {tokens[index]}", "a count of zero or more")
    return tokens


def _solved(solved: Sequence[bool], member: NDArray[np.bool_]) -> NDArray[np.bool_]:
    flags = np.asarray(solved, np.bool_)
    if flags.shape != member.shape:
        fail(_DOING, f"solved has shape {flags.shape}", f"{member.shape}")
    chosen: NDArray[np.bool_] = flags[member]
    return chosen
