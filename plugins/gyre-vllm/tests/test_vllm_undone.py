"""Changes that fail on the way: afterwards the engine goes on as before, or it has failed and says so at once; it never
takes calls that nobody answers. And servers that die while they sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from gyre_core import FinishReason, InfrastructureError, WeightSource
from gyre_core.testing.support import load_module
from gyre_vllm import state
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.launch import SERVER_MODULES


async def assert_failed(ask: Any, engine: VLLMEngine, *causes: str) -> None:
    """Whoever asks hears of it, with these words."""
    for question in (ask(engine, [1], 2), engine.load()):
        with pytest.raises(InfrastructureError) as caught:
            await asyncio.wait_for(question, 60)
        assert all(cause in str(caught.value) for cause in causes)


@pytest.mark.parametrize("change", ["update_weights", "pause", "sleep"])
async def test_a_pause_that_fails_changes_nothing(
    running: Any, serves: Any, sources: list[WeightSource], change: str
) -> None:
    server, engine, task = await running()
    server.faults.add("pause-fails")
    with pytest.raises(InfrastructureError, match="pause failed"):
        await (engine.update_weights(sources[1]) if change == "update_weights" else getattr(engine, change)())
    server.faults.clear()
    server.most = 100
    whole = await asyncio.wait_for(task, 60)
    assert (whole.versions, whole.finish) == ([0] * 100, FinishReason.LENGTH)
    await serves(engine, 0, [3])
    await engine.update_weights(sources[2])
    await serves(engine, 2, [3])


@pytest.mark.parametrize("change", ["update_weights", "pause", "sleep"])
async def test_a_server_that_neither_pauses_nor_goes_on_has_failed(
    running: Any, ask: Any, sources: list[WeightSource], change: str
) -> None:
    """Whoever asked is told the first cause, everybody else both."""
    server, engine, task = await running()
    server.faults |= {"pause-fails", "resume-fails"}
    with pytest.raises(InfrastructureError, match="pause failed"):
        await (engine.update_weights(sources[1]) if change == "update_weights" else getattr(engine, change)())
    await assert_failed(ask, engine, "pause failed", "resume failed")
    with pytest.raises(InfrastructureError, match="resume failed"):
        await asyncio.wait_for(task, 60)


async def test_a_server_that_does_not_go_on_after_an_update_has_failed(
    running: Any, ask: Any, sources: list[WeightSource]
) -> None:
    server, engine, task = await running()
    server.faults.add("resume-fails")
    with pytest.raises(InfrastructureError, match="resume failed"):
        await engine.update_weights(sources[1])
    await assert_failed(ask, engine, "resume failed")
    with pytest.raises(InfrastructureError, match="resume failed"):
        await asyncio.wait_for(task, 60)


async def test_a_sleep_that_fails_half_way_is_undone(
    running: Any, serves: Any, ask: Any, sources: list[WeightSource]
) -> None:
    """Memory was given back already: weights come again, KV of before is not found."""
    server, engine, task = await running()
    prompt = list(range(40))
    await ask(engine, prompt, 4, name="fill")
    server.faults |= {"sleep-fails", "reset-refused"}
    with pytest.raises(InfrastructureError, match="sleep failed"):
        await engine.sleep()
    assert (await task).finish is FinishReason.ABORT
    assert (await engine.load()).slots_total == 4
    assert (await serves(engine, 0, prompt)).cached == 0
    await engine.update_weights(sources[1])
    await serves(engine, 1, prompt)
    server.faults.clear()
    await engine.sleep()
    await engine.wake(sources[2])
    await serves(engine, 2, prompt)


@pytest.mark.parametrize("second", ["wake-fails", "load-fails", "resume-fails"])
async def test_a_sleep_that_cannot_be_undone_fails_the_engine(running: Any, ask: Any, second: str) -> None:
    server, engine, task = await running()
    server.faults |= {"sleep-fails", second}
    with pytest.raises(InfrastructureError, match="sleep failed"):
        await engine.sleep()
    await assert_failed(ask, engine, "sleep failed", second.replace("-fails", " failed"))
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("change", ["update_weights", "sleep"])
async def test_a_change_that_is_given_up_in_the_middle_fails_the_engine(
    running: Any, ask: Any, sources: list[WeightSource], change: str
) -> None:
    """The server does what it was told all the same: to go on would sample under weights that nobody knows."""
    server, engine, task = await running()
    server.log.clear()
    server.late.clear()
    changing = asyncio.create_task(engine.update_weights(sources[1]) if change == "update_weights" else engine.sleep())
    method = {"update_weights": "gyre_load", "sleep": "gyre_sleep"}[change]
    while method not in server.log:
        await asyncio.sleep(0.002)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    server.late.set()
    server.most = 100
    await assert_failed(ask, engine, "CancelledError")
    if change == "update_weights":
        with pytest.raises(InfrastructureError, match="CancelledError"):
            await asyncio.wait_for(task, 60)
    else:
        assert (await task).finish is FinishReason.ABORT


async def test_a_call_that_comes_while_the_engine_falls_asleep_does_not_wait_until_it_wakes(
    running: Any, serves: Any, ask: Any, sources: list[WeightSource]
) -> None:
    server, engine, task = await running()
    server.log.clear()
    server.late.clear()
    sleeping = asyncio.create_task(engine.sleep())
    while "gyre_sleep" not in server.log:
        await asyncio.sleep(0.002)
    late = asyncio.create_task(ask(engine, [9], 4, name="late"))
    while len(engine._state.calls) == 0 or task in asyncio.all_tasks():
        await asyncio.sleep(0.002)
    server.late.set()
    await sleeping
    assert (await asyncio.wait_for(late, 60)).finish is FinishReason.ABORT
    await engine.wake(sources[1])
    await serves(engine, 1, [9])


async def test_a_call_that_the_server_has_not_read_yet_is_not_sampled_under_another_versions_name(
    served: Any, ask: Any, fake: ModuleType, sources: list[WeightSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in a connection, so no abort ends it, and there is no answer that could be closed."""
    monkeypatch.setattr(state, "_TRIES", 2)
    server, engine = await served({"control_timeout_s": 30.0})
    server.reads.clear()
    call = asyncio.create_task(ask(engine, [5, 6], 8, name="unread"))
    while not server.bodies:
        await asyncio.sleep(0.002)
    await engine.update_weights(sources[1])
    server.reads.set()
    result = await asyncio.wait_for(call, 60)
    ids = [5, 6]
    for token in result.ids:
        assert token == fake.token_after(ids, 11)
        ids.append(token)
    assert result.versions == [1] * 8
    assert [body["cache_salt"] for body in server.bodies[-1:]] == [engine._state.salt]


