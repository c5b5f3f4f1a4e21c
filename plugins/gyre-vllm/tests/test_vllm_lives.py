"""Servers that come and go: a port that is another's, a start that fails at its end, keepers and owners that leave a
server behind, ends that take long, and somebody else's server that is started anew or left asleep."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from gyre_core import InfrastructureError, WeightSource
from gyre_vllm import server as serving
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.state import Phase

FAKE = Path(__file__).with_name("vllm_fake.py")


async def until(what: Any) -> None:
    """Return when this is true."""
    async with asyncio.timeout(30):
        while not what():
            await asyncio.sleep(0.002)


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int) -> None:
    """End what a test may have left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def stubborn() -> tuple[str, ...]:
    """A fake that does not end when it is told to, until it is killed."""
    return ("sh", "-c", f'trap "" TERM; exec {sys.executable} {FAKE} "$@"', "serve")


def failing_while(mark: Path, fault: str) -> tuple[str, ...]:
    """A fake that has this fault when it is started while the file `mark` exists."""
    return ("sh", "-c", f'test -e {mark} && set -- "$@" {fault}; exec {sys.executable} {FAKE} "$@"', "serve")


# -- starts ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def other(fake: ModuleType) -> Any:
    """Another cell's server: what it serves, and its port."""
    server = fake.FakeVLLM()
    server.weights = 12
    port = urlsplit(await server.start()).port
    yield server, port
    await server.stop()


async def test_another_cells_server_that_took_our_port_is_left_alone(
    owned: Any, serves: Any, other: Any, sources: list[WeightSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is free when it is chosen may be taken when our server has imported all it needs: what answers there
    is not ours, and ours starts at another one."""
    server, port = other
    taken, stock = [port], serving.free_port
    monkeypatch.setattr(serving, "free_port", lambda host: taken.pop() if taken else stock(host))
    engine = owned()
    await engine.start(sources[0])
    await serves(engine, 0, [3])
    assert not taken
    assert server.version == "default", "its own engine's calls would fail from now on"
    assert server.log == []


async def test_another_server_on_a_port_that_was_set_is_told(
    owned: Any, other: Any, sources: list[WeightSource]
) -> None:
    server, port = other
    engine = owned(port=port)
    with pytest.raises(InfrastructureError, match=r"another server|already in use"):
        await engine.start(sources[0])
    assert server.log == []


async def test_a_start_that_fails_at_its_last_question_leaves_no_server(
    owned: Any, process_of: Any, serves: Any, sources: list[WeightSource], tmp_path: Path
) -> None:
    """And may be asked for again, as may a wake that had to start another server."""
    (mark := tmp_path / "fails").touch()
    engine = owned(command=failing_while(mark, "metrics-fails"))
    with pytest.raises(InfrastructureError, match="metrics failed"):
        await engine.start(sources[0])
    assert engine._state.server is None
    mark.unlink()
    await engine.start(sources[0])
    kill(process_of(engine)[1])
    await until(lambda: engine._state.phase is Phase.FAILED)
    await engine.sleep()
    mark.touch()
    with pytest.raises(InfrastructureError, match="metrics failed"):
        await engine.wake(sources[1])
    assert engine._state.server is None
    mark.unlink()
    await engine.wake(sources[1])
    await serves(engine, 1, [3])
    kill(process_of(engine)[1])
    await until(lambda: engine._state.phase is Phase.FAILED)  # it is watched again


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_a_server_does_not_outlive_its_keeper(owned: Any, process_of: Any, sources: list[WeightSource]) -> None:
    """Nobody is left then who would end it: its accelerators would stay taken."""
    engine = owned()
    await engine.start(sources[0])
    keeper, pid = process_of(engine)
    kill(keeper)
    try:
        await until(lambda: engine._state.fault is not None)
        await engine.close()
        await until(lambda: not runs(pid))
    finally:
        kill(pid)


@pytest.fixture
def child() -> Iterator[Any]:
    """`child()`: a process that was forked from this one and has all its pipes, as a data loader's workers have."""
    made: list[Any] = []

    def fork() -> None:
        made.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(120,), daemon=True))
        made[-1].start()

    yield fork
    for process in made:
        process.kill()
        process.join()


