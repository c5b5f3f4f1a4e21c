"""Calls against a protocol-true stand-in: tokens, versions, aborts, pauses, updates."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gyre_core import (
    CapabilityError,
    ComponentContext,
    ContextLengthError,
    EngineCapability,
    FinishReason,
    InfrastructureError,
    PauseMode,
    WeightSource,
)
from gyre_core.testing.engine_rig import Watched, call, eventually, is_idle, request_of
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import DETERMINISTIC, SGLangOptions

PROMPT = list(range(40))


async def test_a_call_has_tokens_logprobs_and_versions(engine_of: Any, toy: Any) -> None:
    engine, _ = await engine_of()
    result = await call(engine, PROMPT, 20, name="a")
    assert result.ids == toy.tokens(PROMPT, ["0"] * 20)
    assert result.logprobs == [toy.logprob("0", token) for token in result.ids]
    assert result.versions == [0] * 20
    assert result.finish is FinishReason.LENGTH
    again = await call(engine, [*PROMPT, *result.ids, 5], 4, name="b")
    assert again.cached == (40 + 20 - 1) // 16 * 16
    load = await engine.load()
    assert (load.sampled_tokens, load.cached_tokens, load.prefilled_tokens) == (24, 48, 40 + 61 - 48)
    assert await is_idle(engine)


async def test_cumulative_streams_are_read_too(engine_of: Any, toy: Any) -> None:
    engine, _ = await engine_of(incremental=False)
    result = await call(engine, PROMPT, 15)
    assert result.ids == toy.tokens(PROMPT, ["0"] * 15)
    assert len(result.logprobs) == 15


async def test_only_the_stop_tokens_that_were_asked_for_end_a_call(engine_of: Any, toy: Any) -> None:
    """The model's own end tokens stop the server's requests too, once any stop token is given: the call goes on."""
    whole = toy.tokens(PROMPT, ["0"] * 30)
    engine, fake = await engine_of(eos=3)
    stop = next(token for token in whole[12:] if token not in whole[:12] and token % 3)
    result = await call(engine, PROMPT, 30, stop_token_ids=(stop,))
    assert result.ids == whole[: whole.index(stop) + 1]
    assert result.finish is FinishReason.STOP
    assert sum(path == "/generate" for path, _ in fake.asked) > 2


async def test_bad_prompts_never_reach_the_server(engine_of: Any) -> None:
    engine, fake = await engine_of(context_length=100)
    for ids in ([], [320], [-1], [[1, 2]]):
        with pytest.raises(ValueError, match="call"):
            await call(engine, ids, 3)
    with pytest.raises(ContextLengthError, match="99 or fewer"):
        await call(engine, [1] * 100, 3)
    assert not any(path == "/generate" for path, _ in fake.asked)
    assert len((await call(engine, [1] * 99, 3)).ids) == 1


async def test_an_update_in_mid_call_marks_each_token(engine_of: Any, toy: Any, version: Any) -> None:
    engine, fake = await engine_of()
    running = Watched(engine, request_of(PROMPT, 120, name="a"))
    await running.until(5)
    await engine.update_weights(version(1))
    result = await running.task
    border = result.versions.count(0)
    assert result.versions == [0] * border + [1] * (120 - border)
    assert 5 <= border < 120
    assert result.ids == toy.tokens(PROMPT, [str(v) for v in result.versions])
    assert result.logprobs == [toy.logprob(str(v), t) for v, t in zip(result.versions, result.ids, strict=True)]
    assert (await call(engine, PROMPT, 3, name="b")).cached == 0
    body = [body for path, body in fake.asked if path == "/update_weights_from_disk"][-1]
    assert (body["abort_all_requests"], body["flush_cache"]) == (False, False)


async def test_a_call_without_a_token_begins_anew_under_new_weights(engine_of: Any, toy: Any, version: Any) -> None:
    """Its tokens will all say the new version: so its prompt must not be computed, or found in a cache, by the old."""
    engine, fake = await engine_of()
    await call(engine, PROMPT, 3, name="before")
    fake.step_s = 2.0  # to a call's first token
    running = Watched(engine, request_of(PROMPT, 20, name="a"))
    while not fake.running:
        await asyncio.sleep(0.005)
    changing = asyncio.create_task(engine.update_weights(version(1)))
    await asyncio.sleep(0.05)
    fake.step_s = 0.002
    await changing
    result = await running.task
    assert result.ids == toy.tokens(PROMPT, ["1"] * 20)
    assert result.versions == [1] * 20
    assert result.cached == 0
    keys = [body["extra_key"] for path, body in fake.asked if path == "/generate"][1:]
    assert len(keys) == len(set(keys)) == 2


async def test_an_answer_that_is_read_seldom_misses_nothing(engine_of: Any, toy: Any, version: Any) -> None:
    """Read once an hour: a call's first token, its end and a change of weights come through at once all the same."""
    engine, _ = await engine_of(chunk_s=3600.0, stall_s=7200.0)
    whole = await call(engine, PROMPT, 60, name="whole")
    assert whole.ids == toy.tokens(PROMPT, ["0"] * 60)
    assert len(whole.chunks) < 10
    running = Watched(engine, request_of(PROMPT, 120, name="a"))
    await running.until(1)
    for number in (1, 2):
        await asyncio.sleep(0.05)
        await engine.update_weights(version(number))
    result = await running.task
    assert result.versions == sorted(result.versions)
    assert {0, 1, 2} == set(result.versions)
    assert result.ids == toy.tokens(PROMPT, [str(v) for v in result.versions])
    cut = Watched(engine, request_of(PROMPT, 900, name="cut"))
    await cut.until(1)
    await asyncio.sleep(0.05)
    before = (await engine.load()).sampled_tokens
    await engine.pause()
    assert (await engine.load()).sampled_tokens > before
    await engine.resume()
    await engine.abort("cut")
    part = await cut.task
    assert part.finish is FinishReason.ABORT
    assert part.ids == toy.tokens(PROMPT, ["2"] * len(part.ids))


