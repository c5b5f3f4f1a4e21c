"""A session moves between two embedded engines while it decodes: nothing is prefilled again, nothing is computed
otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_core import ComponentContext, FinishReason, GenerateRequest, SamplingParams, WeightSource
from gyre_kvxfer import MigrationServer, MovePolicy, migrate
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from gyre_rl.cell.kv import EngineKV

POLICY = Path(__file__).parents[2] / "examples" / "quickstart" / "policy"
KEY = b"live"
PROMPT = [3 + i % 90 for i in range(300)]
COUNT = 600


@asynccontextmanager
async def engines(count: int) -> AsyncIterator[list[LocalEngine]]:
    options = LocalEngineOptions(dtype="float32", kv_tokens=8192, max_running=4, max_context=1024, chunk_tokens=1)
    made = [LocalEngine(options, ComponentContext(".", f"e{i}", threads=1)) for i in range(count)]
    try:
        for engine in made:
            await engine.start(WeightSource(0, str(POLICY)))
        yield made
    finally:
        for engine in made:
            await engine.close()


class Call:
    """A greedy call and what has come of it."""

    def __init__(self, engine: LocalEngine, prompt: list[int], count: int) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.cached = 0
        self.finish: FinishReason | None = None
        request = GenerateRequest(f"call-{len(prompt)}", "s", prompt, SamplingParams(count, temperature=0.0))
        self.task = asyncio.ensure_future(self._run(engine, request))

    async def _run(self, engine: LocalEngine, request: GenerateRequest) -> None:
        async for chunk in engine.generate(request):
            self.ids += chunk.token_ids
            self.logprobs += chunk.logprobs
            self.cached += chunk.cached_tokens or 0
            self.finish = chunk.finish or self.finish

    async def until(self, tokens: int) -> None:
        while len(self.ids) < tokens:
            assert not self.task.done(), "the call ended before it was to be moved"
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "policy", [MovePolicy(freeze_below=0), MovePolicy(digest="fast", finite=True)], ids=["pre-copy", "checked"]
)
async def test_a_decoding_session_goes_on_as_if_it_had_stayed(policy: Any) -> None:
    async with engines(2) as (source, sink):
        whole = Call(source, PROMPT, COUNT)
        await whole.task
        await source.flush_cache()
        part = Call(source, PROMPT, COUNT)
        await part.until(20)
        async with MigrationServer(EngineKV(source), key=KEY) as server:
            report = await migrate("s", server.endpoint, EngineKV(sink), key=KEY, policy=policy)
        await part.task
        assert report.carried, report
        assert part.finish is FinishReason.ABORT
        context = [*PROMPT, *part.ids]
        assert report.tokens == len(context) - 1, "all but the last token, whose KV nobody has"
        rest = Call(sink, context, COUNT - len(part.ids))
        await rest.task
        assert rest.cached == len(context) - 1, "0 tokens prefilled again"
        assert part.ids + rest.ids == whole.ids
        gap = np.abs(np.array(part.logprobs + rest.logprobs) - np.array(whole.logprobs))
        assert float(gap.max()) <= 1e-5
