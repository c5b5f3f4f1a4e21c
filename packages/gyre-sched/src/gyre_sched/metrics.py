"""Load reports from the metrics page of an inference engine (SGLang with ``--enable-metrics``, vLLM).

A pure function of the page's text: fetching it is the caller's. Series of one name (data-parallel ranks) are added up,
shares of the cache are averaged.
"""

from __future__ import annotations

from .errors import SchedError
from .events import LoadReported
from .ids import CellId

__all__ = ["load_from_metrics"]

_RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
_WAITING = ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
_SHARE = ("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")


def load_from_metrics(text: str, cell: CellId, kv_tokens: int, time: float = 0.0) -> LoadReported:
    """The load of ``cell``, whose cache holds ``kv_tokens``, from its metrics page in Prometheus text format."""
    values: dict[str, list[float]] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, rest = line.partition("{") if "{" in line else line.partition(" ")
        number = (rest.rsplit("}", 1)[-1] if "{" in line else rest).split()
        if number and name in (*_RUNNING, *_WAITING, *_SHARE):
            values.setdefault(name, []).append(float(number[0]))
    running, waiting, share = (_first(values, names) for names in (_RUNNING, _WAITING, _SHARE))
    if running is None:
        raise SchedError(
            f"cannot read the load of {cell}: the page has none of {', '.join(_RUNNING)}; is this an engine's "
            "metrics page (SGLang needs --enable-metrics)?"
        )
    used = sum(share) / len(share) if share else 0.0
    return LoadReported(time, cell, int(sum(running)), int(sum(waiting or [0.0])), int(used * kv_tokens))


def _first(values: dict[str, list[float]], names: tuple[str, ...]) -> list[float] | None:
    return next((values[name] for name in names if name in values), None)