async def test_an_update_may_recompute_what_runs(engine_of: Any, toy: Any, version: Any) -> None:
    engine, fake = await engine_of(on_update="recompute")
    running = Watched(engine, request_of(PROMPT, 90, name="a"))
    await running.until(5)
    await engine.update_weights(version(1))
    result = await running.task
    assert result.versions == sorted(result.versions)
    assert result.ids == toy.tokens(PROMPT, [str(v) for v in result.versions])
    assert 1 in result.versions
    keys = [body["extra_key"] for path, body in fake.asked if path == "/generate"]
    assert len(keys) == len(set(keys)) == 2
    assert not any(path == "/pause_generation" for path, _ in fake.asked)


@pytest.mark.parametrize("how", ["keep", "recompute"])
async def test_an_update_of_a_paused_server_lets_what_must_begin_anew_end(
    engine_of: Any, toy: Any, version: Any, how: str
) -> None:
    """SGLang ends no call while it is paused; the caller's pause holds all the same."""
    engine, fake = await engine_of(on_update=how)
    running = Watched(engine, request_of(PROMPT, 90, name="a"))
    await running.until(5)
    fake.step_s, quick = 0.5, fake.step_s
    unsampled = Watched(engine, request_of(PROMPT[:7], 4, name="b"))
    while len(fake.running) < 2:
        await asyncio.sleep(0.001)
    await engine.pause(PauseMode.KEEP)
    async with asyncio.timeout(30):
        await engine.update_weights(version(1))
    assert engine._held
    assert fake.paused
    sampled = sum(len(request.out) for request in fake.running.values())
    await asyncio.sleep(0.05)
    assert sampled == sum(len(request.out) for request in fake.running.values())
    assert not unsampled.task.done()
    fake.step_s = quick
    await engine.resume()
    for watched, prompt in ((running, PROMPT), (unsampled, PROMPT[:7])):
        result = await watched.task
        assert result.versions == sorted(result.versions)
        assert result.ids == toy.tokens(prompt, [str(v) for v in result.versions])
        assert result.versions[-1] == 1
    assert (await unsampled.task).versions == [1] * 4


async def test_a_wrong_account_of_versions_is_an_error(engine_of: Any, version: Any) -> None:
    """Tokens that came late would bear the new version: the server's own spans tell."""
    engine, _ = await engine_of(fault="spans")
    running = Watched(engine, request_of(PROMPT, 120, name="a"))
    await running.until(5)
    await engine.update_weights(version(1))
    with pytest.raises(InfrastructureError, match="by the server's account"):
        await running.task


async def test_a_version_that_comes_back_finds_nothing_old(engine_of: Any, version: Any) -> None:
    engine, fake = await engine_of()
    await call(engine, PROMPT, 3, name="a")
    through = Watched(engine, request_of(PROMPT, 60, name="through"))
    await through.until(2)
    await engine.update_weights(version(1))
    await through.task
    await engine.update_weights(version(0))
    assert (await call(engine, PROMPT, 3, name="b")).cached == 0
    assert len({body["extra_key"] for path, body in fake.asked if path == "/generate"}) == 2


@pytest.mark.parametrize("break_it", ["missing", "cut", "shape", "number"])
async def test_a_version_that_cannot_be_used_is_refused_before_the_server_hears_of_it(
    engine_of: Any, version: Any, break_it: str
) -> None:
    engine, fake = await engine_of()
    running = Watched(engine, request_of(PROMPT, 60, name="a"))
    await running.until(2)
    with pytest.raises(InfrastructureError, match="policy version 7"):
        await engine.update_weights(version(7, break_it))
    assert (await running.task).versions == [0] * 60
    assert engine.version == 0
    assert sum(path == "/update_weights_from_disk" for path, _ in fake.asked) == 1  # the one of the start