async def test_a_child_of_this_process_keeps_no_server_alive(
    owned: Any, process_of: Any, child: Any, sources: list[WeightSource]
) -> None:
    """It holds the keeper's pipe too, so that our closing it is not its end."""
    engine = owned()
    await engine.start(sources[0])
    _, pid = process_of(engine)
    child()
    await engine.close()
    alive = runs(pid)
    kill(pid)
    assert not alive, "close has returned, and the server still runs"


async def begun(engine: VLLMEngine, change: str) -> asyncio.Task[Any]:
    """`sleep` or `close`, which has let the server go and waits for its end."""
    client = engine._state.server.client  # type: ignore[union-attr]
    task = asyncio.create_task(getattr(engine, change)())
    await until(lambda: client._http.closed)
    return task


async def test_the_load_can_be_asked_for_while_a_server_is_ended_for_a_sleep(
    owned: Any, process_of: Any, sources: list[WeightSource]
) -> None:
    """A cell that hears nothing but errors for 10 s gives itself up; a server may take longer to end."""
    engine = owned(sleep="restart", command=stubborn())
    await engine.start(sources[0])
    _, pid = process_of(engine)
    sleeping = await begun(engine, "sleep")
    try:
        assert (await engine.load()).slots_total == 0
        assert not sleeping.done()
    finally:
        kill(pid)
        await sleeping


@pytest.mark.parametrize("change", ["sleep", "close"])
async def test_an_end_that_was_given_up_is_waited_for_when_it_is_asked_for_again(
    owned: Any, process_of: Any, sources: list[WeightSource], change: str
) -> None:
    """Whoever it returns to takes the accelerators: the server must be gone."""
    engine = owned(sleep="restart", command=stubborn())
    await engine.start(sources[0])
    _, pid = process_of(engine)
    first = await begun(engine, change)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    again = asyncio.create_task(getattr(engine, change)())
    await asyncio.wait([again], timeout=1)
    early = again.done() and runs(pid)
    kill(pid)
    await asyncio.wait_for(again, 60)
    assert not early, f"{change} has returned, and the server still runs"
    assert not runs(pid)


async def test_a_wake_after_a_sleep_that_was_given_up_waits_for_the_old_server_to_be_gone(
    owned: Any, process_of: Any, serves: Any, sources: list[WeightSource], caplog: pytest.LogCaptureFixture
) -> None:
    """The old one still runs, and is not asked to go on: nobody is connected to it any more."""
    engine = owned(sleep="restart", command=stubborn())
    await engine.start(sources[0])
    _, pid = process_of(engine)
    sleeping = await begun(engine, "sleep")
    sleeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sleeping
    waking = asyncio.create_task(engine.wake(sources[1]))
    await asyncio.wait([waking], timeout=0.5)
    kill(pid)
    await asyncio.wait_for(waking, 60)
    assert "does not wake" not in caplog.text
    assert process_of(engine)[1] != pid
    await serves(engine, 1, [3])
    kill(process_of(engine)[1])  # it would not end either


# -- somebody else's servers -------------------------------------------------------------------------------------------


async def test_a_foreign_server_that_sleeps_is_not_told_to_go_on(served: Any) -> None:
    """It would sample whatever comes, with its memory given back."""
    server, engine = await served()
    await engine.sleep()
    await engine.close()
    assert server.asleep
    assert server.paused


@pytest.mark.parametrize("change", ["update_weights", "wake"])
async def test_a_foreign_server_that_was_started_anew_tells_tempered_logprobs_again(
    served: Any, serves: Any, fake: ModuleType, sources: list[WeightSource], change: str
) -> None:
    """A new life of it tells raw ones until our extension is told to put its sampler in place."""
    first, engine = await served()
    await serves(engine, 0, [3], temperature=0.5)
    if change == "wake":
        await engine.sleep()
    await first.stop()
    second = fake.FakeVLLM()
    await second.start(urlsplit(engine.options.url).port)
    try:
        await getattr(engine, change)(sources[1])
        await serves(engine, 1, [3], temperature=0.5)
    finally:
        await engine.close()
        await second.stop()
