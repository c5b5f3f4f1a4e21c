"""Calls whose answer does not begin, servers that sample nothing: whoever waits hears of it. And what is no hang."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gyre_core import FinishReason, GenerateRequest, InfrastructureError, PauseMode, SamplingParams
from gyre_vllm import state


async def until(what: Any) -> None:
    """Return when this is true."""
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.002)


async def test_a_call_whose_answer_never_begins_hears_that_the_server_hangs(served: Any, ask: Any) -> None:
    """The server took the connection and is silent: there is no answer yet that could be closed."""
    server, engine = await served({"stall_s": 0.5})
    server.reads.clear()
    with pytest.raises(InfrastructureError, match="hangs"):
        await asyncio.wait_for(ask(engine, [7], 30), 30)


@pytest.mark.parametrize("how", ["abort", "pause", "sleep"])
async def test_a_call_whose_answer_has_not_begun_ends_when_it_is_told_to(
    served: Any, ask: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The server knows nothing of it, so an abort does not end it there."""
    monkeypatch.setattr(state, "_TRIES", 2)
    server, engine = await served({"control_timeout_s": 30.0})
    server.reads.clear()
    call = asyncio.create_task(ask(engine, [5, 6], 8, name="unread"))
    await until(lambda: server.bodies)
    if how == "abort":
        assert await engine.abort("unread")
    elif how == "pause":
        await engine.pause(PauseMode.ABORT)
    else:
        await engine.sleep()
    assert (await asyncio.wait_for(call, 30)).finish is FinishReason.ABORT


async def test_a_hang_is_noticed_while_new_calls_keep_coming(served: Any, ask: Any) -> None:
    """Clients that give up ask again more often than stall_s: that a call was sent is no sign of life."""
    server, engine = await served({"stall_s": 1.0}, slots=1)
    server.faults.add("hang")
    first, others = asyncio.create_task(ask(engine, [7], 30, name="first")), []
    try:
        async with asyncio.timeout(30):
            while not first.done():
                others.append(asyncio.create_task(ask(engine, [8], 30, name=f"n{len(others)}")))
                await asyncio.wait([first], timeout=0.4)
    finally:
        for task in (first, *others):
            task.cancel()
        found = await asyncio.gather(first, *others, return_exceptions=True)
    assert all(isinstance(error, InfrastructureError) and "hangs" in str(error) for error in found)


async def test_a_reader_that_takes_its_time_is_no_hang_of_the_server(served: Any, serves: Any) -> None:
    """Nothing is read of the answer meanwhile, whatever the server sends."""
    _, engine = await served({"stall_s": 2.0})
    stream = engine.generate(GenerateRequest("slow", "s", [7], SamplingParams(3, temperature=0.0)))
    chunks = [await anext(stream)]
    await asyncio.sleep(4.5)
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].finish is FinishReason.LENGTH
    await serves(engine, 0, [3])