async def test_an_update_that_is_refused_lets_calls_go_on(engine_of: Any, version: Any) -> None:
    engine, fake = await engine_of()
    running = Watched(engine, request_of(PROMPT, 80, name="a"))
    await running.until(2)
    fake.fault = "update-1"
    with pytest.raises(InfrastructureError, match="Failed to get weights iterator"):
        await engine.update_weights(version(1))
    assert (await running.task).versions == [0] * 80


async def test_an_abort_keeps_what_was_sampled(engine_of: Any, toy: Any) -> None:
    engine, _ = await engine_of()
    running = Watched(engine, request_of(PROMPT, 500, name="a"))
    await running.until(4)
    assert await engine.abort("a") is True
    result = await running.task
    assert result.finish is FinishReason.ABORT
    assert result.ids == toy.tokens(PROMPT, ["0"] * len(result.ids))
    assert await engine.abort("a") is False


async def test_an_abort_hits_nobody_else(engine_of: Any) -> None:
    """The server aborts every request whose id begins with the one it is given."""
    engine, fake = await engine_of()
    calls = [Watched(engine, request_of(PROMPT, 150, name=name)) for name in ("c1", "c10", "c11")]
    for watched in calls:
        await watched.until(2)
    await engine.abort("c1")
    results = [await watched.task for watched in calls]
    assert [r.finish for r in results] == [FinishReason.ABORT, FinishReason.LENGTH, FinishReason.LENGTH]
    assert len({len(body["rid"]) for path, body in fake.asked if path == "/generate"}) == 1


