"""What a server's `/metrics` says of its load.

Invariant: pure; figures of several engine processes (data parallel) are added up, but for the usage, which is their
mean. A figure the server does not give is None or 0 as documented.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)
TELLING = 64
"""Prompt tokens computed, in the mean of some calls, from which on their seconds are those of computing."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Counts of now and totals since the server's start."""

    running: int
    waiting: int
    usage: float
    """Share of KV blocks held by running calls."""
    kv_tokens: int
    """Size of the KV cache; 0 when unknown."""
    block_tokens: int
    computed: int
    """Prompt tokens computed."""
    cached: int
    """Prompt tokens found in the prefix cache."""
    received: int
    """Prompt tokens whose KV came from another server."""
    sampled: int
    prefills: int = 0
    """Calls that have ended; the next two are of these."""
    prefill_tokens: int = 0
    """Prompt tokens they computed."""
    prefill_s: float = 0.0
    """Seconds from a call's place in the batch to its first token, added up."""


class PrefillSpeed:
    """Tokens a second at which prompts are prefilled, as a call meets it: beside the others in its batch, without the
    time in the queue. Measured between two readings of the server's totals, from calls that computed enough to tell."""

    def __init__(self) -> None:
        self._before: ServerLoad | None = None
        self._last: float | None = None

    def of(self, load: ServerLoad) -> float | None:
        """The speed lately; None before the first measurement."""
        before, self._before = self._before, load
        calls, tokens, seconds = load.prefills, load.prefill_tokens, load.prefill_s
        if before is not None and before.prefills <= calls:  # else the server is another one
            calls, tokens = calls - before.prefills, tokens - before.prefill_tokens
            seconds -= before.prefill_s
        if calls > 0 and seconds > 0 and tokens >= TELLING * calls:
            self._last = tokens / seconds
        return self._last


def read_metrics(text: str) -> ServerLoad:
    """The load out of the Prometheus text of vLLM."""
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    source: dict[str, float] = {}
    kv_tokens = block = 0
    for name, labels, value in _LINE.findall(text):
        if name in _WANTED:
            sums[name] = sums.get(name, 0.0) + float(value)
            counts[name] = counts.get(name, 0) + 1
        elif name == "prompt_tokens_by_source":
            where = dict(_LABEL.findall(labels)).get("source", "")
            source[where] = source.get(where, 0.0) + float(value)
        elif name == "cache_config_info":
            found = dict(_LABEL.findall(labels))
            block = _number(found.get("block_size"))
            kv_tokens += _number(found.get("num_gpu_blocks")) * block
    return ServerLoad(
        running=int(sums.get("num_requests_running", 0)),
        waiting=int(sums.get("num_requests_waiting", 0)),
        usage=sums.get("kv_cache_usage_perc", 0.0) / max(counts.get("kv_cache_usage_perc", 1), 1),
        kv_tokens=kv_tokens,
        block_tokens=block,
        computed=int(source.get("local_compute", 0)),
        cached=int(source.get("local_cache_hit", 0)),
        received=int(source.get("external_kv_transfer", 0)),
        sampled=int(sums.get("generation_tokens", 0)),
        prefills=int(sums.get("request_prefill_time_seconds_count", 0)),
        prefill_tokens=int(sums.get("request_prefill_kv_computed_tokens_sum", 0)),
        prefill_s=sums.get("request_prefill_time_seconds_sum", 0.0),
    )


_WANTED = frozenset({
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens",
    "request_prefill_time_seconds_count", "request_prefill_time_seconds_sum", "request_prefill_kv_computed_tokens_sum",
})  # fmt: skip


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
