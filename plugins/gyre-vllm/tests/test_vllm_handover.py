"""Handing sessions over: the checks against the fake, the move between two real servers."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_core import (
    CapabilityError,
    ComponentContext,
    EngineCapability,
    FinishReason,
    InfrastructureError,
    KVHandover,
    PauseMode,
    WeightSource,
)
from gyre_core.testing.engine_handover import HandoverChecks
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, eventually, request_of
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.handover import Contexts
from gyre_vllm.options import VLLMOptions


async def two(served: Any, sources: list[WeightSource], *can: str) -> tuple[Any, VLLMEngine, Any, VLLMEngine]:
    """Two fakes with a connector, and what else they can."""
    made = []
    for _ in range(2):
        server, engine = await served(start=False)
        server.faults |= {"connector", *can}
        await engine.start(sources[0])
        made += [server, engine]
    return made[0], made[1], made[2], made[3]


async def test_what_a_call_left_is_found_by_the_next_one_elsewhere(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    _, a, server, b = await two(served, sources)
    assert EngineCapability.KV_HANDOVER in a.capabilities
    assert isinstance(a, KVHandover)
    prompt = list(range(40))
    cut = await ask(a, prompt, 3)
    held = await a.kv_export("s-a")
    assert held is not None
    context = [*prompt, *cut.ids]
    assert (held.token_ids.tolist(), held.version, held.running) == (context, 0, False)
    came = await b.kv_import(held)
    assert (came.tokens, came.computed, came.nbytes) == (43, 3, 40 * 8)
    assert server.bodies[-1]["cache_salt"] == b._state.salt
    assert (await ask(b, [*context, 3], 4)).cached >= 40
    again = await b.kv_export("s-a")
    assert again is not None
    assert again.token_ids.tolist()[:43] == context


async def test_a_running_call_goes_on_while_its_beginning_is_held(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    _, a, _, _ = await two(served, sources)
    chunks: list[Any] = []
    running = asyncio.create_task(ask(a, list(range(20)), 100, into=chunks))
    while len(chunks) < 3:
        await asyncio.sleep(0.002)
    begun = await a.kv_export("s-a")
    assert begun is not None
    assert begun.running
    assert not running.done()
    await a.abort("a")
    result = await asyncio.wait_for(running, 60)
    whole = await a.kv_export("s-a")
    assert whole is not None
    assert (result.finish, whole.running) == (FinishReason.ABORT, False)
    assert whole.token_ids.tolist() == [*range(20), *result.ids]
    assert whole.token_ids.tolist()[: len(begun.token_ids)] == begun.token_ids.tolist()
    assert 20 < len(begun.token_ids) <= len(whole.token_ids) < 120


async def stopped(a: VLLMEngine, ask: Any, **more: Any) -> tuple[Any, Any]:
    """A call that samples, ended for a move: what it was given, and what is held."""
    chunks: list[Any] = []
    running = asyncio.create_task(ask(a, list(range(20)), 100, into=chunks, **more))
    while len(chunks) < 3:
        await asyncio.sleep(0.002)
    held = await a.kv_export("s-a", stop=True)
    return await asyncio.wait_for(running, 60), held


async def test_a_call_that_is_stopped_goes_on_elsewhere_with_one_token_computed(
    served: Any, sources: list[WeightSource], ask: Any, fake: Any
) -> None:
    first, a, second, b = await two(served, sources, "takes")
    cut, held = await stopped(a, ask)
    assert cut.finish is FinishReason.ABORT
    context = [*range(20), *cut.ids]
    assert (held.token_ids.tolist(), held.version, held.running) == (context, 0, False)
    assert [body["kv_transfer_params"] for body in first.bodies if "prompt" in body] == [
        {"gyre_take": f"generate-tokens-{a._state.name}-0"}
    ]
    came = await b.kv_import(held)
    assert (came.tokens, came.computed, came.nbytes) == (len(context), 1, 0)
    assert second.bodies == [], "the session's next call fetches"
    result = await ask(b, context, 4)
    assert result.cached == len(context) - 1
    assert result.ids[0] == fake.token_after(context, 10)
    assert second.bodies[-1]["kv_transfer_params"]["remote_num_tokens"] == len(context) - 1
    await ask(b, context, 4)
    assert "kv_transfer_params" not in second.bodies[-1], "it is fetched once"


async def test_only_the_call_that_it_is_for_fetches_what_was_held(
    served: Any, sources: list[WeightSource], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, a, second, b = await two(served, sources, "takes")
    cut, held = await stopped(a, ask)
    context = [*range(20), *cut.ids]

    async def fetches(*changes: Any) -> bool:
        await b.kv_import(held)
        for change in changes:
            await change
        await ask(b, given, 2)
        return "kv_transfer_params" in second.bodies[-1]

    given = context
    assert await fetches()
    assert not await fetches(b.flush_cache()), "another prefix cache"
    given = [*context[:-1], 96]
    assert not await fetches(), "other tokens"
    given = context
    await b.kv_import(held)
    monkeypatch.setattr("gyre_vllm.handover.LEASE_S", -1.0)
    await ask(b, context, 2)
    assert "kv_transfer_params" not in second.bodies[-1], "too old"
    monkeypatch.undo()
    await b.kv_import(held)
    await b.update_weights(sources[1])
    await ask(b, context, 2)
    assert "kv_transfer_params" not in second.bodies[-1], "other weights"
    with pytest.raises(InfrastructureError, match="version"):
        await b.kv_import(held)


@pytest.mark.parametrize("fault", ["none", "no-params", "stock"])
async def test_a_call_ends_also_where_nothing_can_be_held(
    fault: str, served: Any, sources: list[WeightSource], ask: Any
) -> None:
    server, a, _, _ = await two(served, sources, *(["takes"] if fault != "stock" else []))
    server.faults.add(fault)
    cut, held = await stopped(a, ask)
    assert cut.finish is FinishReason.ABORT
    assert 3 <= len(cut.ids) < 100
    assert (held is None) == (fault != "none")


async def test_of_several_calls_all_end_and_the_longest_is_held(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    _, a, _, _ = await two(served, sources, "takes")
    short = asyncio.create_task(call(a, [1, 2], 100, name="short", session="s-a"))
    waits = asyncio.create_task(ask(a, list(range(30)), 150, name="other"))
    cut, held = await stopped(a, ask)
    assert held.token_ids.tolist() == [*range(20), *cut.ids]
    assert (await asyncio.wait_for(short, 60)).finish is FinishReason.ABORT
    assert not waits.done()
    await a.abort("other")
    await asyncio.wait_for(waits, 60)


async def test_a_call_that_never_came_to_the_server_leaves_its_sessions_context(
    served: Any, sources: list[WeightSource]
) -> None:
    _, a, _, _ = await two(served, sources)
    first = await call(a, list(range(40)), 3, name="a", session="s")
    await a.pause(PauseMode.KEEP)
    waits = Watched(a, request_of([7] * 9, 3, name="b", session="s"))
    assert await eventually(lambda: a.abort("b"))
    assert (await waits.task).finish is FinishReason.ABORT
    await a.resume()
    held = await a.kv_export("s")
    assert held is not None
    assert held.token_ids.tolist() == [*range(40), *first.ids]


async def test_what_does_not_fit_never_reaches_the_destination(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    source, a, server, b = await two(served, sources)
    await ask(a, list(range(43)), 1)
    held = await a.kv_export("s-a")
    assert held is not None
    other = held.token_ids.copy()
    other[3] = 7
    old = held.ticket.replace(b'"taken_at":', b'"taken_at":-')
    assert old != held.ticket
    for wrong in (
        replace(held, token_ids=other), replace(held, token_ids=held.token_ids[:30]), replace(held, ticket=b"{}"),
        replace(held, ticket=old),
    ):  # fmt: skip
        with pytest.raises(InfrastructureError):
            await b.kv_import(wrong)
    await b.update_weights(sources[1])
    with pytest.raises(InfrastructureError, match="version"):
        await b.kv_import(held)
    assert server.bodies == []
    source.faults.add("no-params")
    with pytest.raises(InfrastructureError, match="NixlConnector"):
        await a.kv_export("s-a")


async def test_kv_of_other_contents_under_the_same_version_is_refused(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    """A run that was set back publishes a version a second time, and one of its cells may still have the first."""
    _, a, server, b = await two(served, sources)
    await a.update_weights(replace(sources[1], digest="first"))
    await b.update_weights(replace(sources[1], digest="second"))
    await ask(a, list(range(40)), 3)
    held = await a.kv_export("s-a")
    assert held is not None
    with pytest.raises(InfrastructureError, match=r"first.*second"):
        await b.kv_import(held)
    assert server.bodies == []
    await b.update_weights(replace(sources[1], digest="first"))
    assert (await b.kv_import(held)).tokens == 43


async def test_there_is_nothing_to_export_of_strangers_and_of_older_weights(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    _, a, _, _ = await two(served, sources)
    assert await a.kv_export("nobody") is None
    await ask(a, list(range(40)), 3)
    await a.update_weights(sources[1])
    assert await a.kv_export("s-a") is None


def test_no_more_contexts_are_remembered_than_the_server_has_room_for() -> None:
    contexts = Contexts()
    for name, tokens in (("a", 40), ("b", 30), ("a", 50), ("c", 20)):
        contexts.note(name, "salt", list(range(tokens)), 80)
    assert contexts.of("b", "salt") is None  # 30 + 50 + 20 are too many, and it was the oldest
    assert len(contexts.of("a", "salt")) == 50
    assert contexts.of("a", "other") is None
    contexts.note("d", "salt", list(range(81)), 80)
    assert all(contexts.of(name, "salt") is None for name in "abcd")
    contexts.note("e", "salt", [1], 80)
    assert contexts.of("e", "salt").tolist() == [1]


async def test_weights_change_and_calls_pause_without_the_servers_own_pause(
    served: Any, sources: list[WeightSource], ask: Any, fake: Any
) -> None:
    """With a connector vLLM's pause waits for leases that only a running scheduler ends."""
    server, engine = await served(start=False)
    server.faults.add("connector")
    await engine.start(sources[0])
    chunks: list[Any] = []
    running = asyncio.create_task(ask(engine, [4], 120, into=chunks))
    while len(chunks) < 3:
        await asyncio.sleep(0.002)
    await engine.pause()
    held = len(chunks)
    await asyncio.sleep(0.05)
    assert len(chunks) <= held + 1
    await engine.resume()
    while len(chunks) < held + 5:
        await asyncio.sleep(0.002)
    await engine.update_weights(sources[1])
    result = await running
    assert set(result.versions) == {0, 1}
    context = [4]
    for token, version in zip(result.ids, result.versions, strict=True):
        assert token == fake.token_after(context, 10 + version)
        context.append(token)
    assert len(result.ids) == 120


