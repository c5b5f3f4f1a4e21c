"""The engine against plain transformers, under everything that reuses, drops or moves KV."""

from __future__ import annotations

import asyncio
import ctypes
import random
from typing import Any

import numpy as np
import pytest
from gyre_core import FinishReason, GenerateRequest, PauseMode, SamplingParams, WeightSource


def prompt_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


def assert_equal_to(oracle: Any, prompt: list[int], result: Any) -> None:
    ids, logprobs = oracle.greedy(prompt, len(result.ids))
    assert result.ids == ids
    assert result.logprobs == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-untied", "qwen2", "llama", "llama3"])
async def test_greedy_ids_and_logprobs_equal_transformers(kind: str, engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines(kind, prefill_tokens=48)
    prompts = [prompt_of(n, n) for n in (1, 15, 16, 17, 130)]
    results = await asyncio.gather(*(ask(engine, p, 16, name=f"c{i}") for i, p in enumerate(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        assert_equal_to(oracle_of(kind), prompt, result)
        assert result.versions == [0] * 16
        assert result.finish is FinishReason.LENGTH


async def test_a_turn_computes_only_what_is_new(engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines()
    context, cached = prompt_of(37), 0
    for turn in range(4):
        before = (await engine.load()).prefilled_tokens
        result = await ask(engine, context, 9, name=f"turn{turn}", session="s")
        assert_equal_to(oracle_of(), context, result)
        assert result.cached == cached
        assert (await engine.load()).prefilled_tokens - before == len(context) - cached
        cached = len(context) + len(result.ids) - 1  # the last sampled token was never an input
        context = context + result.ids + prompt_of(5 + turn, turn)


async def test_branches_share_the_prefix_to_the_token(engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines()
    base = prompt_of(45)
    await ask(engine, [*base, 1, 2, 3], 4, name="trunk")
    for branch in ([9, 8], [1, 7], [1, 2, 3]):
        result = await ask(engine, base + branch, 6, name=f"b{branch}")
        common = {9: 45, 7: 46, 2: 47}[branch[0] if branch[0] == 9 else branch[1]]
        assert result.cached == common
        assert_equal_to(oracle_of(), base + branch, result)


async def test_a_group_computes_its_prompt_once(engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines(prefill_tokens=64)
    prompt = prompt_of(200)
    results = await asyncio.gather(*(ask(engine, prompt, 5, name=f"g{i}") for i in range(6)))
    for result in results:
        assert_equal_to(oracle_of(), prompt, result)
    assert (await engine.load()).prefilled_tokens <= 200 + 5 * 16


async def test_preemption_changes_nothing(engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines(kv_tokens=256, prefill_tokens=64)
    prompts = [prompt_of(40, i) for i in range(6)]
    results = await asyncio.gather(*(ask(engine, p, 50, name=f"c{i}") for i, p in enumerate(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        assert_equal_to(oracle_of(), prompt, result)
    preempted = await engine._worker.do(lambda core: core.meter.preemptions)
    assert preempted > 0
    load = await engine.load()
    assert (load.kv_tokens_used, load.slots_running, load.waiting) == (0, 0, 0)


async def test_slots_grow_and_leave_holes(engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines(max_running=7, kv_tokens=8192)
    prompts = [prompt_of(10 + 23 * i, i) for i in range(14)]
    results = await asyncio.gather(*(ask(engine, p, 3 + 5 * (i % 4), name=f"c{i}") for i, p in enumerate(prompts)))
    for prompt, result in zip(prompts, results, strict=True):
        assert_equal_to(oracle_of(), prompt, result)


async def test_sampled_logprobs_are_of_the_tempered_distribution(engines: Any, oracle_of: Any, ask: Any) -> None:
    engine = await engines()
    prompt = prompt_of(20)
    for how in ({"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}):
        result = await ask(engine, prompt, 12, name=str(how), seed=3, **how)
        rows = oracle_of().logprobs(prompt + result.ids, how["temperature"])[len(prompt) - 1 : -1]
        expected = [float(row[t]) for row, t in zip(rows, result.ids, strict=True)]
        assert result.logprobs == pytest.approx(expected, abs=1e-4)
        if how.get("top_k"):
            for row, token in zip(rows, result.ids, strict=True):
                assert token in row.topk(3).indices


async def test_a_weight_update_in_mid_generation(engines: Any, oracle_of: Any, ask: Any, folder_of: Any) -> None:
    """Tokens bear the version that made them. Later tokens of the running call stand on mixed KV: old positions as
    the old weights left them. The next call of the session computes all of it anew under the new version."""
    engine = await engines(chunk_tokens=1)
    prompt = prompt_of(30)
    tokens: list[int] = []
    versions: list[int] = []
    logprobs: list[float] = []
    request = GenerateRequest("r", "s", prompt, SamplingParams(200, temperature=0.0))
    async for chunk in engine.generate(request):
        tokens += chunk.token_ids
        versions += chunk.versions
        logprobs += chunk.logprobs
        if len(tokens) == 5:
            await engine.pause(PauseMode.KEEP)
            await engine.update_weights(WeightSource(1, str(folder_of("qwen3", 1))))
            await engine.resume()
    border = versions.index(1)
    assert versions == [0] * border + [1] * (200 - border)
    assert 5 <= border < 200
    old = oracle_of("qwen3", 0).greedy(prompt, border)
    assert tokens[:border] == old[0]
    mixed = mixed_logprobs(
        oracle_of("qwen3", 0).model, oracle_of("qwen3", 1).model, prompt + tokens, len(prompt), border
    )
    assert logprobs[border:] == pytest.approx(mixed, abs=1e-4)
    follow = prompt + tokens + [4, 5]
    result = await ask(engine, follow, 10, name="next", session="s")
    assert result.cached == 0
    assert result.versions == [1] * 10
    assert_equal_to(oracle_of("qwen3", 1), follow, result)


def mixed_logprobs(old: Any, new: Any, ids: list[int], prompt: int, border: int) -> list[float]:
    """Logprobs of ids[prompt + border:] under the new model over KV that the old one computed up to the update: the
    inputs of the first `border` samples, ids[: prompt + border - 1]."""
    import torch

    cut = prompt + border - 1
    with torch.inference_mode():
        past = old(torch.tensor([ids[:cut]]), use_cache=True).past_key_values
        logits = new(torch.tensor([ids[cut:-1]]), past_key_values=past, use_cache=True).logits[0].float()
    rows = torch.log_softmax(logits, -1)
    return [float(rows[i, token]) for i, token in enumerate(ids[cut + 1 :])]


async def test_calls_in_their_prompt_start_again_after_an_update(
    engines: Any, oracle_of: Any, ask: Any, folder_of: Any
) -> None:
    engine = await engines(prefill_tokens=16)
    prompt = prompt_of(300)
    task = asyncio.create_task(ask(engine, prompt, 5))
    while not (await engine.load()).prefilled_tokens:
        await asyncio.sleep(0)
    await engine.pause()
    await engine.update_weights(WeightSource(1, str(folder_of("qwen3", 1))))
    await engine.resume()
    result = await task
    if result.versions[0] == 1:
        assert_equal_to(oracle_of("qwen3", 1), prompt, result)


def copy_kv(source: Any, target: Any, from_blocks: Any, to_blocks: Any, size: int) -> None:
    for left, right in zip(source.kv_regions(), target.kv_regions(), strict=True):
        for a, b in zip(from_blocks, to_blocks, strict=True):
            ctypes.memmove(right.addr + int(b) * size, left.addr + int(a) * size, size)


@pytest.mark.parametrize("sampled", [1, 20])
async def test_a_session_moves_between_engines_with_no_token_computed_again(
    sampled: int, engines: Any, oracle_of: Any, ask: Any
) -> None:
    a, b = await engines(chunk_tokens=1), await engines(chunk_tokens=1)
    prompt = prompt_of(50)
    stream = a.generate(GenerateRequest("r", "s", prompt, SamplingParams(2000, temperature=0.0)))
    tokens: list[int] = []
    frozen = None
    async for chunk in stream:
        tokens += chunk.token_ids
        if frozen is None and len(tokens) >= sampled:
            assert (await a.kv_pin("s")) is not None
            frozen = await a.kv_freeze("s")
    assert chunk.finish is FinishReason.ABORT
    assert frozen.version == 0
    assert list(frozen.token_ids) == (prompt + tokens)[:-1]
    blocks = await b.kv_reserve("s", len(frozen.token_ids), 0)
    copy_kv(a, b, frozen.block_ids, blocks, a.kv_regions()[0].block_bytes)
    await b.kv_commit("s", 0, frozen.token_ids, blocks)
    await a.kv_release("s", frozen.generation, forget=True)
    before = (await b.load()).prefilled_tokens
    result = await ask(b, prompt + tokens, 15, name="r2", session="s")
    assert result.cached == len(prompt) + len(tokens) - 1
    assert (await b.load()).prefilled_tokens - before <= 1  # the last token, whose KV nobody has
    assert_equal_to(oracle_of(), prompt + tokens, result)


async def test_chunks_put_together_equal_the_call_in_one(engines: Any, ask: Any) -> None:
    one, many = await engines(chunk_tokens=1), await engines(chunk_tokens=64, chunk_seconds=10.0)
    prompt = prompt_of(33)
    small = await ask(one, prompt, 30, temperature=1.0, seed=5)
    large = await ask(many, prompt, 30, temperature=1.0, seed=5)
    assert small.ids == large.ids
    assert small.logprobs == large.logprobs
    assert len(large.chunks) == 1 < len(small.chunks)
    assert np.isfinite(small.logprobs).all()


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.3), ("float64", 1e-4)])
async def test_other_dtypes_stay_near_float32(dtype: str, bound: float, engines: Any, oracle_of: Any, ask: Any) -> None:
    """bfloat16 has 8 bits: its logprobs differ, but not wildly; float64 only by float32's own rounding."""
    engine = await engines(dtype=dtype)
    prompt = prompt_of(60)
    result = await ask(engine, prompt, 20)
    rows = oracle_of().logprobs(prompt + result.ids)[len(prompt) - 1 : -1]
    gaps = [abs(float(row[t]) - x) for row, t, x in zip(rows, result.ids, result.logprobs, strict=True)]
    assert float(np.mean(gaps)) < bound
    assert engine.kv_shape().dtype == dtype
    assert sum(r.nbytes for r in engine.kv_regions()) == 4096 * 3 * 2 * 2 * 24 * {"bfloat16": 2, "float64": 8}[dtype]


async def test_a_session_may_fill_the_whole_pool(engines: Any, oracle_of: Any, ask: Any) -> None:
    """Every block is the session's own cached context: the next turn must still find room, tail and all."""
    engine = await engines(kv_tokens=128)
    context = prompt_of(100)
    for turn, room in enumerate((12, 6, 4)):
        result = await asyncio.wait_for(ask(engine, context, room, name=f"t{turn}", session="s"), 60)
        assert_equal_to(oracle_of(), context, result)
        context = [*context, *result.ids]
    result = await asyncio.wait_for(ask(engine, context, 99, name="last", session="s"), 60)
    assert len(context) + len(result.ids) == 128
    assert result.finish is FinishReason.LENGTH
    assert_equal_to(oracle_of(), context, result)


async def test_calls_wait_for_blocks_that_a_mover_holds(engines: Any, oracle_of: Any, ask: Any) -> None:
    """Pinned and reserved blocks are out of reach; what needs them runs when they are given back."""
    engine = await engines(kv_tokens=256)
    await ask(engine, prompt_of(100, 1), 4, session="pinned")
    pinned = await engine.kv_pin("pinned")
    assert await engine.kv_reserve("coming", 100, 0) is not None
    prompt = prompt_of(90, 2)
    waiting = asyncio.create_task(ask(engine, prompt, 8, name="waiting"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert (await engine.load()).waiting == 1
    await engine.kv_cancel("coming")
    assert_equal_to(oracle_of(), prompt, await asyncio.wait_for(waiting, 60))
    await engine.kv_release("pinned", pinned.generation, forget=False)
