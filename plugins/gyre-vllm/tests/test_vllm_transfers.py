"""Moves that meet a change of the engine, or a server that is full: nothing is told for weights it is not of."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from gyre_core import FinishReason, InfrastructureError, PauseMode, WeightSource
from gyre_vllm import handover
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.transfers import Transfers

PROMPT = list(range(40))


async def two(served: Any, sources: list[WeightSource]) -> tuple[Any, VLLMEngine, Any, VLLMEngine]:
    """Two fakes with our connector."""
    made = []
    for _ in range(2):
        server, engine = await served(start=False)
        server.faults |= {"connector", "takes"}
        await engine.start(sources[0])
        made += [server, engine]
    return made[0], made[1], made[2], made[3]


async def waits_at(server: Any, made: Awaitable[Any]) -> asyncio.Task[Any]:
    """A task whose request waits at the full server."""
    server.room.clear()
    before = len(server.bodies)
    task = asyncio.ensure_future(made)
    async with asyncio.timeout(60):
        while len(server.bodies) == before:
            await asyncio.sleep(0.002)
    return task


async def sampling(a: VLLMEngine, ask: Any) -> tuple[asyncio.Task[Any], list[Any]]:
    chunks: list[Any] = []
    running = asyncio.create_task(ask(a, list(range(20)), 100, into=chunks))
    while len(chunks) < 3:
        await asyncio.sleep(0.002)
    return running, chunks


async def within(task: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(task, 60)


async def test_an_export_that_a_change_of_weights_overtakes_gives_nothing(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    source, a, destination, b = await two(served, sources)
    await ask(a, PROMPT, 3)
    moving = await waits_at(source, a.kv_export("s-a"))
    await within(a.update_weights(sources[1]))
    await b.update_weights(sources[1])
    source.room.set()
    assert await within(moving) is None
    assert destination.bodies == []


async def test_an_export_is_given_up_also_by_a_new_prefix_cache(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    source, a, _, _ = await two(served, sources)
    await ask(a, PROMPT, 3)
    moving = await waits_at(source, a.kv_export("s-a"))
    await within(a.flush_cache())
    source.room.set()
    assert await within(moving) is None


@pytest.mark.parametrize("stop", [False, True])
async def test_nothing_is_exported_between_the_load_and_its_version(
    stop: bool, served: Any, sources: list[WeightSource], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the server has the next weights already, and the engine is still of the old version."""
    source, a, _, _ = await two(served, sources)
    await ask(a, PROMPT, 3)
    assert a._state.server is not None
    client, seen = a._state.server.client, []
    enter = client.set_version
    if stop:
        running, _ = await sampling(a, ask)
    moving = await waits_at(source, a.kv_export("s-a", stop=stop))

    async def set_version(version: int) -> None:
        source.room.set()
        assert source.weights == 11
        seen.append(await within(moving))
        seen.append(await within(a.kv_export("s-a")))
        await enter(version)

    monkeypatch.setattr(client, "set_version", set_version)
    await within(a.update_weights(sources[1]))
    assert seen == [None, None]
    if stop:
        assert (await within(running)).finish is FinishReason.ABORT
    await ask(a, PROMPT, 3)
    assert (await within(a.kv_export("s-a"))).version == 1


