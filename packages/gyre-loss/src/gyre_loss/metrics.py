"""Metrics of a loss, gathered while it is computed, that add up over micro-batches.

The invariant: ``a + b`` of the metrics of two parts is the metrics of the whole, so means are formed only at the end,
in ``summary()``, from sums and counts. No second pass over the model; one device synchronisation per batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K", str, int)
V = TypeVar("V", int, float)

GAP_BOUND = 0.5
"""|trainer - engine| log-probability gap (nats) beyond which an entry is counted in ``gap_beyond``."""


@dataclass(frozen=True, slots=True)
class LossMetrics:
    """``sums`` and ``maxima`` of named quantities over loss entries; ``versions`` counts entries per policy version.

    ``counts``: how many entries each sum is over. See docs/reference/loss.md for the names.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    maxima: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, other: LossMetrics) -> LossMetrics:
        """The metrics of both parts together."""
        return LossMetrics(
            _added(self.sums, other.sums),
            _added(self.counts, other.counts),
            {
                name: max(self.maxima.get(name, -torch.inf), other.maxima.get(name, -torch.inf))
                for name in {**self.maxima, **other.maxima}
            },
            _added(self.versions, other.versions),
        )

    def summary(self, *, trainer_version: int | None = None) -> dict[str, float]:
        """Means, maxima, counts; with ``trainer_version`` also the mean, maximum and histogram of staleness."""
        found: dict[str, float] = {f"{name}_max": value for name, value in self.maxima.items()}
        for name, total in self.sums.items():
            count = self.counts.get(name)
            if count is None:
                found[name] = total
            elif count:
                found[f"{name}_mean"] = total / count
        if trainer_version is not None and self.versions:
            entries = sum(self.versions.values())
            gaps = {trainer_version - version: count for version, count in sorted(self.versions.items())}
            found["staleness_mean"] = sum(gap * count for gap, count in gaps.items()) / entries
            found["staleness_max"] = float(max(gaps))
            found |= {f"staleness_{gap}": float(count) for gap, count in gaps.items()}
        return found


def _added(left: Mapping[K, V], right: Mapping[K, V]) -> dict[K, V]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in {**left, **right}}


def gather(
    seen: Mapping[str, Tensor], logp: Tensor, behaviour: Tensor, entropy: Tensor | None, version: Tensor
) -> LossMetrics:
    """LossMetrics of E entries: what the objective saw [E], the gap to the engine, entropy, versions int[E]."""
    entries = int(logp.shape[0])
    gap = (logp.detach() - behaviour).to(torch.float64)
    per_entry = {
        **{name: values.to(torch.float64) for name, values in seen.items()},
        "gap": gap,
        "gap_abs": gap.abs(),
        "gap_beyond": (gap.abs() > GAP_BOUND).to(torch.float64),
        "kl_behaviour": torch.expm1(gap) - gap,
    }
    if entropy is not None:
        per_entry["entropy"] = entropy.detach().to(torch.float64)
    names = list(per_entry)
    sums = torch.stack([per_entry[name].sum() for name in names]).tolist()
    largest = [name for name in ("ratio", "gap_abs", "correction_weight") if name in per_entry and entries]
    maxima = torch.stack([per_entry[name].max() for name in largest]).tolist() if largest else []
    values, counts = torch.unique(version, return_counts=True)
    return LossMetrics(
        {"entries": float(entries), **dict(zip(names, sums, strict=True))},
        dict.fromkeys(names, entries),
        dict(zip(largest, maxima, strict=True)),
        dict(zip(values.tolist(), counts.tolist(), strict=True)),
    )
