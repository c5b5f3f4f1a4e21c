"""Checks of calls: tokens, logprobs, chunks, ends, bad input, cached prefixes, counters.

Part of `gyre_core.testing.engines.EngineConformance`; see there.
"""

from __future__ import annotations

import asyncio

import pytest

from gyre_core.engine import EngineCapability, FinishReason
from gyre_core.errors import CapabilityError, ContextLengthError, InfrastructureError
from gyre_core.testing.engine_rig import (
    Called,
    EngineRig,
    Watched,
    assert_greedy,
    call,
    eventually,
    is_idle,
    needs,
    request_of,
)


class CallChecks:
    """What every engine must do with calls."""

    async def test_greedy_tokens_and_logprobs_are_those_of_transformers(self, rig: EngineRig) -> None:
        """Alone and in one batch, short prompts and long."""
        async with rig.started() as engine:
            prompts = [rig.prompt(n, n) for n in (1, 2, 17, 64, 130)]
            called = await asyncio.gather(*(call(engine, p, 12, name=f"c{i}") for i, p in enumerate(prompts)))
            for prompt, result in zip(prompts, called, strict=True):
                assert len(result.ids) == 12
                assert_greedy(rig, 0, prompt, result)

    async def test_logprobs_are_of_the_tempered_distribution_over_the_whole_vocabulary(self, rig: EngineRig) -> None:
        """Neither raw logits' nor renormalised after top-k and top-p: what an importance ratio needs."""
        async with rig.started() as engine:
            prompt = rig.prompt(20)
            for index, how in enumerate(
                ({"temperature": 0.7}, {"temperature": 1.4, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3})
            ):
                result = await call(engine, prompt, 10, name=f"t{index}", **how)
                expected = rig.oracle().of_sampled(prompt, result.ids, how["temperature"])
                assert result.logprobs == pytest.approx(expected, abs=rig.tolerance)

    async def test_top_k_and_top_p_cut_the_tail(self, rig: EngineRig) -> None:
        """No token outside the kept set is ever sampled, and more than one inside it is."""
        async with rig.started() as engine:
            prompt = rig.prompt(16, 3)
            flat = next(
                t
                for t in (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
                if rig.oracle().logprobs(prompt, t)[-1].exp().topk(4).values.sum() < 0.7
            )  # flat enough that an engine which ignores the cut shows it
            row = rig.oracle().logprobs(prompt, flat)[-1]
            order = row.argsort(descending=True).tolist()
            mass = row.exp()[order].cumsum(0).tolist()
            nucleus = next(i for i, total in enumerate(mass) if total >= 0.6 + 1e-3) + 1
            asks = [call(engine, prompt, 1, name=f"k{i}", temperature=flat, top_k=4) for i in range(40)]
            asks += [call(engine, prompt, 1, name=f"p{i}", temperature=flat, top_p=0.6) for i in range(40)]
            found = [result.ids[0] for result in await asyncio.gather(*asks)]
            assert set(found[:40]) <= set(order[:4])
            assert set(found[40:]) <= set(order[:nucleus])
            assert len(set(found[:40])) > 1

    async def test_a_call_does_not_feel_its_neighbours(self, rig: EngineRig) -> None:
        """More calls than slots, of all lengths: each is as if it were alone."""
        async with rig.started() as engine:
            slots = (await engine.load()).slots_total
            prompts = [rig.prompt(3 + 7 * (i % 13), i) for i in range(min(2 * slots, 40))]
            asks = (call(engine, p, 4 + i % 9, name=f"n{i}") for i, p in enumerate(prompts))
            called = await rig.within(asyncio.gather(*asks))
            for index, (prompt, result) in enumerate(zip(prompts, called, strict=True)):
                assert len(result.ids) == 4 + index % 9
                assert_greedy(rig, 0, prompt, result)

    async def test_chunks_are_well_formed(self, rig: EngineRig) -> None:
        """Equal lengths; `cached_tokens` on one chunk, `finish` on the last alone."""
        async with rig.started() as engine:
            result = await call(engine, rig.prompt(9), 40)
            for index, chunk in enumerate(result.chunks):
                assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
                assert (chunk.finish is not None) == (index == len(result.chunks) - 1)
            assert sum(chunk.cached_tokens is not None for chunk in result.chunks) == 1
            assert result.versions == [rig.sources[0].version] * 40

    async def test_a_stop_token_ends_the_call_and_is_its_last_token(self, rig: EngineRig) -> None:
        """Swallowing it is how trained and sampled tokens come to differ at every turn's end."""
        async with rig.started() as engine:
            prompt = rig.prompt(12)
            free = await call(engine, prompt, 12, name="free")
            stop = free.ids[5]
            at = free.ids.index(stop)
            result = await call(engine, prompt, 12, name="stopped", stop_token_ids=(stop,))
            assert result.finish is FinishReason.STOP
            assert result.ids == free.ids[: at + 1]
            assert free.finish is FinishReason.LENGTH

    async def test_the_context_limit_ends_a_call_with_length(self, rig: EngineRig) -> None:
        """No token is made up beyond it."""
        async with rig.started() as engine:
            prompt = rig.prompt(rig.max_context - 6)
            result = await call(engine, prompt, 50)
            assert result.finish is FinishReason.LENGTH
            assert 1 <= len(result.ids) <= 7
            assert_greedy(rig, 0, prompt, result)

    async def test_a_seed_fixes_the_tokens_whatever_else_runs(self, rig: EngineRig) -> None:
        """The same seed gives the same tokens in any company; another seed gives others."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.SEED)
            prompt = rig.prompt(15)
            how = {"temperature": 1.0, "session": "s"}
            alone = await call(engine, prompt, 20, name="a", seed=11, **how)
            company = [call(engine, rig.prompt(5 + i, i), 10, name=f"x{i}", temperature=1.0) for i in range(5)]
            again, other, *_ = await asyncio.gather(
                call(engine, prompt, 20, name="b", seed=11, **how),
                call(engine, prompt, 20, name="c", seed=12, **how),
                *company,
            )
            assert again.ids == alone.ids
            assert other.ids != alone.ids

    async def test_calls_without_a_seed_differ(self, rig: EngineRig) -> None:
        """The attempts of a group must not be copies."""
        async with rig.started() as engine:
            prompt = rig.prompt(15)
            asks = (call(engine, prompt, 12, name=f"g{i}", temperature=1.0) for i in range(4))
            found = [tuple(result.ids) for result in await asyncio.gather(*asks)]
            assert len(set(found)) > 1

    async def test_a_bad_request_fails_alone(self, rig: EngineRig) -> None:
        """ValueError for that call, ContextLengthError if it is too long (the agent's limit, not our fault); the ones
        that run and the engine go on (one such id kills some servers)."""
        async with rig.started() as engine:
            prompt = rig.prompt(10)
            running = Watched(engine, request_of(prompt, 60, name="running"))
            await running.until(1)
            bad = {
                "above the vocabulary": [*prompt, rig.vocab + 7],
                "negative": [*prompt, -1],
                "empty": [],
                "too long": rig.prompt(4 * rig.max_context + 64),
            }
            for name, ids in bad.items():
                with pytest.raises(ContextLengthError if name == "too long" else ValueError):
                    await rig.within(call(engine, ids, 4, name=name))
            result = await rig.within(running.task)
            assert len(result.ids) == 60
            assert_greedy(rig, 0, prompt, result)
            assert await eventually(lambda: is_idle(engine))

    async def test_a_turn_finds_its_session_in_the_cache(self, rig: EngineRig) -> None:
        """The next prompt is the old context plus new tokens: nothing old is computed again, nothing changes."""
        async with rig.started() as engine:
            context = rig.prompt(70)
            first = await call(engine, context, 30, name="t0", session="s")
            follow = [*context, *first.ids, *rig.prompt(9, 1)]
            second = await call(engine, follow, 10, name="t1", session="s")
            known = len(context) + 30 - 1  # the last sampled token was never an input
            assert second.cached >= known // rig.cache_block * rig.cache_block
            assert second.cached < len(follow)
            assert_greedy(rig, 0, follow, second)

    async def test_the_counters_add_up(self, rig: EngineRig) -> None:
        """Each prompt token was either computed or found; each sampled token counts once."""
        async with rig.started() as engine:
            before = await engine.load()
            prompts = [rig.prompt(40, 1), rig.prompt(40, 1), rig.prompt(25, 2)]
            called = [await call(engine, p, 8, name=f"c{i}") for i, p in enumerate(prompts)]
            after = await engine.load()
            cached = sum(result.cached for result in called)
            assert after.cached_tokens - before.cached_tokens == cached
            assert after.prefilled_tokens - before.prefilled_tokens == sum(map(len, prompts)) - cached
            assert after.sampled_tokens - before.sampled_tokens == 24

    async def test_the_load_is_of_now(self, rig: EngineRig) -> None:
        """Running calls and their KV show while they run and are gone when they are."""
        async with rig.started() as engine:
            idle = await engine.load()
            assert idle.slots_total > 0
            assert idle.kv_tokens_total >= rig.max_context
            assert idle.version == rig.sources[0].version == engine.version
            running = Watched(engine, request_of(rig.prompt(40), 120))
            await running.until(1)
            load = await engine.load()
            # A call whose tokens are all sampled is over, though its last ones may still be on their way to us.
            if not running.task.done() and load.sampled_tokens - idle.sampled_tokens < 120:
                assert load.slots_running == 1
                assert load.kv_tokens_used >= 40
            await rig.within(running.task)
            assert await eventually(lambda: is_idle(engine))

    async def test_an_abort_loses_no_token(self, rig: EngineRig) -> None:
        """What was sampled comes out, as the beginning of what the whole call gives; unknown ids say False."""
        async with rig.started() as engine:
            prompt = rig.prompt(22)
            whole = await call(engine, prompt, 100, name="whole")
            running = Watched(engine, request_of(prompt, 100, name="cut"))
            await running.until(3)
            known = await engine.abort("cut")
            result: Called = await rig.within(running.task)
            assert result.ids == whole.ids[: len(result.ids)]
            assert result.finish is (FinishReason.ABORT if known else FinishReason.LENGTH)
            assert len(result.ids) >= 3
            assert await engine.abort("cut") is False
            assert await engine.abort("never there") is False

    async def test_a_caller_that_goes_away_frees_its_slot(self, rig: EngineRig) -> None:
        """Closing the iterator early aborts the call."""
        async with rig.started() as engine:
            stream = engine.generate(request_of(rig.prompt(30), rig.max_context - 40, name="left"))
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            assert await eventually(lambda: is_idle(engine))
            task = asyncio.create_task(call(engine, rig.prompt(31), rig.max_context - 40, name="cancelled"))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await eventually(lambda: is_idle(engine))

    async def test_routed_experts_are_there_or_refused(self, rig: EngineRig) -> None:
        """Never silently missing: the trainer would replay nothing."""
        async with rig.started() as engine:
            plain = request_of(rig.prompt(6), 3)
            wished = type(plain)(plain.request_id, plain.session, plain.prompt_ids, plain.sampling, True)
            if EngineCapability.ROUTED_EXPERTS not in engine.capabilities:
                with pytest.raises(CapabilityError):
                    [chunk async for chunk in engine.generate(wished)]
                return
            for first in (None, 0, 4):
                wished = type(plain)(f"e{first}", "s", plain.prompt_ids, plain.sampling, True, first)
                chunks = [chunk async for chunk in engine.generate(wished)]
                experts = [(chunk.routed_from, chunk.routed_experts) for chunk in chunks]
                known = [(5 if begins is None else begins, rows) for begins, rows in experts if rows is not None]
                assert all(len(rows.shape) == 3 for _, rows in known)
                assert known[0][0] >= (5 if first is None else first), "rows that nobody asked for"
                assert known[0][0] <= 5, "the pass over the prompt's last token made the first token"
                assert sum(rows.shape[0] for _, rows in known) == 6 + 3 - 1 - known[0][0], "a row for each pass"

    async def test_calls_outside_its_life_are_refused(self, rig: EngineRig) -> None:
        """Before start and after close: InfrastructureError, and nobody waits for ever."""
        engine = rig.make()
        assert engine.version == -1
        with pytest.raises(InfrastructureError):
            await rig.within(call(engine, rig.prompt(4), 2))
        await engine.start(rig.sources[0])
        running = Watched(engine, request_of(rig.prompt(9), rig.max_context - 20))
        await running.until(1)
        await engine.close()
        (result,) = await rig.within(asyncio.gather(running.task, return_exceptions=True))
        assert isinstance(result, InfrastructureError) or result.finish in (FinishReason.ABORT, FinishReason.LENGTH)
        with pytest.raises(InfrastructureError):
            await rig.within(call(engine, rig.prompt(4), 2))