async def test_a_server_on_accelerators_that_an_earlier_life_left_asleep_is_woken(
    served: Any, serves: Any, sources: list[WeightSource]
) -> None:
    server, engine = await served(start=False)
    server.device, server.asleep = "cuda:0", True
    await engine.start(sources[0])
    await serves(engine, 0, [3])


async def test_an_engine_that_was_paused_stays_so(running: Any, serves: Any, sources: Any) -> None:
    server, engine, task = await running()
    await engine.pause()
    server.faults.add("load-fails")
    with pytest.raises(InfrastructureError, match="load failed"):
        await engine.update_weights(sources[1])
    late = asyncio.create_task(serves(engine, 0, [5]))
    await asyncio.sleep(0.05)
    assert not late.done()
    await engine.resume()
    await late
    server.most = 100
    assert (await task).versions == [0] * 100


# -- servers of ours ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_server_that_died_in_its_sleep_is_followed_by_another(
    owned: Any, process_of: Any, serves: Any, sources: list[WeightSource], noticed: bool
) -> None:
    """A cell that trains asks for nothing but `wake`, whether its engine has seen the death or not."""
    engine = owned()
    await engine.start(sources[0])
    for version in (1, 2):
        await engine.sleep()
        assert engine._changes.sleep_way() == "memory"
        _, pid = process_of(engine)
        os.kill(pid, signal.SIGKILL)
        while noticed and engine._state.server.alive:
            await asyncio.sleep(0.02)
        await asyncio.sleep(1.0 if noticed else 0.0)
        assert (await engine.load()).slots_total == 0
        await engine.wake(sources[version])
        await serves(engine, version, [3])
        assert process_of(engine)[1] != pid


