"""A server that fails in every way we know of: one attributed error, nothing handed out twice, the engine stays usable
where the server does."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
from gyre_core import InfrastructureError, WeightSource

FAULTS = {
    "500": "out of memory",
    "die": "expected its end|ClientPayloadError|ServerDisconnected|ConnectionReset",
    "truncate": "broke off",
    "error-event": "EngineCore died",
    "nan": "NaN or infinity",
    "vocabulary": "another model",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_one_attributed_error(served: Any, ask: Any, fake: ModuleType, fault: str) -> None:
    server, engine = await served()
    server.faults.add(fault)
    chunks: list[Any] = []
    with pytest.raises(InfrastructureError, match=FAULTS[fault]) as caught:
        await asyncio.wait_for(ask(engine, [7], 30, name="hit", into=chunks), 60)
    assert "hit" in str(caught.value), "the error names the call"
    ids = [t for c in chunks for t in c.token_ids]
    context = [7]
    for token in ids:
        assert token == fake.token_after(context, 10)
        context.append(token)
    assert all(chunk.finish is None for chunk in chunks)
    server.faults.clear()
    rest = await ask(engine, [7, *ids], 30 - len(ids), name="elsewhere")
    assert len(ids) + len(rest.ids) == 30
    assert not engine._state.calls


async def test_a_hang_is_noticed(served: Any, ask: Any) -> None:
    server, engine = await served({"stall_s": 0.5})
    server.faults.add("hang")
    with pytest.raises(InfrastructureError, match="hangs"):
        await asyncio.wait_for(ask(engine, [7], 30), 60)
    with pytest.raises(InfrastructureError, match="hangs"):
        await engine.load()


async def test_a_pause_is_no_hang(served: Any, ask: Any) -> None:
    _, engine = await served({"stall_s": 3.0})
    chunks: list[Any] = []
    task = asyncio.create_task(ask(engine, [7], 60, into=chunks))
    while not chunks:
        await asyncio.sleep(0.002)
    await engine.pause()
    await asyncio.sleep(4.5)
    await engine.resume()
    assert len((await task).ids) == 60


async def test_a_server_that_went_away_fails_every_question(served: Any, ask: Any, sources: Any) -> None:
    server, engine = await served()
    await server.stop()
    with pytest.raises(InfrastructureError):
        await ask(engine, [1], 3)
    with pytest.raises(InfrastructureError):
        await engine.load()
    with pytest.raises(InfrastructureError):
        await engine.update_weights(sources[1])


@pytest.mark.parametrize(("fault", "what"), [("other-model", "vocabulary"), ("no-dev-mode", "DEV_MODE")])
async def test_a_server_that_cannot_serve_is_refused_at_the_start(
    served: Any, sources: list[WeightSource], fault: str, what: str
) -> None:
    server, engine = await served(start=False)
    server.faults.add(fault)
    with pytest.raises(InfrastructureError, match=what):
        await engine.start(sources[0])
