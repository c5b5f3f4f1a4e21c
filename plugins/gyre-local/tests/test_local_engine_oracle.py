from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from gyre_core import FinishReason


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(320) for _ in range(count)] if count < 2 else _ids(count, seed)


def _ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "qwen2", "llama", "llama3"])
async def test_greedy_ids_and_logprobs_equal_transformers(kind: str, engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines(kind, prefill_tokens=48)
    prompts = [prompt_of(n, n) for n in (1, 15, 16, 17, 130)]
    results = await asyncio.gather(*(ask(engine, p, 24, name=f"c{i}") for i, p in enumerate(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        ids, logprobs = oracle_of(kind).greedy(prompt, 24)
        assert result.ids == ids
        assert result.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert result.versions == [0] * 24
        assert result.finish is FinishReason.LENGTH
