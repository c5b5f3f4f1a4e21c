"""One step's figures out of its contributions' sums.

Invariant: sums are added, maxima maximised and every mean is divided once, so the figures do not depend on how the step
was split. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

COUNT, MAX = ":count", ":max"


def summarise(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means ("x" over "x:count"), maxima ("x_max") and plain totals, by name (see `gyre_core.BatchStats.metrics`)."""
    sums: dict[str, float] = defaultdict(float)
    maxima: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith(MAX):
                key = name.removesuffix(MAX)
                maxima[key] = max(value, maxima.get(key, value))
            else:
                sums[name] += value
    found = {
        name: value / sums[name + COUNT] if sums.get(name + COUNT) else value
        for name, value in list(sums.items())
        if not name.endswith(COUNT)
    }
    return found | {f"{name}_max": value for name, value in maxima.items()}
