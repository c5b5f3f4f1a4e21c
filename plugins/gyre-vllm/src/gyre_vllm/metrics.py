"""What a server's `/metrics` says of its load.

Invariant: pure; figures of several engine processes (data parallel) are added up, but for the usage, which is their
mean. A figure the server does not give is None or 0 as documented.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(r"^vllm:(\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.eE+-]+|NaN)$", re.MULTILINE)
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
    )


_WANTED = frozenset({"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "generation_tokens"})


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
