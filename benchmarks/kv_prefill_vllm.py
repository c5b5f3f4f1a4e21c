"""The vLLM half of kv_vs_prefill.py: two servers on the CPU, each behind the engine that the ring uses.

A session goes from one to the other as between two cells: `kv_export`, `kv_import`, its next call. Servers live in the
environment of `tools/engine_env.py vllm`. They are started by the benchmark, or beforehand by this file, which makes
the model, prints the two addresses for `--servers` and ends them at the end of its input. Live moves have a model of
their own, for which the word `live` comes last:

python benchmarks/kv_prefill_vllm.py FOLDER [LONGEST] [live]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from gyre_core import ComponentContext, WeightSource
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions
from kv_prefill_support import Moved, make_model, nothing_yet, prompt_of, sample, shape_of, summary

BLOCK = 32
ROUNDS = 2
"""Fetches of a session whose call runs, as in `gyre_rl.cell.handover`."""


class VLLMPair:
    """Two servers of one model, each on one thread; `urls` of those that run already."""

    name = "vllm"
    short = (64, 128, 256, 512, 1024, 2048)
    model = shape_of(384, 6)
    """31 million parameters, KV of 3 KB a token in float32: what prefilling 32k tokens takes can be waited for."""
    live_model: ClassVar = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64,
    }  # fmt: skip
    """The 30 layers of SmolLM2-135M, KV of 46 KB a token in float32. On a CPU vLLM takes 10 to 30 ms for any request,
    whatever the model: with a toy a pause would be that and nothing else."""

    def __init__(self, folder: str, run_dir: str, longest: int, urls: Sequence[str] = ()) -> None:
        def engine(name: str, url: str) -> VLLMEngine:
            options = VLLMOptions(
                url=url, dtype="float32", max_context=longest + 1024, max_running=4, kv_cache_gb=1.0, transfers=True,
                arguments=("--block-size", str(BLOCK)),
            )  # fmt: skip
            return VLLMEngine(options, ComponentContext(run_dir, name, threads=1))

        self._weights = WeightSource(0, folder)
        self._source, self._sink = map(engine, ("source", "sink"), urls or ("", ""))

    async def start(self) -> None:
        """Both at once."""
        await asyncio.gather(*(engine.start(self._weights) for engine in (self._source, self._sink)))

    async def close(self) -> None:
        """End both, if they are ours."""
        await asyncio.gather(self._source.close(), self._sink.close())

    @property
    def urls(self) -> list[str]:
        """Where they are."""
        return [engine._state.server.client.url for engine in (self._source, self._sink)]

    async def wake(self) -> None:
        """Give the workers something to do: vLLM's go to sleep after a second without, and one that misses what should
        wake it sleeps on for up to five. A server that is in use is awake, so this is not part of any figure."""
        await asyncio.gather(*(e._state.server.client.rpc("gyre_counts") for e in (self._source, self._sink)))

    async def fill(self, session: str, n: int) -> list[int]:
        """Compute the session at the source; its context."""
        prompt = prompt_of(session, n)
        return prompt + (await sample(self._source, session, prompt, 1))["ids"]

    async def move(self, session: str, *, stop: bool = False) -> Moved:
        """Bring it to the destination; with `stop` its running call ends."""
        began = time.monotonic()
        held = await self._source.kv_export(session, stop=stop)
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
        await self.wake()
        moved = [await self.move(session) for _ in range(ROUNDS)]
        await self.move(session, stop=True)
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


async def serve(folder: str, longest: int, shape: dict[str, int]) -> None:
    """Both servers, until the input ends."""
    make_model(f"{folder}/model", longest, shape)
    pair = VLLMPair(f"{folder}/model", folder, longest)
    await pair.start()
    try:
        print(",".join(pair.urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await pair.close()


if __name__ == "__main__":
    words = [word for word in sys.argv[2:] if word != "live"]
    asyncio.run(
        serve(
            sys.argv[1],
            int(words[0]) if words else 32768,
            VLLMPair.live_model if "live" in sys.argv[2:] else VLLMPair.model,
        )
    )
