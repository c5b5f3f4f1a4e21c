"""Handing sessions over: the checks against the fake, the move between two real servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gyre_core import CapabilityError, ComponentContext, InfrastructureError, WeightSource
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, request_of
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions


async def two(served: Any, sources: list[WeightSource]) -> tuple[Any, VLLMEngine, Any, VLLMEngine]:
    made = []
    for _ in range(2):
        server, engine = await served(start=False)
        server.faults.add("connector")
        await engine.start(sources[0])
        made += [server, engine]
    return made[0], made[1], made[2], made[3]


async def test_an_export_is_imported_for_its_own_context(served: Any, sources: list[WeightSource], ask: Any) -> None:
    _, a, server, b = await two(served, sources)
    tokens = list(range(43))
    export = await a.export_session("s", tokens)
    assert (export.n_tokens, export.version) == (40, 0)
    taken = await b.import_session(export, [*tokens, 1, 2])
    assert (taken.tokens, taken.found) == (45, 40)
    assert server.bodies[-1]["cache_salt"] == b._state.salt
    assert (await ask(b, [*tokens, 1, 2, 3], 4)).cached >= 40


async def test_what_does_not_fit_never_reaches_the_destination(served: Any, sources: list[WeightSource]) -> None:
    source, a, server, b = await two(served, sources)
    tokens = list(range(43))
    export = await a.export_session("s", tokens)
    for wrong, context in (
        (export, [7, *tokens[1:]]), (export, tokens[:30]), (replace(export, taken_at=export.taken_at - 1e4), tokens)
    ):  # fmt: skip
        with pytest.raises(InfrastructureError):
            await b.import_session(wrong, context)
    await b.update_weights(sources[1])
    with pytest.raises(InfrastructureError, match="version"):
        await b.import_session(export, tokens)
    assert server.bodies == []
    source.faults.add("no-params")
    with pytest.raises(InfrastructureError, match="NixlConnector"):
        await a.export_session("s", tokens)


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
    with pytest.raises(CapabilityError, match="transfers"):
        await engine.export_session("s", [1, 2, 3])


@pytest.mark.engine
@pytest.mark.timeout(1500)
async def test_a_session_goes_on_on_another_real_server(
    vllm_python: str, tiny_sources: list[WeightSource], tmp_path: Path
) -> None:
    """Between turns, and cut in mid-call: nothing but the last block is computed again, and the tokens are those of no
    move. Blocks for another context are refused."""
    options = VLLMOptions(
        python=vllm_python, dtype="float32", max_context=1024, max_running=8, kv_cache_gb=0.1, transfers=True,
        arguments=("--block-size", "32"),
    )  # fmt: skip
    a, b = (VLLMEngine(options, ComponentContext(str(tmp_path), name)) for name in "ab")
    rig = EngineRig(lambda: a, tiny_sources, 320)
    try:
        await asyncio.gather(a.start(tiny_sources[0]), b.start(tiny_sources[0]))
        prompt = rig.prompt(600)
        running = Watched(a, request_of(prompt, 300, name="r", session="s"))
        await running.until(100)
        await a.abort("r")
        cut = await rig.within(running.task)
        context = [*prompt, *cut.ids]
        taken = await b.import_session(await a.export_session("s", context), context)
        print(taken)
        assert len(context) - taken.found <= 33
        result = await call(b, context, 20, name="on", session="s")
        assert result.cached >= taken.found - 1
        assert_greedy(rig, 0, context, result)
        server = b._state.server
        assert server is not None
        load = await server.client.load()
        assert load.received >= 600
        assert load.computed <= 2 * 33 + 1
        other = rig.prompt(650, 9)
        with pytest.raises(InfrastructureError):
            await b.import_session(await a.export_session("s", context), other)
        await b.update_weights(tiny_sources[1])
        with pytest.raises(InfrastructureError, match="version"):
            await b.import_session(await a.export_session("s", context), context)
    finally:
        await asyncio.gather(a.close(), b.close())
