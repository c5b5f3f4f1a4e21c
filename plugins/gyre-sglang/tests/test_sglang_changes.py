"""Changes of weights, of sleep and of pause that fail half way: the engine is what it was, or says why it is not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_core import ComponentContext, FinishReason, InfrastructureError, WeightSource
from gyre_core.testing.engine_rig import Watched, call, request_of
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions
from gyre_weights import HostTensor, Published, Shadow, open_version, publish_delta, publish_full

PROMPT = list(range(30))


@pytest.fixture
def launched(context: ComponentContext, interpreter: str) -> Callable[..., SGLangEngine]:
    """An engine that starts the stand-in: on a CPU, or as if there were an accelerator, with a memory saver."""

    def make(fault: str = "", *, saver: bool = False, **options: Any) -> SGLangEngine:
        arguments = ("--fault", fault) if fault else ()
        place = replace(context, device="cuda", accelerators=1) if saver else context
        return SGLangEngine(SGLangOptions(python=interpreter, arguments=arguments, chunk_s=0.0, **options), place)

    return make


def ordered(engine: SGLangEngine) -> int:
    """The version that the server's worker was told to take last."""
    assert engine._server is not None
    assert engine._server.orders is not None
    (report,) = [json.loads(path.read_text()) for path in engine._server.orders.glob("report-*.json")]
    return int(report["id"].partition("@")[0])


async def fail_everywhere(engine: SGLangEngine, said: str, *more: Awaitable[Any]) -> None:
    """Calls, the load and `more` raise one error."""
    for ask in (call(engine, PROMPT, 3), engine.load(), *more):
        with pytest.raises(InfrastructureError, match=said):
            await ask


# Weights


