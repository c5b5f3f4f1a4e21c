"""Changes that are cancelled or get no answer half way: afterwards the engine goes on, paused only if somebody asked
for it and got it, or it has failed and says so. The server does what it was told, whoever still listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gyre_core import FinishReason, InfrastructureError, PauseMode, WeightSource
from gyre_vllm.engine import VLLMEngine


async def until(what: Any) -> None:
    """Return when this is true."""
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.002)


async def give_up(change: asyncio.Task[Any], times: int = 1) -> None:
    """Cancel it while it waits for the server, so often."""
    for _ in range(times):
        change.cancel()
        await asyncio.sleep(0.01)


async def cancelled(change: asyncio.Task[Any]) -> bool:
    """Whether it ended by being cancelled."""
    await asyncio.wait([change], timeout=30)
    return change.cancelled()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("fault", ["none", "pause-fails"])
async def test_an_update_that_is_given_up_as_the_server_goes_on_leaves_the_engine_open(
    running: Any, serves: Any, sources: list[WeightSource], fault: str, times: int
) -> None:
    """It was cancelled behind its load, or while what had failed was put right; more than once, as when a timeout and
    the end of a run come together."""
    server, engine, task = await running()
    server.log.clear()
    server.faults.add(fault)
    server.mute.add("resume")
    changing = asyncio.create_task(engine.update_weights(sources[1]))
    await until(lambda: "resume" in server.log)
    await give_up(changing, times)
    server.mute.clear()
    assert await cancelled(changing)
    server.faults.clear()
    server.most = 100
    version = 0 if fault == "pause-fails" else 1
    await serves(engine, version, [3])
    assert set((await asyncio.wait_for(task, 30)).versions) == {0, version}
    await engine.update_weights(sources[2])
    await serves(engine, 2, [3])


async def test_a_pause_that_is_given_up_is_no_pause(running: Any, serves: Any) -> None:
    """Who gave it up resumes nothing."""
    server, engine, task = await running()
    server.mute.add("abort")
    pausing = asyncio.create_task(engine.pause(PauseMode.ABORT))
    assert (await asyncio.wait_for(task, 30)).finish is FinishReason.ABORT
    await give_up(pausing)
    server.mute.clear()
    assert await cancelled(pausing)
    await serves(engine, 0, [3])
    assert not server.paused


@pytest.mark.parametrize("change", ["update_weights", "sleep"])
async def test_an_engine_whose_weights_were_on_their_way_back_when_it_was_given_up_has_failed(
    served: Any, ask: Any, sources: list[WeightSource], change: str
) -> None:
    """The change itself had failed, and nobody heard whether the weights of before are whole again."""
    server, engine = await served({"control_timeout_s": 30.0})
    server.log.clear()
    server.faults.add("load-fails" if change == "update_weights" else "sleep-fails")
    server.mute.add("gyre_load")
    changing = asyncio.create_task(engine.update_weights(sources[1]) if change == "update_weights" else engine.sleep())
    await until(lambda: server.log.count("gyre_load") == (2 if change == "update_weights" else 1))
    await give_up(changing)
    assert await cancelled(changing)
    for question in (ask(engine, [3], 5), engine.load()):
        with pytest.raises(InfrastructureError, match=r"bringing version 0 back.*CancelledError"):
            await asyncio.wait_for(question, 30)


async def resume_in_vain(server: Any, engine: VLLMEngine, how: str) -> None:
    """Ask the paused engine to go on; the server does, and who asked does not hear of it."""
    server.mute.add("resume")
    if how == "unanswered":
        with pytest.raises(InfrastructureError, match="no answer"):
            await engine.resume()
        server.mute.clear()
        return
    resuming = asyncio.create_task(engine.resume())
    await until(lambda: not server.paused)
    await give_up(resuming)
    server.mute.clear()
    assert await cancelled(resuming)


@pytest.mark.parametrize("how", ["cancelled", "unanswered"])
@pytest.mark.parametrize("then", ["update_weights", "pause", "resume"])
async def test_after_a_resume_that_was_given_up_the_server_is_not_taken_for_paused(
    running: Any, serves: Any, sources: list[WeightSource], then: str, how: str
) -> None:
    """The fake refuses to load while it samples; a real server would sample under half a load."""
    server, engine, task = await running({"control_timeout_s": 2.0} if how == "unanswered" else {})
    await engine.pause()
    await resume_in_vain(server, engine, how)
    if then == "update_weights":
        await engine.update_weights(sources[1])
    elif then == "pause":
        await engine.pause()
        assert server.paused
        await engine.resume()
    else:
        await engine.resume()
    server.most = 100
    version = int(then == "update_weights")
    await serves(engine, version, [3])
    assert set((await asyncio.wait_for(task, 30)).versions) == {0, version}
