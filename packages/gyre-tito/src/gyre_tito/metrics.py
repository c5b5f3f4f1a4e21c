"""Counters and latency histograms of the proxy, and the Prometheus text that shows them.

Invariant: recording costs a few dictionary operations and never blocks. One instance serves one event loop.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Histogram:
    """Seconds in fixed buckets, with sum and count."""

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        """Count one observation."""
        self.buckets[bisect.bisect_left(_BOUNDS, seconds)] += 1
        self.sum += seconds
        self.count += 1

    def quantile(self, share: float) -> float:
        """An upper bound of the quantile, in seconds (the bucket's edge)."""
        wanted, seen = share * self.count, 0
        for bound, number in zip((*_BOUNDS, float("inf")), self.buckets, strict=True):
            seen += number
            if seen >= wanted and seen:
                return bound
        return 0.0


class Metrics:
    """What the proxy counts: requests by dialect and status, calls by outcome, tokens, phases, loop lag, queue."""

    def __init__(self) -> None:
        self.counters: dict[tuple[str, str], int] = defaultdict(int)
        self.phases: dict[str, Histogram] = defaultdict(Histogram)
        self.gauges: dict[str, float] = {"in_flight": 0, "waiting": 0, "executions_open": 0, "store_backlog": 0}

    def count(self, name: str, label: str = "", amount: int = 1) -> None:
        """Add to a counter."""
        self.counters[name, label] += amount

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of a request."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name].add(time.perf_counter() - begin)

    async def watch_loop(self, period: float = 0.05) -> None:
        """Measure how late the event loop runs timers; runs until cancelled."""
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(period)
            self.phases["loop_lag"].add(max(0.0, time.perf_counter() - begin - period))

    def prometheus(self) -> str:
        """All of it in Prometheus' text format."""
        lines: list[str] = []
        for name in sorted({key for key, _ in self.counters}):
            lines.append(f"# TYPE gyre_tito_{name}_total counter")
            for (key, label), value in sorted(self.counters.items()):
                if key == name:
                    shown = f'{{kind="{label}"}}' if label else ""
                    lines.append(f"gyre_tito_{name}_total{shown} {value}")
        for name, level in sorted(self.gauges.items()):
            lines += [f"# TYPE gyre_tito_{name} gauge", f"gyre_tito_{name} {level:g}"]
        lines.append("# TYPE gyre_tito_phase_seconds histogram")
        for name, histogram in sorted(self.phases.items()):
            seen = 0
            for bound, number in zip((*_BOUNDS, float("inf")), histogram.buckets, strict=True):
                seen += number
                edge = "+Inf" if bound == float("inf") else f"{bound:g}"
                lines.append(f'gyre_tito_phase_seconds_bucket{{phase="{name}",le="{edge}"}} {seen}')
            lines.append(f'gyre_tito_phase_seconds_sum{{phase="{name}"}} {histogram.sum:.6f}')
            lines.append(f'gyre_tito_phase_seconds_count{{phase="{name}"}} {histogram.count}')
        return "\n".join(lines) + "\n"
