"""Which sampled tokens are too old to train.

Staleness is the trainer's version minus the version that sampled the token. One execution may span several versions,
so the mask is per token. The invariant: masking comes before |T_k| is counted, so a masked token is in no
denominator, and what was masked is counted and reported. Needs numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail, first

_DOING = "judging staleness"


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """``max_staleness``: largest version gap that trains (None: any). ``whole``: one too-old token drops all."""

    max_staleness: int | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        """Check that the bound is not negative; raises ValueError."""
        if self.max_staleness is not None and self.max_staleness < 0:
            fail(_DOING, f"max_staleness = {self.max_staleness}", "0 or more, or None for no bound")

    def mask(self, versions: NDArray[np.int32], trainer_version: int) -> NDArray[np.bool_]:
        """bool[n]: which of the sampled tokens with these versions train at ``trainer_version``."""
        gap = staleness(versions, trainer_version)
        if self.max_staleness is None:
            return np.ones(gap.shape, np.bool_)
        fresh: NDArray[np.bool_] = gap <= self.max_staleness
        if self.whole and not fresh.all():
            return np.zeros(gap.shape, np.bool_)
        return fresh


def staleness(versions: NDArray[np.int32], trainer_version: int) -> NDArray[np.int64]:
    """trainer version - sampling version, int64[n]; raises ValueError for unknown versions or ones from the future.

    >>> staleness(np.array([3, 4, 4], np.int32), 5).tolist()
    [2, 1, 1]
    """
    values = np.asarray(versions).astype(np.int64)
    if np.any(values < 0):
        fail(_DOING, f"versions[{first(values < 0)}] is negative", "a known version at each sampled token")
    gap = trainer_version - values
    if np.any(gap < 0):
        bad = first(gap < 0)
        fail(_DOING, f"versions[{bad}] = {values[bad]}", f"at most the trainer's version, {trainer_version}")
    return gap


def histogram(gaps: NDArray[np.int64]) -> dict[int, int]:
    """Tokens per staleness.

    >>> histogram(np.array([0, 0, 2]))
    {0: 2, 2: 1}
    """
    values, counts = np.unique(gaps, return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts, strict=True)}
