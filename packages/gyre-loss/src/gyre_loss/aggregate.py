"""Reductions: what a trained token weighs, and what the step divides by once.

A reduction splits into two numbers that are fixed when a group is complete: the weight of each trained token of
execution k, and the group's share of the step's divisor. The core adds the shares of all groups and divides the
summed gradient once, when the step is sealed. The invariant: neither number depends on micro-batches, on cells or on
order.

Pure functions of the members' trained-token counts |T_k|; needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail

_DOING = "fixing a group's denominators"


@dataclass(frozen=True, slots=True)
class Denominators:
    """``weight`` float64[K], per trained token of each member; ``divisor``, the group's share of the step's."""

    weight: NDArray[np.float64]
    divisor: float


Aggregation = Callable[[NDArray[np.int64]], Denominators]
"""Trained tokens int64[K] of a group's members (each >= 1) to the group's Denominators."""


def two_level(tokens: NDArray[np.int64]) -> Denominators:
    """1/|tau| sum_tau 1/K_tau sum_k 1/|T_k| sum_t: the default; every task, then every execution counts alike.

    >>> two_level(np.array([2, 4])).weight.tolist()
    [0.25, 0.125]
    """
    counts = _counted(tokens)
    return Denominators(1.0 / (counts * counts.shape[0]), 1.0)


def sequence_mean(tokens: NDArray[np.int64]) -> Denominators:
    """1/sum(K) sum_k 1/|T_k| sum_t: the mean over sequences of their token means (GRPO, arXiv:2402.03300).

    >>> d = sequence_mean(np.array([2, 4])); d.weight.tolist(), d.divisor
    ([0.5, 0.25], 2.0)
    """
    counts = _counted(tokens)
    return Denominators(1.0 / counts, float(counts.shape[0]))


def token_mean(tokens: NDArray[np.int64]) -> Denominators:
    """1/sum|T_k| sum_k sum_t over the whole step: every token counts alike.

    >>> d = token_mean(np.array([2, 4])); d.weight.tolist(), d.divisor
    ([1.0, 1.0], 6.0)
    """
    counts = _counted(tokens)
    return Denominators(np.ones(counts.shape[0]), float(counts.sum()))


def group_token_mean(tokens: NDArray[np.int64]) -> Denominators:
    """1/|tau| sum_tau 1/sum_{k in tau}|T_k| sum_k sum_t: token mean inside the group (DAPO, arXiv:2503.14476).

    >>> d = group_token_mean(np.array([2, 4])); d.weight.round(4).tolist(), d.divisor
    ([0.1667, 0.1667], 1.0)
    """
    counts = _counted(tokens)
    return Denominators(np.full(counts.shape[0], 1.0 / float(counts.sum())), 1.0)


@dataclass(frozen=True, slots=True)
class Constant:
    """1/sum(K) sum_k 1/length sum_t with a fixed ``length`` (Dr. GRPO, arXiv:2503.20783): no length bias.

    >>> d = Constant(8)(np.array([2, 4])); d.weight.tolist(), d.divisor
    ([0.125, 0.125], 2.0)
    """

    length: float

    def __post_init__(self) -> None:
        """Check that the length is positive; raises ValueError."""
        if not self.length > 0:
            fail(_DOING, f"length = {self.length}", "a positive constant, such as the longest allowed execution")

    def __call__(self, tokens: NDArray[np.int64]) -> Denominators:
        """The Denominators for trained-token counts int64[K]."""
        counts = _counted(tokens)
        return Denominators(np.full(counts.shape[0], 1.0 / self.length), float(counts.shape[0]))


def _counted(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    counts = np.asarray(tokens)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        fail(_DOING, f"token counts of shape {counts.shape} and dtype {counts.dtype}", "integers, one per member")
    if not counts.shape[0]:
        fail(_DOING, "no members", "at least one", "A group without members takes no part in the step.")
    for index in np.flatnonzero(counts < 1):
        fail(
            _DOING,
            f"tokens[{index}] = {counts[index]}",
            "one trained token or more in every member",
            "An execution without trained tokens is no member of its group.",
        )
    return counts.astype(np.float64)
