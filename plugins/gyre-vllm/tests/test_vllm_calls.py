"""Calls against the protocol-true fake: tokens, versions, ends, bad requests, counters."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
from gyre_core import (
    CapabilityError,
    ContextLengthError,
    EngineCapability,
    FinishReason,
    GenerateRequest,
    InfrastructureError,
    PauseMode,
    SamplingParams,
    WeightSource,
)


def expected(fake: ModuleType, prompt: list[int], count: int, weights: int = 10) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(fake.token_after(ids, weights))
    return ids[len(prompt) :]


@pytest.mark.parametrize("every", [1, 5])
async def test_a_call_gives_each_token_once_with_its_logprob_and_version(
    served: Any, ask: Any, fake: ModuleType, every: int
) -> None:
    _, engine = await served({"stream_tokens": every})
    prompt = [1, 2, 3]
    result = await ask(engine, prompt, 23)
    assert result.ids == expected(fake, prompt, 23)
    assert result.logprobs == [fake.logprob_of(10)] * 23
    assert result.versions == [0] * 23
    assert result.finish is FinishReason.LENGTH
    assert [c.finish for c in result.chunks].count(None) == len(result.chunks) - 1
    assert sum(c.cached_tokens is not None for c in result.chunks) == 1


async def test_more_calls_than_slots(served: Any, ask: Any, fake: ModuleType) -> None:
    _, engine = await served()
    prompts = [[i, i + 1] for i in range(12)]
    found = await asyncio.gather(*(ask(engine, p, 9, name=f"c{i}") for i, p in enumerate(prompts)))
    for prompt, result in zip(prompts, found, strict=True):
        assert result.ids == expected(fake, prompt, 9)


async def test_a_stop_token_is_kept(served: Any, ask: Any, fake: ModuleType) -> None:
    _, engine = await served()
    whole = expected(fake, [5, 6], 20)
    result = await ask(engine, [5, 6], 20, stop_token_ids=(whole[4],))
    assert result.finish is FinishReason.STOP
    assert result.ids == whole[: whole.index(whole[4]) + 1]


async def test_the_request_says_what_the_protocol_promises(served: Any, ask: Any) -> None:
    server, engine = await served({"stream_tokens": 4})
    await ask(engine, [5, 6], 3, temperature=0.7, top_p=0.9, top_k=3, seed=-5)
    body = server.bodies[-1]
    how = body["sampling_params"]
    assert (how["temperature"], how["top_p"], how["top_k"]) == (0.7, 0.9, 3)
    assert how["seed"] >= 0
    assert how["ignore_eos"] is True
    assert how["logprobs"] == 0
    assert how["stream_interval"] == 4
    assert body["cache_salt"] == engine._state.salt


async def test_the_context_limit_is_an_end_not_an_error(served: Any, ask: Any, fake: ModuleType) -> None:
    _, engine = await served()
    result = await ask(engine, [1] * (fake.CONTEXT - 4), 50)
    assert len(result.ids) == 4
    assert result.finish is FinishReason.LENGTH
    with pytest.raises(ContextLengthError):
        await ask(engine, [1] * fake.CONTEXT, 5)


@pytest.mark.parametrize("prompt", [[], [-1], [97]])
async def test_a_bad_prompt_never_reaches_the_server(served: Any, ask: Any, prompt: list[int]) -> None:
    server, engine = await served()
    with pytest.raises(ValueError):
        await ask(engine, prompt, 4)
    assert server.bodies == []


async def test_the_counters_are_the_servers_own(served: Any, ask: Any) -> None:
    server, engine = await served()
    for name in ("a", "b"):
        await ask(engine, list(range(40)), 8, name=name)
    load = await engine.load()
    assert load.sampled_tokens == 16 == server.totals["generation"]
    assert load.cached_tokens == server.totals["local_cache_hit"] > 0
    assert load.prefilled_tokens == server.totals["local_compute"]
    assert load.kv_tokens_total == 8000
    assert load.slots_total == 4
    assert load.slots_running == load.waiting == load.kv_tokens_used == 0
    assert load.prefill_tokens_per_s is None, "so few tokens tell no speed"
    await ask(engine, list(range(96, 0, -1)), 1, name="c")
    assert (await engine.load()).prefill_tokens_per_s == pytest.approx(1000)


async def test_what_the_server_never_began_was_not_computed(served: Any, ask: Any, sources: list[WeightSource]) -> None:
    """A call that waits for a slot when the weights change is sent again, and its prompt computed once."""
    server, engine = await served(slots=1)
    chunks: list[Any] = []
    server.most = 40
    holder = asyncio.create_task(ask(engine, [9], 80, name="holder", into=chunks))
    while not chunks:
        await asyncio.sleep(0.002)
    waiting = asyncio.create_task(ask(engine, list(range(50)), 4, name="waiting"))
    while not server.waiting:
        await asyncio.sleep(0.002)
    await engine.update_weights(sources[1])
    server.most = 80
    assert len((await asyncio.wait_for(holder, 60)).ids) == 80
    assert (await asyncio.wait_for(waiting, 60)).versions == [1] * 4
    assert (await engine.load()).prefilled_tokens == server.totals["local_compute"] == 51


async def test_an_abort_brings_out_what_was_sampled(served: Any, ask: Any, fake: ModuleType) -> None:
    _, engine = await served({"stream_tokens": 7})
    chunks: list[Any] = []
    task = asyncio.create_task(ask(engine, [3], 200, name="cut", into=chunks))
    while len(chunks) < 3:
        await asyncio.sleep(0.002)
    assert await engine.abort("cut") is True
    result = await task
    assert result.finish is FinishReason.ABORT
    assert result.ids == expected(fake, [3], len(result.ids))
    assert await engine.abort("cut") is False


async def test_closing_the_iterator_frees_the_slot(served: Any) -> None:
    server, engine = await served()
    stream = engine.generate(GenerateRequest("x", "s", [1], SamplingParams(200)))
    async for _ in stream:
        break
    await stream.aclose()
    for _ in range(6000):
        if not server.running:
            break
        await asyncio.sleep(0.01)
    assert not server.running
    assert not engine._state.calls


async def test_a_wish_for_experts_is_refused_when_the_server_gives_none(served: Any) -> None:
    _, engine = await served()
    assert EngineCapability.ROUTED_EXPERTS not in engine.capabilities
    with pytest.raises(CapabilityError):
        [c async for c in engine.generate(GenerateRequest("x", "s", [1], SamplingParams(2), routed_experts=True))]


@pytest.mark.parametrize(("wanted", "first"), [(None, 29), (0, 0), (20, 20), (-1, 0), (99, 29)])
async def test_experts_come_from_where_they_are_wanted(
    served: Any, sources: list[WeightSource], wanted: int | None, first: int
) -> None:
    server, engine = await served({"routed_experts": True}, start=False)
    server.experts = True
    await engine.start(sources[0])
    assert EngineCapability.ROUTED_EXPERTS in engine.capabilities
    request = GenerateRequest("x", "s", list(range(30)), SamplingParams(6), True, wanted)
    *_, last = [chunk async for chunk in engine.generate(request)]
    assert last.routed_from == first
    assert last.routed_experts[:, 0, 0].tolist() == list(range(first, 30 + 6 - 1))


async def test_experts_that_do_not_come_are_missed(served: Any) -> None:
    _, engine = await served({"routed_experts": True})
    with pytest.raises(InfrastructureError, match="without routed experts"):
        [c async for c in engine.generate(GenerateRequest("x", "s", [1], SamplingParams(2), routed_experts=True))]


async def test_without_our_extension_only_what_the_server_can_give_is_promised(served: Any, ask: Any) -> None:
    """Raw logprobs are those of temperature 1; anything else would be another distribution's."""
    _, engine = await served(extension=False)
    assert EngineCapability.SLEEP not in engine.capabilities
    assert len((await ask(engine, [1], 3, temperature=1.0, top_p=0.5)).ids) == 3
    with pytest.raises(CapabilityError):
        await ask(engine, [1], 3, temperature=0.7)