async def test_a_caller_that_goes_away_frees_its_slot(engine_of: Any) -> None:
    engine, fake = await engine_of()
    stream = engine.generate(request_of(PROMPT, 900, name="a"))
    async for _ in stream:
        break
    await stream.aclose()
    task = asyncio.create_task(call(engine, PROMPT, 900, name="b"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await eventually(lambda: is_idle(engine))
    assert not fake.running


async def test_pauses(engine_of: Any) -> None:
    engine, _ = await engine_of()
    kept = Watched(engine, request_of(PROMPT, 60, name="kept"))
    await kept.until(2)
    await engine.pause(PauseMode.KEEP)
    late = Watched(engine, request_of(PROMPT, 5, name="late"))
    cut = Watched(engine, request_of(PROMPT, 5, name="cut"))
    sampled = (await engine.load()).sampled_tokens
    await asyncio.sleep(0.05)
    load = await engine.load()
    assert load.sampled_tokens == sampled
    assert (load.slots_running, load.waiting) == (1, 2)
    await engine.abort("cut")
    assert (await cut.task).finish is FinishReason.ABORT
    await engine.resume()
    assert len((await kept.task).ids) == 60
    assert len((await late.task).ids) == 5
    ended = Watched(engine, request_of(PROMPT, 900, name="ended"))
    await ended.until(2)
    await engine.pause(PauseMode.ABORT)
    assert (await ended.task).finish is FinishReason.ABORT
    await engine.resume()
    assert len((await call(engine, PROMPT, 5)).ids) == 5


async def test_a_running_server_that_an_earlier_life_left_paused_goes_on(
    engine_of: Any, version: Any, context: ComponentContext
) -> None:
    """A cell that is killed while it loads weights leaves it so; it answers every question and samples nothing."""
    first, fake = await engine_of()
    fake.paused = True
    second = SGLangEngine(SGLangOptions(url=first.options.url), context)
    await second.start(version(1))
    try:
        async with asyncio.timeout(60):
            assert len((await call(second, PROMPT, 3, name="after")).ids) == 3
    finally:
        await second.close()


def test_before_its_start_an_engine_offers_what_it_was_told_to(context: ComponentContext) -> None:
    """Whoever checks a run asks before there is a server."""
    kinds = EngineCapability
    running = SGLangOptions(url="http://node7:30000", routed_experts=True)
    assert SGLangEngine(running, context).capabilities == {kinds.PAUSE, kinds.SLEEP, kinds.ROUTED_EXPERTS}
    ours = SGLangOptions(arguments=(DETERMINISTIC,))
    assert SGLangEngine(ours, context).capabilities == {kinds.PAUSE, kinds.SLEEP, kinds.SEED}
    assert SGLangEngine(SGLangOptions(), context).capabilities == {kinds.PAUSE, kinds.SLEEP}


async def test_a_running_server_is_asked_what_it_can_do_before_a_run(engine_of: Any, context: ComponentContext) -> None:
    kinds = EngineCapability
    for can, found in ((False, {kinds.PAUSE}), (True, {kinds.PAUSE, kinds.SLEEP, kinds.ROUTED_EXPERTS})):
        serving, fake = await engine_of(memory_saver=can, experts=can)
        asked = fake.counts.copy()
        other = SGLangEngine(SGLangOptions(url=serving.options.url, routed_experts=True), context)
        assert await other.look() == found
        assert {path for path in fake.counts if fake.counts[path] != asked[path]} <= {"/server_info"}
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:9"):
        await SGLangEngine(SGLangOptions(url="http://127.0.0.1:9"), context).look()


async def test_flushing_forgets_even_while_calls_run(engine_of: Any) -> None:
    engine, _ = await engine_of()
    await call(engine, PROMPT, 3, name="fill")
    running = Watched(engine, request_of([7] * 20, 80, name="running"))
    await running.until(1)
    await engine.flush_cache()
    assert (await call(engine, PROMPT, 3, name="after")).cached == 0
    assert len((await running.task).ids) == 80


async def test_what_is_not_offered_is_refused(engine_of: Any) -> None:
    engine, _ = await engine_of()
    assert engine.capabilities == {EngineCapability.PAUSE}
    plain = request_of(PROMPT, 3)
    wished = type(plain)(plain.request_id, plain.session, plain.prompt_ids, plain.sampling, True)
    with pytest.raises(CapabilityError, match="routed experts"):
        [chunk async for chunk in engine.generate(wished)]
    with pytest.raises(CapabilityError, match="memory saver"):
        await engine.sleep()
    with pytest.raises(CapabilityError):
        await engine.kv_pin("s")
    with pytest.raises(CapabilityError, match="kind 'carrier-pigeon'"):
        await engine.update_weights(WeightSource(1, "/", "carrier-pigeon"))


@pytest.mark.parametrize("ended", ["length", "abort"])
async def test_routed_experts_are_those_of_the_passes_that_made_the_tokens(engine_of: Any, ended: str) -> None:
    engine, _ = await engine_of(experts=True)
    assert EngineCapability.ROUTED_EXPERTS in engine.capabilities
    plain = request_of(PROMPT, 30 if ended == "length" else 900, name="a")
    watched = Watched(engine, type(plain)("a", "s", plain.prompt_ids, plain.sampling, True))
    if ended == "abort":
        assert await eventually(lambda: sampled(engine, 5))
        await engine.abort("a")
    (chunk,) = (await watched.task).chunks
    rows = chunk.routed_experts
    assert rows.shape == (len(chunk.token_ids), 3, 2)
    assert rows[:, 0, 0].tolist() == [len(PROMPT) - 1 + i for i in range(len(chunk.token_ids))]
    assert chunk.routed_from == len(PROMPT) - 1


async def test_experts_that_were_asked_for_and_did_not_come_are_told(engine_of: Any) -> None:
    engine, _ = await engine_of(experts=True, fault="no-experts")
    plain = request_of(PROMPT, 5, name="a")
    with pytest.raises(InfrastructureError, match="an answer without routed experts"):
        [chunk async for chunk in engine.generate(type(plain)("a", "s", PROMPT, plain.sampling, True))]


@pytest.mark.parametrize("first", [-3, 0, 25, len(PROMPT) - 1, len(PROMPT) + 7])
async def test_routed_experts_of_the_prompt_are_given_from_where_they_are_wanted(engine_of: Any, first: int) -> None:
    engine, _ = await engine_of(experts=True)
    plain = request_of(PROMPT, 5, name="a")
    (chunk,) = [c async for c in engine.generate(type(plain)("a", "s", PROMPT, plain.sampling, True, first))]
    at = min(max(first, 0), len(PROMPT) - 1)
    assert chunk.routed_from == at
    assert chunk.routed_experts[:, 0, 0].tolist() == list(range(at, len(PROMPT) + 4))


async def sampled(engine: Any, tokens: int) -> bool:
    return (await engine.load()).sampled_tokens >= tokens


async def test_a_server_with_a_memory_saver_sleeps_and_lives(engine_of: Any, version: Any) -> None:
    engine, fake = await engine_of(memory_saver=True)
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    await engine.sleep()
    assert (await running.task).finish is FinishReason.ABORT
    assert fake.released == {"kv_cache", "weights"}
    with pytest.raises(InfrastructureError):
        await call(engine, PROMPT, 2)
    with pytest.raises(InfrastructureError):
        await engine.sleep()
    assert (await engine.load()).slots_total == 0
    await engine.wake(version(1))
    with pytest.raises(InfrastructureError):
        await engine.wake(version(1))
    assert fake.released == set()
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
