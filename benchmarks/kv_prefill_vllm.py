"""The vLLM half of kv_vs_prefill.py: two stock servers on the CPU, each behind the engine that the ring uses.

A session goes from one to the other as between two cells (`kv_export`, `kv_import`, its next call). Servers live in
the environment of `tools/engine_env.py vllm`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gyre_core import ComponentContext, WeightSource
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions
from kv_prefill_support import Moved, nothing_yet, prompt_of, sample, summary

BLOCK = 32
ROUNDS = 2
"""Fetches of a session whose call runs, as in `gyre_rl.cell.handover`."""


class VLLMPair:
    """Two servers of one model, each on one thread."""

    name = "vllm"
    short = (64, 128, 256, 512, 1024, 2048)

    def __init__(self, folder: str, run_dir: str, longest: int) -> None:
        options = VLLMOptions(
            dtype="float32",
            max_context=longest + 1024,
            max_running=4,
            kv_cache_gb=1.0,
            transfers=True,
            arguments=("--block-size", str(BLOCK)),
        )
        self._weights = WeightSource(0, folder)
        self._source, self._sink = (
            VLLMEngine(options, ComponentContext(run_dir, name, threads=1)) for name in ("source", "sink")
        )

    async def start(self) -> None:
        """Both at once."""
        await asyncio.gather(*(engine.start(self._weights) for engine in (self._source, self._sink)))

    async def close(self) -> None:
        """End both."""
        await asyncio.gather(self._source.close(), self._sink.close())

    async def fill(self, session: str, n: int) -> list[int]:
        """Compute the session at the source; its context."""
        prompt = prompt_of(session, n)
        return prompt + (await sample(self._source, session, prompt, 1))["ids"]

    async def move(self, session: str) -> Moved:
        """Bring it to the destination."""
        began = time.monotonic()
        held = await self._source.kv_export(session)
        if held is None:
            raise RuntimeError(f"the source has no KV of {session}")
        came = await self._sink.kv_import(held)
        return Moved(came.nbytes, came.tokens - came.computed, time.monotonic() - began)

    async def next_token(self, session: str, context: list[int]) -> dict[str, Any]:
        """One token at the destination."""
        return await sample(self._sink, session, context, 1)

    async def forget(self) -> None:
        """Nothing to do: no two prompts have a beginning in common, and old blocks make room by themselves."""

    async def live(self, n: int) -> dict[str, Any]:
        """Move a session while it decodes, and compare with the same call left alone."""
        session = f"live-{n}-{time.monotonic_ns()}"
        prompt, part = prompt_of(session, n), nothing_yet()
        running = asyncio.ensure_future(sample(self._source, session, prompt, 900, part))
        while len(part["ids"]) < 40:
            await asyncio.sleep(0.005)
        moved = [await self.move(session) for _ in range(ROUNDS)]
        await self._source.abort(part["request"])
        await running
        rest = await sample(self._sink, session, [*prompt, *part["ids"]], 40)
        alone = await sample(self._source, "alone", prompt, len(part["ids"]) + 40)
        return summary(part, rest, alone) | {"rounds": len(moved), "round_trip_ms": await self._round_trip()}

    async def _round_trip(self) -> float:
        """Milliseconds of the smallest question to the destination's server."""
        server, took = self._sink._state.server, []
        for _ in range(15):
            began = time.monotonic()
            await server.client.alive()
            took.append(time.monotonic() - began)
        return round(1e3 * sorted(took)[7], 2)