async def test_a_server_without_a_connector_says_so(served: Any) -> None:
    _, engine = await served()
    assert EngineCapability.KV_HANDOVER not in engine.capabilities
    with pytest.raises(CapabilityError, match="transfers"):
        await engine.kv_export("s")


def token_bytes(source: WeightSource) -> int:
    """KV bytes of a token in float32, from the model's own description."""
    config = json.loads((Path(source.location) / "config.json").read_text())
    return 2 * 4 * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * int(config["head_dim"])


async def conform(rig: EngineRig, urls: list[str], folder: Path) -> None:
    """The checks every engine that hands over must pass, on servers that run already; calls are long enough to be under
    way still when they shall be handed over."""
    turns = itertools.cycle(urls)
    rig = replace(
        rig, make=lambda: VLLMEngine(VLLMOptions(url=next(turns)), ComponentContext(str(folder), "c")),
        cache_block=32, max_context=1000,
    )  # fmt: skip
    checks = HandoverChecks()
    await checks.test_a_running_session_is_handed_over_and_computes_little_again(rig)
    await checks.test_a_running_session_is_stopped_and_goes_on_with_what_was_held(rig)
    await checks.test_there_is_nothing_to_hold_of_a_stranger_or_of_older_weights(rig)
    await checks.test_what_does_not_fit_is_refused_and_changes_nothing(rig)


