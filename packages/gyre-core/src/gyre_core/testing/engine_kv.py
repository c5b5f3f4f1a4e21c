"""Checks of moving a session's KV: what is pinned stays, what moves is found, nothing leaks.

Part of `gyre_core.testing.engines.EngineConformance`; see there. Blocks are copied in this process, so an engine whose
pools live elsewhere overrides `copy_blocks`.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Sequence
from typing import Any

import pytest

from gyre_core.engine import Engine, EngineCapability, FinishReason
from gyre_core.errors import CapabilityError, InfrastructureError
from gyre_core.kv import PinnedKV
from gyre_core.testing.engine_rig import (
    EngineRig,
    Watched,
    assert_greedy,
    call,
    eventually,
    is_idle,
    needs,
    request_of,
)


def ids_of(array: Any) -> list[int]:
    """An array of ids as a list."""
    return [int(value) for value in array]


class KVChecks:
    """What an engine with `KV_MOVE` must do; the others must say so."""

    def copy_blocks(self, source: Engine, target: Engine, from_ids: Sequence[int], to_ids: Sequence[int]) -> None:
        """Copy whole blocks between two engines of equal layout, host memory in this process."""
        for left, right in zip(source.kv_regions(), target.kv_regions(), strict=True):
            if left.device != "cpu" or right.device != "cpu":
                pytest.skip(f"copying {left.device} memory needs an override of copy_blocks")
            for a, b in zip(from_ids, to_ids, strict=True):
                size = left.block_bytes
                ctypes.memmove(right.addr + b * size, left.addr + a * size, size)

    def read_block(self, engine: Engine, block: int) -> bytes:
        """The bytes of one block in every region."""
        return b"".join(
            ctypes.string_at(region.addr + block * region.block_bytes, region.block_bytes)
            for region in engine.kv_regions()
        )

    async def move(self, source: Engine, target: Engine, session: str, pinned: PinnedKV) -> None:
        """Copy a frozen session and hand it over."""
        tokens = ids_of(pinned.token_ids)
        blocks = await target.kv_reserve(session, len(tokens), pinned.version)
        assert blocks is not None
        self.copy_blocks(source, target, ids_of(pinned.block_ids), ids_of(blocks))
        await target.kv_commit(session, pinned.version, pinned.token_ids, blocks)
        await source.kv_release(session, pinned.generation, forget=True)

    async def test_without_the_capability_every_question_is_refused(self, rig: EngineRig) -> None:
        """CapabilityError, so that a mover falls back to prefilling."""
        async with rig.started() as engine:
            if EngineCapability.KV_MOVE in engine.capabilities:
                pytest.skip("this engine offers KV_MOVE")
            with pytest.raises(CapabilityError):
                engine.kv_shape()
            with pytest.raises(CapabilityError):
                await engine.kv_pin("s")
            with pytest.raises(CapabilityError):
                await engine.kv_reserve("s", 4, engine.version)

    async def test_the_layout_describes_the_memory(self, rig: EngineRig) -> None:
        """Region count, block bytes and sizes fit together; the model is named."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.KV_MOVE)
            shape, regions = engine.kv_shape(), engine.kv_regions()
            width = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}[shape.dtype]
            parts = 1 if shape.split_kv else 2
            assert len(regions) == shape.layers * (2 if shape.split_kv else 1)
            for region in regions:
                assert region.block_bytes == (parts * shape.block_tokens * shape.kv_heads * shape.head_size * width)
                assert region.nbytes % region.block_bytes == 0
            assert shape.model
            assert set(shape.order) == {"token", "head", "dim"} | (set() if shape.split_kv else {"kv"})

    async def test_a_frozen_session_goes_on_elsewhere_with_nothing_computed_again(self, rig: EngineRig) -> None:
        """Greedy tokens after the move are those without it; only the last token, whose KV nobody has, is computed."""
        async with rig.started() as a, rig.started() as b:
            needs(a, EngineCapability.KV_MOVE)
            prompt = rig.prompt(50)
            running = Watched(a, request_of(prompt, rig.max_context - 60, name="r", session="s"))
            await running.until(3)
            pinned = await rig.within(a.kv_freeze("s"))
            cut = await rig.within(running.task)
            assert pinned is not None
            context = [*prompt, *cut.ids]
            assert cut.finish in (FinishReason.ABORT, FinishReason.LENGTH)
            assert ids_of(pinned.token_ids) == context[:-1]
            assert pinned.version == rig.sources[0].version
            await self.move(a, b, "s", pinned)
            before = await b.load()
            result = await call(b, context, 5, name="on", session="s")
            after = await b.load()
            assert result.cached == len(context) - 1
            assert after.prefilled_tokens - before.prefilled_tokens <= 1
            assert_greedy(rig, 0, context, result)
            assert await eventually(lambda: is_idle(a))

    async def test_a_pin_holds_still_while_the_session_goes_on(self, rig: EngineRig) -> None:
        """Full blocks of a running session do not change, and outlive eviction and flushing."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.KV_MOVE)
            size = engine.kv_shape().block_tokens
            prompt = rig.prompt(4 * size if 4 * size < rig.max_context // 2 else 2 * size)
            running = Watched(engine, request_of(prompt, 60, name="r", session="s"))
            await running.until(2)
            pinned = await engine.kv_pin("s")
            assert pinned is not None
            full = ids_of(pinned.block_ids)[: len(ids_of(pinned.token_ids)) // size]
            assert full
            assert len(ids_of(pinned.block_ids)) == -(-len(ids_of(pinned.token_ids)) // size)
            held = [self.read_block(engine, block) for block in full]
            await rig.within(running.task)
            await engine.flush_cache()
            for index in range(6):
                await call(engine, rig.prompt(100, 50 + index), 20, name=f"x{index}")
            assert [self.read_block(engine, block) for block in full] == held
            await engine.kv_release("s", pinned.generation, forget=False)
            await engine.kv_release("s", pinned.generation, forget=False)
            assert await eventually(lambda: is_idle(engine))

    async def test_an_unknown_session_has_nothing_to_pin(self, rig: EngineRig) -> None:
        """None, for a session never seen and for one whose KV was of an older policy."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.KV_MOVE)
            assert await engine.kv_pin("nobody") is None
            await call(engine, rig.prompt(40), 4, session="s")
            assert await engine.kv_pin("s") is not None
            await engine.update_weights(rig.sources[1])
            assert await engine.kv_pin("s") is None

    async def test_calls_of_a_frozen_session_wait_for_the_end_of_the_move(self, rig: EngineRig) -> None:
        """They run when it stays; they are refused when it left; the others never wait."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.KV_MOVE)
            prompt = rig.prompt(30)
            await call(engine, prompt, 4, name="first", session="s")
            pinned = await engine.kv_freeze("s")
            assert pinned is not None
            waiting = Watched(engine, request_of(prompt, 6, name="waiting", session="s"))
            await rig.within(call(engine, prompt, 3, name="other", session="t"))
            assert not waiting.task.done()
            await engine.kv_unfreeze("s")
            assert_greedy(rig, 0, prompt, await rig.within(waiting.task))
            await engine.kv_release("s", pinned.generation, forget=False)
            pinned = await engine.kv_freeze("s")
            assert pinned is not None
            waiting = Watched(engine, request_of(prompt, 6, name="late", session="s"))
            await asyncio.sleep(0.05)
            await engine.kv_release("s", pinned.generation, forget=True)
            with pytest.raises(InfrastructureError):
                await rig.within(waiting.task)
            assert_greedy(rig, 0, prompt, await rig.within(call(engine, prompt, 4, name="back", session="s")))

    async def test_reservations_are_bounded_and_given_back(self, rig: EngineRig) -> None:
        """No room and a wrong version are None; a cancelled reservation is room again, cancelling twice no error."""
        async with rig.started() as engine:
            needs(engine, EngineCapability.KV_MOVE)
            total = (await engine.load()).kv_tokens_total
            assert await engine.kv_reserve("s", 40, engine.version + 1) is None
            assert await engine.kv_reserve("s", 2 * total, engine.version) is None
            for _ in range(3):
                blocks = await engine.kv_reserve("s", total // 2, engine.version)
                assert blocks is not None
                assert len(set(ids_of(blocks))) == -(-(total // 2) // engine.kv_shape().block_tokens)
                await engine.kv_cancel("s")
                await engine.kv_cancel("s")
            assert await eventually(lambda: is_idle(engine))

    async def test_a_commit_must_be_of_the_sessions_blocks_and_of_the_present_version(self, rig: EngineRig) -> None:
        """Foreign blocks would poison the cache for everybody; old KV would be taken for new."""
        async with rig.started() as a, rig.started() as b:
            needs(a, EngineCapability.KV_MOVE)
            prompt = rig.prompt(48)
            await call(a, prompt, 4, name="x", session="s")
            pinned = await a.kv_freeze("s")
            assert pinned is not None
            tokens = pinned.token_ids
            with pytest.raises(ValueError):
                await b.kv_commit("s", pinned.version, tokens, pinned.block_ids)
            mine = await b.kv_reserve("s", len(ids_of(tokens)), pinned.version)
            theirs = await b.kv_reserve("t", len(ids_of(tokens)), pinned.version)
            assert mine is not None
            assert theirs is not None
            with pytest.raises(ValueError):
                await b.kv_commit("s", pinned.version, tokens, theirs)
            self.copy_blocks(a, b, ids_of(pinned.block_ids), ids_of(theirs))
            await b.kv_commit("t", pinned.version, tokens, theirs)
            with pytest.raises(ValueError):
                await b.kv_commit("t", pinned.version, tokens, theirs)
            await b.update_weights(rig.sources[1])
            with pytest.raises(InfrastructureError):
                await b.kv_commit("s", pinned.version, tokens, mine)
            await b.kv_cancel("s")
            await b.kv_cancel("t")
            result = await call(b, prompt, 6, name="y", session="s")
            assert result.cached == 0
            assert_greedy(rig, 1, prompt, result)
            assert await eventually(lambda: is_idle(b))

    async def test_a_session_can_come_back(self, rig: EngineRig) -> None:
        """There and back again, three times, each time found."""
        async with rig.started() as a, rig.started() as b:
            needs(a, EngineCapability.KV_MOVE)
            here, there, context = a, b, rig.prompt(35)
            for turn in range(4):
                result = await call(here, context, 6, name=f"t{turn}", session="s")
                assert_greedy(rig, 0, context, result)
                if turn:
                    assert result.cached == len(context) - 4
                context = [*context, *result.ids, *rig.prompt(3, turn)]
                pinned = await here.kv_freeze("s")
                assert pinned is not None
                assert ids_of(pinned.token_ids) == context[:-4]
                await self.move(here, there, "s", pinned)
                here, there = there, here
