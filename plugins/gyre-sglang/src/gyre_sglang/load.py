"""The load of a server as the scheduler wants it: its own account of memory and speed, ours of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gyre_core import EngineLoad, InfrastructureError

from gyre_sglang.driver import Driver
from gyre_sglang.launch import Server


async def read_load(server: Server, driver: Driver, empty: EngineLoad) -> EngineLoad:
    """Ask /v1/loads; `empty` has the version and the counters."""
    answer = await server.client.get("/v1/loads?include=core", server.options.request_timeout_s)
    loads = answer.get("loads") if isinstance(answer, dict) else None
    if not isinstance(loads, list) or not loads:
        raise InfrastructureError("reading the load of SGLang", got=str(answer)[:200], expected="a list of loads")
    prefill, decode = _speeds(loads)
    running = sum(call.running for call in driver.calls)
    return replace(
        empty,
        slots_total=server.facts.slots,
        slots_running=running,
        waiting=len(driver.calls) - running,
        kv_tokens_total=server.facts.kv_tokens,
        kv_tokens_used=sum(int(load["num_used_tokens"]) for load in loads),
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )


def _speeds(loads: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Prefill over all busy time so far; decode as the server measured it last."""
    tokens = sum(load.get("total_prefill_uncached_tokens") or 0 for load in loads)
    busy_s = sum(load.get("total_prefill_busy_us") or 0 for load in loads) / 1e6
    decode = sum(load.get("gen_throughput") or 0.0 for load in loads)
    return (tokens / busy_s if busy_s > 0 else None), (float(decode) or None)