@pytest.mark.engine
@pytest.mark.timeout(1500)
async def test_a_session_goes_on_on_another_real_server(
    vllm_python: str, tiny_sources: list[WeightSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between turns, and cut in mid-call: nothing but the last block is computed again, and the tokens are those of no
    move. Blocks for another context are refused."""
    for module in ("handover", "calls"):  # however busy this machine is
        monkeypatch.setattr(f"gyre_vllm.{module}.FETCH_S", 600.0)
    options = VLLMOptions(
        python=vllm_python, dtype="float32", max_context=1024, max_running=8, kv_cache_gb=0.1, transfers=True,
        arguments=("--block-size", "32"), control_timeout_s=600.0,
    )  # fmt: skip
    a, b = (VLLMEngine(options, ComponentContext(str(tmp_path), name)) for name in "ab")
    rig = EngineRig(lambda: a, tiny_sources, 320)
    try:
        # From another folder, as a cell has it that comes back from training: the connector's own check tells by that.
        await asyncio.gather(a.start(tiny_sources[0]), b.start(tiny_sources[1]))
        await b.update_weights(tiny_sources[0])
        prompt = rig.prompt(600)
        running = Watched(a, request_of(prompt, 300, name="r", session="s"))
        await running.until(60)
        begun = await a.kv_export("s")
        assert begun is not None
        assert begun.running
        first = await b.kv_import(begun)
        await running.until(100)
        await a.abort("r")
        cut = await rig.within(running.task)
        held = await a.kv_export("s")
        context = [*prompt, *cut.ids]
        assert held is not None
        assert held.token_ids.tolist() == context
        taken = await b.kv_import(held)
        assert first.computed <= 33
        assert taken.computed <= 33
        assert taken.nbytes == (len(context) - taken.computed) * token_bytes(tiny_sources[0])
        result = await call(b, context, 20, name="on", session="s")
        assert result.cached >= len(context) // 32 * 32, "whole blocks stay; what came of the last one does not"
        assert_greedy(rig, 0, context, result)
        server = b._state.server
        assert server is not None
        load = await server.client.load()
        assert load.received >= 600
        assert load.computed <= 3 * 33 + 1
        with pytest.raises(InfrastructureError):
            await b.kv_import(replace(held, token_ids=np.asarray(rig.prompt(650, 9), np.int32)))
        await b.update_weights(tiny_sources[1])
        with pytest.raises(InfrastructureError, match="version"):
            await b.kv_import(held)
        await conform(rig, [engine._state.server.client.url for engine in (a, b)], tmp_path)
    finally:
        await asyncio.gather(a.close(), b.close())
