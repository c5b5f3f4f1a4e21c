"""Checks of pausing, changing weights and sleeping: no token lost, no KV of an old policy used.

Part of `gyre_core.testing.engines.EngineConformance`; see there.
"""

from __future__ import annotations

import asyncio

import pytest

from gyre_core.engine import EngineCapability, FinishReason, PauseMode, WeightSource
from gyre_core.errors import InfrastructureError
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, eventually, is_idle, needs, request_of


class VersionChecks:
    """What every engine must do with policy versions; pausing and sleeping where it offers them."""

    async def test_an_update_in_mid_call_marks_each_token_with_its_version(self, rig: EngineRig) -> None:
        """Versions never fall, change once, and the call loses nothing. An update that a fast engine outruns is asked
        for again during another call, until one comes in the middle."""
        async with rig.started() as engine:
            prompt, tokens = rig.prompt(30), min(200, rig.max_context - 40)
            for turn in range(20):
                old, new = engine.version, rig.sources[1].version + turn
                running = Watched(engine, request_of(prompt, tokens, name=f"c{turn}"))
                await running.until(3)
                await rig.within(engine.update_weights(WeightSource(new, rig.sources[(turn + 1) % 2].location)))
                result = await rig.within(running.task)
                border = result.versions.count(old)
                assert result.versions == [old] * border + [new] * (tokens - border)
                assert border >= 3
                oracle = rig.oracle(turn % 2)
                assert oracle.margin(prompt, result.ids[:border]) <= rig.tolerance
                expected = oracle.of_sampled(prompt, result.ids[:border])
                assert result.logprobs[:border] == pytest.approx(expected, abs=rig.tolerance)
                if border < tokens or len(running.chunks) < 3:
                    return
            pytest.fail("no update came in the middle of a call")

    async def test_no_cached_prefix_survives_an_update(self, rig: EngineRig) -> None:
        """Not of calls that ended before it, nor of those that ran through it."""
        async with rig.started() as engine:
            prompt = rig.prompt(90)
            await call(engine, prompt, 8, name="before")
            through = Watched(engine, request_of(rig.prompt(60, 5), 100, name="through", session="s"))
            await through.until(2)
            await engine.update_weights(rig.sources[1])
            assert engine.version == (await engine.load()).version == rig.sources[1].version
            result = await call(engine, prompt, 8, name="after")
            assert result.cached == 0
            assert result.versions == [rig.sources[1].version] * 8
            assert_greedy(rig, 1, prompt, result)
            mixed = await rig.within(through.task)
            follow = [*rig.prompt(60, 5), *mixed.ids, 1, 2]
            result = await call(engine, follow, 6, name="follow", session="s")
            assert_greedy(rig, 1, follow, result)
            assert (await call(engine, prompt, 2, name="again")).cached > 0

    async def test_a_call_caught_before_its_first_token_is_wholly_of_the_new_version(self, rig: EngineRig) -> None:
        """If all its tokens say the new version, no part of its prompt was computed by the old one, just now or for the
        cache: nothing else would tell. With more calls each time, until one of each kind is caught."""
        async with rig.started() as engine:
            known = fresh = False
            for turn in range(8):
                source = WeightSource(rig.sources[1].version + turn, rig.sources[(turn + 1) % 2].location)
                length, count = rig.max_context - 20, 4 * (turn + 1)
                prompts = [rig.prompt(length - 7 * (i % 9), 100 * turn + i) for i in range(2 * count)]
                for number, prompt in enumerate(prompts[:count]):
                    await call(engine, prompt, 2, name=f"fill{number}")
                asks = [
                    asyncio.create_task(call(engine, prompts[i // 2 + i % 2 * count], 6, name=f"caught{i}"))
                    for i in range(2 * count)
                ]
                await asyncio.sleep(0.004 * turn)
                await rig.within(engine.update_weights(source))
                for i, result in enumerate(await rig.within(asyncio.gather(*asks))):
                    if set(result.versions) == {source.version}:
                        assert not result.cached
                        assert_greedy(rig, (turn + 1) % 2, prompts[i // 2 + i % 2 * count], result)
                        known, fresh = known or i % 2 == 0, fresh or i % 2 == 1
                if known and fresh and turn:  # one change came at once, one when some calls had begun
                    return
            pytest.fail("no call was caught before its first token")

    async def test_going_back_to_an_older_version_finds_nothing_old(self, rig: EngineRig) -> None:
        """The cache is of the weights in use, not of a number seen before."""
        async with rig.started() as engine:
            prompt = rig.prompt(50)
            await engine.update_weights(rig.sources[1])
            await call(engine, prompt, 4, name="one")
            await engine.update_weights(rig.sources[0])
            result = await call(engine, prompt, 6, name="zero")
            assert_greedy(rig, 0, prompt, result)
            assert result.versions == [rig.sources[0].version] * 6

    async def test_an_update_that_cannot_be_read_changes_nothing(self, rig: EngineRig) -> None:
        """InfrastructureError; calls go on under the old weights."""
        async with rig.started() as engine:
            prompt = rig.prompt(20)
            running = Watched(engine, request_of(prompt, 60, name="running"))
            await running.until(1)
            with pytest.raises(InfrastructureError):
                await engine.update_weights(WeightSource(99, rig.sources[0].location + "-missing"))
            assert engine.version == rig.sources[0].version
            result = await rig.within(running.task)
            assert result.versions == [rig.sources[0].version] * 60
            assert_greedy(rig, 0, prompt, result)

    async def test_many_updates_under_load_lose_no_call(self, rig: EngineRig) -> None:
        """Versions rise inside every call and its tokens are all there."""
        async with rig.started() as engine:
            asks = [
                asyncio.create_task(call(engine, rig.prompt(8 + i, i), 40, name=f"c{i}", temperature=1.0))
                for i in range(8)
            ]
            await asyncio.sleep(0.02)
            first, second = rig.sources[:2]
            later = [WeightSource(second.version + 1 + i, (first, second)[i % 2].location) for i in range(3)]
            for source in (second, *later):
                await rig.within(engine.update_weights(source))
            for result in await rig.within(asyncio.gather(*asks)):
                assert len(result.ids) == 40
                assert result.versions == sorted(result.versions)
                assert result.finish is FinishReason.LENGTH

    async def test_flushing_forgets_prefixes_and_hurts_no_running_call(self, rig: EngineRig) -> None:
        """A later call computes its prompt anew."""
        async with rig.started() as engine:
            prompt, other = rig.prompt(80), rig.prompt(33, 4)
            await call(engine, prompt, 4, name="fill")
            running = Watched(engine, request_of(other, 80, name="running"))
            await running.until(1)
            await rig.within(engine.flush_cache())
            result = await call(engine, prompt, 4, name="after")
            assert result.cached == 0
            assert_greedy(rig, 0, other, await rig.within(running.task))

    async def test_a_pause_keeps_calls_and_lets_new_ones_wait(self, rig: EngineRig) -> None:
        """Nothing is sampled while paused; load and abort answer; everything goes on afterwards."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.PAUSE)
            prompt = rig.prompt(18)
            kept = Watched(engine, request_of(prompt, 90, name="kept"))
            cut = Watched(engine, request_of(rig.prompt(7), 90, name="cut"))
            await asyncio.gather(kept.until(2), cut.until(2))
            await rig.within(engine.pause(PauseMode.KEEP))
            sampled = (await engine.load()).sampled_tokens
            late = Watched(engine, request_of(prompt, 5, name="late"))
            ended = cut.task.done()
            assert await engine.abort("cut") is not ended
            await asyncio.sleep(0.1)
            assert (await rig.within(engine.load())).sampled_tokens == sampled
            assert not late.task.done()
            await engine.resume()
            assert_greedy(rig, 0, prompt, await rig.within(kept.task))
            assert_greedy(rig, 0, prompt, await rig.within(late.task))
            assert (await rig.within(cut.task)).finish in (FinishReason.ABORT, FinishReason.LENGTH)

    async def test_a_pause_may_end_calls_with_what_they_have(self, rig: EngineRig) -> None:
        """`PauseMode.ABORT`: every call ends, none hangs, the engine goes on after `resume`."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.PAUSE)
            prompt = rig.prompt(18)
            running = [Watched(engine, request_of(prompt, 150, name=f"c{i}")) for i in range(3)]
            await running[0].until(2)
            await rig.within(engine.pause(PauseMode.ABORT))
            for watched in running:
                result = await rig.within(watched.task)
                assert result.finish in (FinishReason.ABORT, FinishReason.LENGTH)
                if result.ids:
                    assert_greedy(rig, 0, prompt, result)
            await engine.resume()
            assert_greedy(rig, 0, prompt, await rig.within(call(engine, prompt, 5, name="after")))

    async def test_weights_can_change_while_paused(self, rig: EngineRig) -> None:
        """The kept call goes on under the new version."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.PAUSE)
            running = Watched(engine, request_of(rig.prompt(18), rig.max_context - 30))
            await running.until(2)
            await engine.pause(PauseMode.KEEP)
            await rig.within(engine.update_weights(rig.sources[1]))
            await engine.resume()
            result = await rig.within(running.task)
            assert result.versions == sorted(result.versions)
            assert len(result.ids) == rig.max_context - 30

    async def test_a_pause_outlasts_an_update_that_cannot_be_read(self, rig: EngineRig) -> None:
        """InfrastructureError; nothing is sampled until `resume`, then under the old weights."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.PAUSE)
            prompt = rig.prompt(18)
            kept = Watched(engine, request_of(prompt, 90, name="kept"))
            await kept.until(2)
            await rig.within(engine.pause(PauseMode.KEEP))
            with pytest.raises(InfrastructureError):
                await engine.update_weights(WeightSource(99, rig.sources[0].location + "-missing"))
            await self._stands_still(kept)
            await engine.resume()
            assert_greedy(rig, 0, prompt, await rig.within(kept.task))

    async def test_a_pause_outlasts_an_update_that_is_given_up(self, rig: EngineRig) -> None:
        """Nothing is sampled until `resume`. Whoever cancels does not know the weights: they can be loaded anew, or the
        engine has failed and says so to everybody."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.PAUSE)
            prompt = rig.prompt(18)
            kept = Watched(engine, request_of(prompt, rig.max_context - 30, name="kept"))
            await kept.until(2)
            await rig.within(engine.pause(PauseMode.KEEP))
            changing = asyncio.create_task(engine.update_weights(rig.sources[1]))
            await asyncio.sleep(0.02)
            changing.cancel()
            await rig.within(asyncio.wait([changing]))
            await self._stands_still(kept)
            try:
                await rig.within(engine.update_weights(rig.sources[1]))
            except InfrastructureError:
                for question in (call(engine, prompt, 5, name="after"), engine.load(), engine.resume()):
                    with pytest.raises(InfrastructureError):
                        await rig.within(question)
            else:
                await engine.resume()
                assert_greedy(rig, 1, prompt, await rig.within(call(engine, prompt, 5, name="after")))
            await rig.within(asyncio.wait([kept.task]))

    async def _stands_still(self, kept: Watched) -> None:
        await asyncio.sleep(0.1)
        had = len(kept.chunks)
        await asyncio.sleep(0.2)
        assert len(kept.chunks) == had, "it samples, though nobody called resume"

    async def test_sleeping_ends_calls_and_waking_takes_other_weights(self, rig: EngineRig) -> None:
        """Nothing of the former life is left in the cache; the load can be asked for all the time."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.SLEEP)
            prompt = rig.prompt(40)
            await call(engine, prompt, 4, name="fill")
            running = Watched(engine, request_of(prompt, rig.max_context - 50, name="running"))
            await running.until(2)
            await rig.within(engine.sleep())
            result = await rig.within(running.task)
            assert result.finish in (FinishReason.ABORT, FinishReason.LENGTH)
            await rig.within(engine.load())
            with pytest.raises(InfrastructureError):
                await rig.within(call(engine, prompt, 2, name="asleep"))
            await rig.within(engine.wake(rig.sources[1]))
            assert engine.version == rig.sources[1].version
            result = await call(engine, prompt, 6, name="awake")
            assert result.cached == 0
            assert_greedy(rig, 1, prompt, result)

    async def test_sleeping_twice_or_waking_awake_kills_nothing(self, rig: EngineRig) -> None:
        """An error or nothing, and the engine answers afterwards."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.SLEEP)
            for action in (engine.wake(rig.sources[0]), engine.sleep(), engine.sleep()):
                await rig.within(asyncio.gather(action, return_exceptions=True))
            await rig.within(engine.wake(rig.sources[0]))
            prompt = rig.prompt(12)
            assert_greedy(rig, 0, prompt, await rig.within(call(engine, prompt, 4)))
            assert await eventually(lambda: is_idle(engine))