async def test_a_server_that_does_not_wake_is_followed_by_another(
    owned: Any, process_of: Any, serves: Any, sources: list[WeightSource]
) -> None:
    engine = owned("wake-fails")
    await engine.start(sources[0])
    keeper, pid = process_of(engine)
    await engine.sleep()
    await engine.wake(sources[1])
    await serves(engine, 1, [3])
    assert process_of(engine)[1] != pid
    assert not Path(f"/proc/{keeper}").exists()


async def test_a_server_that_neither_sleeps_nor_goes_on_is_ended_which_is_a_sleep_too(
    owned: Any, process_of: Any, serves: Any, sources: list[WeightSource]
) -> None:
    engine = owned("sleep-fails", "wake-fails")
    await engine.start(sources[0])
    keeper, _ = process_of(engine)
    await engine.sleep()
    assert not Path(f"/proc/{keeper}").exists()
    assert (await engine.load()).slots_total == 0
    await engine.wake(sources[1])
    await serves(engine, 1, [3])


async def test_a_foreign_server_that_was_started_again_wakes_too(
    served: Any, serves: Any, fake: ModuleType, sources: list[WeightSource]
) -> None:
    """It never slept. While it is away `wake` says so, and may be asked again."""
    server, engine = await served()
    await engine.sleep()
    await server.stop()
    with pytest.raises(InfrastructureError):
        await engine.wake(sources[1])
    again = fake.FakeVLLM()
    await again.start(urlsplit(engine.options.url).port)
    try:
        await engine.wake(sources[1])
        await serves(engine, 1, [3])
    finally:
        await engine.close()
        await again.stop()


# -- the worker's part -------------------------------------------------------------------------------------------------


class Storage:
    """`stuck`: it cannot be emptied."""

    def __init__(self, size: int, stuck: bool = False) -> None:
        self.size, self.stuck, self._cdata = size, stuck, id(self)

    def nbytes(self) -> int:
        return self.size

    def resize_(self, size: int) -> None:
        if self.stuck and size == 0:
            raise RuntimeError("stuck")
        self.size = size

    def untyped_storage(self) -> Storage:
        return self


def test_whatever_a_worker_cannot_do_it_says_in_an_answer(tmp_path: Path) -> None:
    """vLLM's executor takes one worker's failure for all, and the others' for their answers to the next order."""
    worker = load_module(SERVER_MODULES / "gyre_vllm_worker.py").GyreWorker()
    worker.model_runner, worker._gyre_storages = None, [(None, 8)]
    orders: dict[str, tuple[Any, ...]] = {
        "gyre_prepare": (), "gyre_load": ("v0", str(tmp_path)), "gyre_receive": ({}, {}, str(tmp_path)),
        "gyre_sleep": (), "gyre_wake": (),
    }  # fmt: skip
    for method, given in orders.items():
        assert "Error: " in getattr(worker, method)(*given)["error"], method


def test_a_worker_takes_back_what_half_a_sleep_gave_and_nothing_twice() -> None:
    module = load_module(SERVER_MODULES / "gyre_vllm_worker.py")
    held = [Storage(8), Storage(16), Storage(32, stuck=True)]
    worker = module.GyreWorker()
    model = SimpleNamespace(
        modules=list, parameters=lambda: [SimpleNamespace(data=held[0]), SimpleNamespace(data=held[1])]
    )
    worker.model_runner = SimpleNamespace(device=SimpleNamespace(type="cpu"), model=model, kv_caches=held[1:])
    worker.vllm_config = SimpleNamespace(kv_transfer_config=None)
    worker.gyre_wake()
    assert "stuck" in worker.gyre_sleep()["error"], "other workers' answers would be taken for those to the next order"
    assert [storage.size for storage in held] == [0, 0, 32]
    worker.gyre_wake()
    worker.gyre_wake()
    assert [storage.size for storage in held] == [8, 16, 32]