@pytest.mark.parametrize(
    "fault",
    [
        "late:/update_weights_from_tensor:1",
        "break:/update_weights_from_tensor:1",
        "break:/end_weight_update:1",
        "break:/update_weight_version:1",
        "refuse:/update_weight_version:1",
        "break:/model_info:1",
    ],
)
async def test_weights_that_were_taken_before_the_load_failed_are_not_left_under_the_old_version(
    launched: Any, version: Any, fault: str
) -> None:
    engine = launched(fault, weights_timeout_s=4.0)
    await engine.start(version(0))
    running = Watched(engine, request_of(PROMPT, 100, name="a"))
    await running.until(2)
    with pytest.raises(InfrastructureError, match="policy version 1"):
        await engine.update_weights(version(1))
    assert engine.version == 0
    assert ordered(engine) == 0
    assert (await running.task).versions == [0] * 100
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3
    await engine.update_weights(version(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    await engine.close()


@pytest.mark.parametrize("fault", ["late", "break"])
async def test_the_same_from_disk(engine_of: Any, version: Any, fault: str) -> None:
    engine, fake = await engine_of(weights_timeout_s=4.0)
    fake.fault = f"{fault}:/update_weights_from_disk:2"  # the first is of the start
    with pytest.raises(InfrastructureError, match="policy version 1"):
        await engine.update_weights(version(1))
    assert (engine.version, fake.version, fake.location) == (0, "0", version(0).location)
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3


async def test_a_load_that_moved_nothing_is_not_undone(launched: Any, version: Any) -> None:
    engine = launched("unmoved-1")
    await engine.start(version(0))
    with pytest.raises(InfrastructureError, match="out of memory"):
        await engine.update_weights(version(1))
    assert ordered(engine) == 1
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3
    await engine.close()


async def test_calls_do_not_go_on_with_weights_that_nobody_knows(launched: Any, version: Any) -> None:
    """Neither those that run nor those that wait, when the old weights cannot be brought back either."""
    engine = launched("break:/update_weight_version:*")
    await engine.start(version(0))
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    with pytest.raises(InfrastructureError, match="boom"):
        await engine.update_weights(version(1))
    with pytest.raises(InfrastructureError, match="boom"):
        await running.task
    await fail_everywhere(engine, "policy version 1")
    await engine.close()


async def test_a_change_that_is_given_up_in_the_middle_leaves_no_weights_unknown(launched: Any, version: Any) -> None:
    engine = launched("late:/update_weights_from_tensor:1")
    await engine.start(version(0))
    changing = asyncio.create_task(engine.update_weights(version(1)))
    while not list(engine._server.orders.glob("report-*.json")):
        await asyncio.sleep(0.01)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    await fail_everywhere(engine, "policy version 1")
    await engine.update_weights(version(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    await engine.close()


async def test_a_session_for_weights_that_was_left_open_is_no_obstacle(launched: Any, version: Any) -> None:
    engine = launched("late:/begin_weight_update:1", request_timeout_s=4.0)
    await engine.start(version(0))
    with pytest.raises(InfrastructureError, match="begin_weight_update"):
        await engine.update_weights(version(1))
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3
    await engine.update_weights(version(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    await engine.close()


# Pauses


@pytest.mark.parametrize("way", ["update", "pause"])
async def test_a_server_that_may_have_paused_goes_on(engine_of: Any, version: Any, way: str) -> None:
    engine, fake = await engine_of()
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    fake.fault = "break:/pause_generation:1"
    with pytest.raises(InfrastructureError, match="boom"):
        await (engine.update_weights(version(1)) if way == "update" else engine.pause())
    assert not fake.paused
    assert (await running.task).versions == [0] * 900
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3


@pytest.mark.parametrize("how", ["given up", "no answer"])
async def test_an_update_that_fails_leaves_the_callers_pause(engine_of: Any, version: Any, how: str) -> None:
    """The server goes on for a moment, so that what must begin anew ends; nobody said that it may stay so."""
    engine, fake = await engine_of(on_update="recompute")
    running = Watched(engine, request_of(PROMPT, 300, name="a"))
    await running.until(2)
    await engine.pause()
    if how == "given up":
        changing = asyncio.create_task(engine.update_weights(version(1)))
        while fake.paused:
            await asyncio.sleep(0.001)
        changing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await changing
    else:
        fake.fault = "break:/continue_generation:2"  # the first is of the start
        with pytest.raises(InfrastructureError, match="boom"):
            await engine.update_weights(version(1))
    assert fake.paused
    await engine.resume()
    assert (await running.task).versions == [0] * 300
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3


async def test_calls_do_not_wait_for_a_server_that_does_not_go_on(engine_of: Any, version: Any) -> None:
    engine, fake = await engine_of()
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    fake.fault = "refuse:/continue_generation:2"
    await engine.update_weights(version(1))
    with pytest.raises(InfrastructureError, match="continue_generation"):
        await running.task
    await fail_everywhere(engine, "continue_generation")
    await engine.update_weights(version(2))
    assert not fake.paused
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3


# Sleep


async def test_a_running_server_that_does_not_sleep_serves_on(engine_of: Any) -> None:
    engine, fake = await engine_of(memory_saver=True)
    fake.fault = "refuse:/flush_cache:1"
    with pytest.raises(InfrastructureError, match="boom"):
        await engine.sleep()
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3
    assert (await engine.load()).slots_total > 0


@pytest.mark.parametrize("how", ["refuse", "break", "late"])
async def test_a_running_server_that_may_have_given_its_memory_back_is_not_used(
    engine_of: Any, version: Any, how: str
) -> None:
    """It is not told to take what it may have, nor to give what it may have given: either would end it."""
    engine, fake = await engine_of(memory_saver=True, weights_timeout_s=2.0)
    fake.fault = f"{how}:/release_memory_occupation:1"
    with pytest.raises(InfrastructureError, match="no answer in 2 s" if how == "late" else "boom"):
        await engine.sleep()
    asks = (engine.update_weights(version(1)), engine.pause(), engine.sleep())
    await fail_everywhere(engine, "give its memory back", *asks)
    assert fake.counts["/release_memory_occupation"] == 1
    assert "/resume_memory_occupation" not in fake.counts


@pytest.mark.parametrize("how", ["refuse", "break", "late"])
async def test_a_running_server_that_may_have_taken_its_memory_is_not_told_to_again(
    engine_of: Any, version: Any, how: str
) -> None:
    engine, fake = await engine_of(memory_saver=True, weights_timeout_s=2.0)
    await engine.sleep()
    fake.fault = f"{how}:/resume_memory_occupation:1"
    with pytest.raises(InfrastructureError, match="no answer in 2 s" if how == "late" else "boom"):
        await engine.wake(version(1))
    with pytest.raises(InfrastructureError, match="take its memory again"):
        await engine.wake(version(1))
    assert fake.counts["/resume_memory_occupation"] == 1


@pytest.mark.parametrize("way", ["release", "resume"])
async def test_a_server_of_our_own_whose_memory_is_in_doubt_has_a_successor(
    launched: Any, version: Any, way: str
) -> None:
    engine = launched(f"late:/{way}_memory_occupation:1", saver=True, weights_timeout_s=2.0)
    await engine.start(version(0))
    old = engine._server.process
    await engine.sleep()
    await engine.wake(version(1))
    assert old.resident_bytes() == 0
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


@pytest.mark.parametrize("fault", ["refuse:/flush_cache:1", "break:/release_memory_occupation:1"])
async def test_a_server_of_our_own_that_does_not_sleep_is_ended(launched: Any, version: Any, fault: str) -> None:
    engine = launched(fault, saver=True)
    await engine.start(version(0))
    process = engine._server.process
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    await engine.sleep()
    assert (await running.task).finish is FinishReason.ABORT
    assert process.resident_bytes() == 0
    await engine.wake(version(1))
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


# Death


async def kill(process: Any) -> None:
    os.killpg(process._process.pid, signal.SIGKILL)
    await process.exited


async def test_a_server_that_dies_asleep_has_a_successor(launched: Any, version: Any) -> None:
    engine = launched(saver=True)
    await engine.start(version(0))
    await engine.sleep()
    old = engine._server.process
    await kill(old)
    assert (await engine.load()).slots_total == 0
    await engine.wake(version(1))
    assert engine._server.process is not old
    assert engine.version == 1
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.sleep()
    await engine.wake(version(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    await engine.close()


@pytest.mark.parametrize("fault", ["die:/resume_memory_occupation:1", "break:/resume_memory_occupation:2", "torn-1"])
async def test_a_server_that_does_not_wake_has_a_successor(launched: Any, version: Any, fault: str) -> None:
    engine = launched(fault, saver=True)
    await engine.start(version(0))
    await engine.sleep()
    old = engine._server.process
    await engine.wake(version(1))
    assert engine._server.process is not old
    assert old.resident_bytes() == 0
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


@pytest.mark.parametrize("saver", [False, True])
async def test_a_server_that_died_awake_can_be_put_to_sleep(launched: Any, version: Any, saver: bool) -> None:
    engine = launched(saver=saver)
    await engine.start(version(0))
    await kill(engine._server.process)
    await fail_everywhere(engine, "signal 9")
    await engine.sleep()
    await engine.wake(version(1))
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_spare_server_that_dies_is_not_missed(launched: Any, version: Any, noticed: bool) -> None:
    engine = launched()
    await engine.start(version(0))
    await engine.sleep()
    spare = engine._starter._spare
    killing = asyncio.create_task(kill(spare))
    if noticed:
        await killing
    else:
        await asyncio.sleep(0)
        assert not spare.exited.done()
    await engine.wake(version(1))
    assert engine._server.process is not spare
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


@pytest.mark.parametrize("saver", [False, True])
async def test_a_new_server_begins_with_the_whole_version_that_a_delta_goes_back_to(
    launched: Any, tmp_path: Path, saver: bool
) -> None:
    """No server can be started with what changed alone."""
    config = json.dumps({"vocab_size": 320, "max_position_embeddings": 1024}).encode()
    root, zero, one = tmp_path / "w", bytes(320 * 16), bytes(32)

    def tensors(first: int) -> dict[str, HostTensor]:
        embed = np.frombuffer(bytes([first]) + zero[1:], np.uint8)
        return {"embed": HostTensor("F32", (320, 4), embed), "norm": HostTensor("F32", (8,), np.frombuffer(one, "u1"))}

    full = publish_full(root, 0, tensors(0).items(), extras={"config.json": config})
    shadow = Shadow(0, full.digest, open_version(full.location))
    delta = publish_delta(root, 1, tensors(1).items(), shadow, extras={"config.json": config})
    engine = launched(saver=saver)
    await engine.start(source_of(full))
    await engine.sleep()
    if saver:
        await kill(engine._server.process)
    await engine.wake(source_of(delta))
    assert (await engine._server.client.get("/model_info", 60.0))["model_path"] == full.location
    order = json.loads((engine._server.orders / "order.json").read_text())
    assert (order["location"], order["all"]) == (delta.location, False)
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


def source_of(made: Published) -> WeightSource:
    return WeightSource(made.version, made.location, made.kind, made.digest)


# Seeds


async def test_each_server_of_each_cell_has_a_random_seed_of_its_own(
    context: ComponentContext, interpreter: str, version: Any
) -> None:
    """Else calls without a seed would begin with the same numbers in each life and on each cell."""

    async def seeds(seed: int, *, spare: bool) -> list[int]:
        options = SGLangOptions(python=interpreter, chunk_s=0.0, cpu_spare=spare)
        engine = SGLangEngine(options, replace(context, seed=seed))
        await engine.start(version(0))
        first = await random_seed(engine)
        await engine.sleep()
        await engine.wake(version(0))
        second = await random_seed(engine)
        await engine.close()
        return [first, second]

    assert len({*await seeds(7, spare=True), *await seeds(8, spare=False)}) == 4


async def random_seed(engine: SGLangEngine) -> int:
    assert engine._server is not None
    return int((await engine._server.client.get("/server_info", 60.0))["random_seed"])
