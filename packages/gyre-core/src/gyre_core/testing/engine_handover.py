"""Checks of engines that hand a session's KV to one another: what is held is found, what does not fit is refused.

Part of `gyre_core.testing.engines.EngineConformance`; see there. Needs two engines at once. An engine whose prefix
cache works by blocks says so in `EngineRig.cache_block`: the part of the last block is computed again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre_core.engine import Engine, EngineCapability, FinishReason
from gyre_core.errors import InfrastructureError
from gyre_core.kv import ExportedKV, KVHandover
from gyre_core.testing.engine_kv import ids_of
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, needs, request_of

ATTEMPTS = 4
"""How often a call is begun that shall be stopped while it runs: on a busy machine it may be over before."""


def handing(engine: Engine) -> KVHandover:
    """The engine as one that hands over; skips the test when it does not offer that."""
    needs(engine, EngineCapability.KV_HANDOVER)
    assert isinstance(engine, KVHandover)
    return engine


async def held_by(rig: EngineRig, engine: Engine, prompt: list[int], session: str) -> ExportedKV:
    """A finished call's KV, held."""
    await call(engine, prompt, 4, name=f"of-{session}", session=session)
    held: ExportedKV | None = await rig.within(handing(engine).kv_export(session))
    assert held is not None
    return held


class HandoverChecks:
    """What an engine with `KV_HANDOVER` must do."""

    async def test_a_running_session_is_handed_over_and_computes_little_again(self, rig: EngineRig) -> None:
        """First while its call runs, then what it left; greedy tokens at the destination are those of no move. The
        destination began with another version, as the engine of a cell does that comes back from training."""
        async with rig.started() as a, rig.started(1) as b:
            source, target = handing(a), handing(b)
            await b.update_weights(rig.sources[0])
            prompt = rig.prompt(rig.max_context // 3)
            running = Watched(a, request_of(prompt, rig.max_context // 2, name="r", session="s"))
            await running.until(3)
            begun = await rig.within(source.kv_export("s"))
            assert begun is not None
            await rig.within(target.kv_import(begun))
            await a.abort("r")
            cut = await rig.within(running.task)
            held = await rig.within(source.kv_export("s"))
            context = [*prompt, *cut.ids]
            # A fast call may be over before all this is; nothing but its length and our abort may have ended it.
            assert cut.finish is FinishReason.ABORT or len(cut.ids) == rig.max_context // 2
            assert begun.running or len(cut.ids) == rig.max_context // 2
            assert held is not None
            assert (ids_of(held.token_ids), held.version, held.running) == (context, rig.sources[0].version, False)
            came = await rig.within(target.kv_import(held))
            assert came.tokens == len(context)
            assert came.computed <= rig.cache_block + 1
            result = await call(b, context, 5, name="on", session="s")
            assert result.cached >= len(context) - rig.cache_block - 1
            assert_greedy(rig, 0, context, result)

    async def test_a_running_session_is_stopped_and_goes_on_with_what_was_held(self, rig: EngineRig) -> None:
        """Its call ends with ABORT. An engine that holds what it has stopped holds all of it, else None; either way the
        tokens at the destination are those of no move."""
        async with rig.started() as a, rig.started() as b:
            source, target = handing(a), handing(b)
            for attempt in range(ATTEMPTS):
                prompt, session = rig.prompt(rig.max_context // 3, attempt), f"s{attempt}"
                running = Watched(a, request_of(prompt, rig.max_context // 2, name=f"r{attempt}", session=session))
                await running.until(3)
                held = await rig.within(source.kv_export(session, stop=True))
                cut = await rig.within(running.task)
                if cut.finish is FinishReason.ABORT:
                    break
            else:
                pytest.fail(f"in {ATTEMPTS} attempts no call was stopped before it was over")
            context = [*prompt, *cut.ids]
            if held is not None:
                assert (ids_of(held.token_ids), held.running) == (context, False)
                assert (await rig.within(target.kv_import(held))).tokens == len(context)
            result = await call(b, context, 5, name="on", session=session)
            assert held is None or result.cached >= len(context) - 1
            assert_greedy(rig, 0, context, result)

    async def test_there_is_nothing_to_hold_of_a_stranger_or_of_older_weights(self, rig: EngineRig) -> None:
        """None, so that nobody waits for what cannot come."""
        async with rig.started() as engine:
            assert await handing(engine).kv_export("nobody") is None
            await held_by(rig, engine, rig.prompt(40), "s")
            await engine.update_weights(rig.sources[1])
            assert await handing(engine).kv_export("s") is None

    async def test_what_does_not_fit_is_refused_and_changes_nothing(self, rig: EngineRig) -> None:
        """Other tokens, a ticket that is none, other weights: InfrastructureError, and the next call computes."""
        async with rig.started() as a, rig.started() as b:
            target = handing(b)
            prompt = rig.prompt(rig.max_context // 2)
            held = await held_by(rig, a, prompt, "s")
            other = held.token_ids.copy()  # type: ignore[attr-defined]
            other[1] = (other[1] + 1) % rig.vocab
            for wrong in (replace(held, token_ids=other), replace(held, ticket=b"none")):
                with pytest.raises(InfrastructureError):
                    await rig.within(target.kv_import(wrong))
            await b.update_weights(rig.sources[1])
            with pytest.raises(InfrastructureError):
                await rig.within(target.kv_import(held))
            result = await call(b, prompt, 6, name="y", session="s")
            assert result.cached == 0
            assert_greedy(rig, 1, prompt, result)
