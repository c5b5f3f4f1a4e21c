"""What comes between two things that are done together: a gate that closes again, an abort that the server does not
pass on, a call that the server had put back into its queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gyre_core import FinishReason, InfrastructureError, PauseMode
from gyre_core.testing.engine_rig import Watched, call, request_of

PROMPT = list(range(30))


# The gate


async def test_no_call_begins_while_the_gate_is_closed(engine_of: Any) -> None:
    engine, fake = await engine_of()
    await engine.pause()
    waits = Watched(engine, request_of(PROMPT, 5, name="waits"))
    await asyncio.sleep(0.02)
    await engine.resume()
    await engine.pause()
    await asyncio.sleep(0.05)
    assert "/generate" not in fake.counts
    await engine.resume()
    assert len((await waits.task).ids) == 5


async def test_no_call_begins_in_the_middle_of_an_update(engine_of: Any, version: Any) -> None:
    """Where nothing runs the server is not paused for the load: what it samples would bear the wrong version."""
    engine, fake = await engine_of()
    await engine.pause()
    waits = Watched(engine, request_of(PROMPT, 5, name="waits"))
    await asyncio.sleep(0.02)
    await engine.resume()
    await engine.update_weights(version(1))
    assert (await waits.task).versions == [1] * 5
    paths = [path for path, _ in fake.asked]
    assert paths.index("/generate") > paths.index("/update_weights_from_disk", paths.index("/pause_generation"))


# Calls that the server had put back into its queue, for want of KV, before they were ended


async def test_an_abort_there_keeps_each_token_once(engine_of: Any, toy: Any) -> None:
    engine, fake = await engine_of()
    fake.queued = True
    running = Watched(engine, request_of(PROMPT, 500, name="a"))
    await running.until(4)
    await engine.abort("a")
    result = await running.task
    assert result.finish is FinishReason.ABORT
    assert result.ids == toy.tokens(PROMPT, ["0"] * len(result.ids))
    assert result.logprobs == pytest.approx([toy.logprob("0", token) for token in result.ids])


async def test_an_update_goes_on_from_there(engine_of: Any, toy: Any, version: Any) -> None:
    engine, fake = await engine_of(on_update="recompute")
    fake.queued = True
    running = Watched(engine, request_of(PROMPT, 90, name="a"))
    await running.until(5)
    await engine.update_weights(version(1))
    result = await running.task
    assert len(result.ids) == 90
    assert set(result.versions) == {0, 1}
    assert result.ids == toy.tokens(PROMPT, [str(number) for number in result.versions])


# Answers that nobody waits for


def next_answer(fake: Any, how: str, path: str = "/continue_generation") -> None:
    fake.fault = f"{how}:{path}:{fake.counts.get(path, 0) + 1}"


@pytest.mark.parametrize("how", ["late", "slow"])
async def test_a_resume_that_was_given_up_leaves_no_server_that_is_taken_for_paused(engine_of: Any, how: str) -> None:
    """It goes on; who pauses next must not be told that it stands still."""
    engine, fake = await engine_of(request_timeout_s=1.0)
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    await engine.pause()
    next_answer(fake, how)
    resuming = asyncio.create_task(engine.resume())
    while fake.paused:
        await asyncio.sleep(0.001)
    if how == "slow":
        resuming.cancel()
    with pytest.raises(asyncio.CancelledError if how == "slow" else InfrastructureError):
        await resuming
    await engine.pause()
    assert fake.paused
    await engine.resume()
    fake.step_s = 0.0
    assert len((await running.task).ids) == 900


@pytest.mark.parametrize("how", ["update", "pause"])
async def test_a_change_that_is_given_up_while_the_server_is_to_go_on_shuts_nobody_out(
    engine_of: Any, version: Any, how: str
) -> None:
    engine, fake = await engine_of()
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    next_answer(fake, "slow")
    before = fake.counts["/continue_generation"]
    if how == "pause":  # one that fails, so that it is undone
        next_answer(fake, "break", "/pause_generation")
    changing = asyncio.create_task(engine.update_weights(version(1)) if how == "update" else engine.pause())
    if how == "pause":
        while "/pause_generation" not in fake.counts:
            await asyncio.sleep(0.001)
        next_answer(fake, "slow")
    while fake.counts["/continue_generation"] == before:
        await asyncio.sleep(0.001)
    changing.cancel()
    with pytest.raises((asyncio.CancelledError, InfrastructureError)):
        await changing
    assert len((await asyncio.wait_for(call(engine, PROMPT, 3, name="next"), 30)).ids) == 3
    fake.step_s = 0.0
    assert len((await running.task).ids) == 900


# Aborts


@pytest.mark.parametrize("how", ["abort", "gone", "sleep"])
async def test_an_abort_that_failed_once_is_asked_again(engine_of: Any, how: str) -> None:
    engine, fake = await engine_of(memory_saver=True)
    fake.step_s = 0.05  # the call would last 45 s
    fake.fault = "refuse:/abort_request:1"
    stream = engine.generate(request_of(PROMPT, 900, name="a"))
    await anext(stream)
    ends = {"abort": lambda: engine.abort("a"), "gone": stream.aclose, "sleep": engine.sleep}
    await ends[how]()
    while fake.running:
        assert len(next(iter(fake.running.values())).out) < 600
        await asyncio.sleep(0.01)
    assert fake.counts["/abort_request"] > 1
    await stream.aclose()


async def submitted_as_the_pause_came(engine: Any, fake: Any) -> Watched:
    """A call that is at the server's door."""
    fake.reading_s = 0.1
    late = Watched(engine, request_of(PROMPT, 900, name="late"))
    while "/generate" not in fake.counts:
        await asyncio.sleep(0.001)
    await engine.pause()
    while not fake.known:
        await asyncio.sleep(0.001)
    return late


async def test_an_abort_at_the_door_is_kept(engine_of: Any) -> None:
    """The server would pass it on to those inside, who do not know the call, and not once more."""
    engine, fake = await engine_of()
    late = await submitted_as_the_pause_came(engine, fake)
    assert await engine.abort("late") is True
    await asyncio.sleep(0.1)
    await engine.resume()
    result = await late.task
    assert result.finish is FinishReason.ABORT
    assert len(result.ids) < 900


@pytest.mark.parametrize("how", ["update", "pause", "sleep"])
async def test_what_comes_after_that_abort_does_not_wait_for_the_calls_last_token(
    engine_of: Any, version: Any, how: str
) -> None:
    engine, fake = await engine_of(memory_saver=True)
    late = await submitted_as_the_pause_came(engine, fake)
    await engine.abort("late")
    await asyncio.sleep(0.1)
    changes = {
        "update": lambda: engine.update_weights(version(1)),
        "pause": lambda: engine.pause(PauseMode.ABORT),
        "sleep": engine.sleep,
    }
    fake.step_s = 0.05
    await changes[how]()
    if how == "update":
        await engine.resume()
    result = await late.task
    assert result.finish is FinishReason.ABORT
    assert len(result.ids) < 600
    if how != "sleep":
        fake.step_s = 0.0
        await engine.resume()
        assert len((await call(engine, PROMPT, 3, name="next")).ids) == 3