async def test_an_import_that_a_change_of_weights_overtakes_is_refused(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    _, a, destination, b = await two(served, sources)
    await ask(a, PROMPT, 3)
    held = await a.kv_export("s-a")
    moving = await waits_at(destination, b.kv_import(held))
    await within(b.update_weights(sources[1]))
    destination.room.set()
    with pytest.raises(InfrastructureError, match="change of weights"):
        await within(moving)
    assert await b.kv_export("s-a") is None


async def test_after_a_load_that_failed_no_prefix_of_before_is_found(
    served: Any, sources: list[WeightSource], ask: Any
) -> None:
    """The server ran on while half of the next weights was in it."""
    source, a, _, _ = await two(served, sources)
    await ask(a, PROMPT, 3)
    source.faults.add("load-fails")
    with pytest.raises(InfrastructureError, match="load failed"):
        await a.update_weights(sources[1])
    assert a.version == 0
    assert await a.kv_export("s-a") is None
    assert (await ask(a, PROMPT, 3)).cached == 0


@pytest.mark.parametrize("connector", [False, True])
async def test_weights_whose_version_the_server_does_not_take_go_again(
    connector: bool, served: Any, sources: list[WeightSource], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, a = await served(start=False)
    source.faults |= {"connector"} if connector else set()
    await a.start(sources[0])
    assert a._state.server is not None
    client = a._state.server.client
    take = client.set_version

    async def refuse_1(version: int) -> None:
        if version == 1:
            raise InfrastructureError("setting the version", got="no answer in 120 s")
        await take(version)

    monkeypatch.setattr(client, "set_version", refuse_1)
    with pytest.raises(InfrastructureError, match="setting the version"):
        await a.update_weights(sources[1])
    assert (a.version, source.weights, source.version) == (0, 10, "0")
    result = await ask(a, PROMPT, 3)
    assert set(result.versions) == {0}


CHANGES: dict[str, Callable[[VLLMEngine, list[WeightSource]], Awaitable[None]]] = {
    "pause": lambda a, _: a.pause(PauseMode.KEEP),
    "abort": lambda a, _: a.pause(PauseMode.ABORT),
    "update": lambda a, sources: a.update_weights(sources[1]),
    "close": lambda a, _: a.close(),
}


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("change", CHANGES)
async def test_no_change_waits_for_a_move(
    change: str, stop: bool, served: Any, sources: list[WeightSource], ask: Any
) -> None:
    """The server answers the move never."""
    source, a, _, _ = await two(served, sources)
    await ask(a, PROMPT, 3)
    running, _ = await sampling(a, ask)
    moving = await waits_at(source, a.kv_export("s-a", stop=stop))
    await within(CHANGES[change](a, sources))
    if change in ("update", "close"):
        told = (await asyncio.wait_for(asyncio.gather(moving, return_exceptions=True), 60))[0]
        assert told is None or (change == "close" and isinstance(told, InfrastructureError))
    assert not source.room.is_set()
    moving.cancel()
    await a.close()
    await asyncio.gather(moving, running, return_exceptions=True)


async def test_a_take_that_comes_late_is_not_waited_for_and_does_no_harm(
    served: Any, sources: list[WeightSource], ask: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "TAKE_S", 0.1)
    source, a, _, b = await two(served, sources)
    running, _ = await sampling(a, ask)
    held = await within(await waits_at(source, a.kv_export("s-a", stop=True)))
    cut = await within(running)
    assert held is None
    assert cut.finish is FinishReason.ABORT
    assert 3 <= len(cut.ids) < 100
    context = [*range(20), *cut.ids]
    again = asyncio.create_task(ask(a, context, 50))  # the session goes on where it was: what the take must not end
    source.room.set()
    rest, elsewhere = await within(again), await within(ask(b, context, 50))
    assert rest.finish is FinishReason.LENGTH
    assert rest.ids == elsewhere.ids
    known = list(range(20))
    for token in [*cut.ids, *rest.ids]:
        assert token == fake.token_after(known, 10)
        known.append(token)


def test_a_stopped_calls_export_is_used_or_given_up_before_its_lease_ends() -> None:
    assert handover.TAKE_S + handover.LAST_TOKENS_S < handover.LEASE_S


async def test_a_transfer_that_is_over_is_not_cut() -> None:
    transfers = Transfers()
    async with transfers.one():
        pass
    with transfers.none(), pytest.raises(TimeoutError):
        async with transfers.one():
            pytest.fail("it was let in")
    transfers.cut()
    async with transfers.one(10):
        await asyncio.sleep(0)


async def test_a_transfer_that_ran_out_of_time_and_is_not_gone_yet_may_be_cut_once_more() -> None:
    transfers = Transfers()

    async def slow() -> None:
        async with transfers.one(0.0):
            try:
                await asyncio.sleep(10)
            finally:
                transfers.cut()

    with pytest.raises(TimeoutError):
        await slow()


async def test_a_move_ends_with_the_server_it_waits_for(served: Any, sources: list[WeightSource], ask: Any) -> None:
    source, a, _, _ = await two(served, sources)
    await ask(a, PROMPT, 3)
    moving = await waits_at(source, a.kv_export("s-a"))
    a._state.fail(InfrastructureError("running vLLM", got="no token in 600 s", expected="tokens"))
    with pytest.raises(InfrastructureError, match="no token in 600 s"):
        await within(moving)


async def test_what_is_asked_after_the_end_is_told_so(served: Any) -> None:
    """As the last words of a move that an engine's end cuts short."""
    _, engine = await served()
    client = engine._state.server.client
    await engine.close()
    with pytest.raises(InfrastructureError, match="closed before"):
        await client.abort(["a"])