async def test_every_question_about_kv_is_refused(served: Any) -> None:
    _, engine = await served()
    assert EngineCapability.KV_MOVE not in engine.capabilities
    for question in (engine.kv_shape, engine.kv_regions):
        with pytest.raises(CapabilityError):
            question()
    asks = (
        engine.kv_pin("s"), engine.kv_freeze("s"), engine.kv_unfreeze("s"), engine.kv_cancel("s"),
        engine.kv_release("s", 1, forget=True), engine.kv_reserve("s", 1, 0), engine.kv_commit("s", 0, None, None),  # type: ignore[arg-type]
    )  # fmt: skip
    for asked in asks:
        with pytest.raises(CapabilityError):
            await asked


async def test_a_closed_engine_answers_nobody(served: Any, ask: Any, sources: list[WeightSource]) -> None:
    server, engine = await served(start=False)
    with pytest.raises(InfrastructureError):
        await ask(engine, [1], 2)
    await engine.start(sources[0])
    chunks: list[Any] = []
    running = asyncio.create_task(ask(engine, [3], 240, into=chunks))
    while not chunks:
        await asyncio.sleep(0.002)
    await engine.pause(PauseMode.KEEP)
    await engine.close()
    (result,) = await asyncio.gather(running, return_exceptions=True)
    assert isinstance(result, InfrastructureError)
    with pytest.raises(InfrastructureError):
        await ask(engine, [1], 2)
    assert not server.paused, "a server of somebody else's must not be left paused"
