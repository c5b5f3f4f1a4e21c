"""What goes wrong with a server is one error that names it; the other calls, and the session elsewhere, go on."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, ConfigError, FinishReason, InfrastructureError
from gyre_core.testing.engine_rig import Watched, call, is_idle, request_of
from gyre_sglang import client, guard
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions

PROMPT = list(range(30))


@pytest.fixture
def launched(context: ComponentContext, fake_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that starts the stand-in as a process of its own, and has time to learn how that ended."""
    monkeypatch.setattr(client, "DEATH_PATIENCE_S", 60.0)

    def make(fault: str = "", **options: Any) -> SGLangEngine:
        command = (sys.executable, str(fake_path))
        arguments = ("--fault", fault) if fault else ()
        return SGLangEngine(SGLangOptions(command=command, arguments=arguments, chunk_s=0.0, **options), context)

    return make


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("500", "illegal memory access"),
        ("nan", "logprob None of token"),
        ("nan-finish", "logits that are not numbers"),
        ("truncate", "after 3 tokens|payload|closed|disconnected"),
        ("vocab", "token 321"),
        ("oom", "Out of memory"),
    ],
)
async def test_a_broken_call_is_one_error_that_says_what_came(engine_of: Any, fault: str, said: str) -> None:
    engine, fake = await engine_of(fault=fault)
    watched = Watched(engine, request_of(PROMPT, 20, name="hit", session="s7"))
    with pytest.raises(InfrastructureError, match=said) as caught:
        await watched.task
    assert "call 'hit' of session 's7'" in str(caught.value)
    assert sum(len(chunk.token_ids) for chunk in watched.chunks) <= 4
    assert all(chunk.finish is None for chunk in watched.chunks)
    fake.fault = ""
    assert len((await call(engine, PROMPT, 20, name="next")).ids) == 20


async def test_a_server_that_hangs_fails_its_calls(engine_of: Any) -> None:
    engine, _ = await engine_of(fault="hang", stall_s=3.0)
    watched = Watched(engine, request_of(PROMPT, 20, name="hit"))
    with pytest.raises(InfrastructureError, match="not a word in"):
        await watched.task
    assert sum(len(chunk.token_ids) for chunk in watched.chunks) == 3


async def test_a_server_that_waits_for_us_does_not_hang(engine_of: Any) -> None:
    engine, _ = await engine_of(stall_s=3.0)
    watched = Watched(engine, request_of(PROMPT, 40, name="kept"))
    await watched.until(2)
    await engine.pause()
    await asyncio.sleep(4.5)
    await engine.resume()
    assert len((await watched.task).ids) == 40


async def test_a_server_that_dies_is_named_with_its_last_words(launched: Any, version: Any) -> None:
    engine = launched("die")
    await engine.start(version(0))
    first = Watched(engine, request_of(PROMPT, 900, name="first"))
    await first.until(2)
    second = Watched(engine, request_of(PROMPT, 20, name="second"))
    results = await asyncio.gather(first.task, second.task, return_exceptions=True)
    for result in results:
        assert isinstance(result, InfrastructureError)
        assert "ended with signal 9" in str(result)
        assert "index out of range in self" in str(result)
    for ask in (call(engine, PROMPT, 3), engine.load(), engine.update_weights(version(1)), engine.pause()):
        with pytest.raises(InfrastructureError, match="signal 9"):
            await ask
    await engine.close()


async def test_a_server_that_does_not_come_up(launched: Any, version: Any) -> None:
    engine = launched("start")
    with pytest.raises(InfrastructureError, match=r"Tried to allocate 14\.00 GiB"):
        await engine.start(version(0))
    await engine.close()


async def test_a_port_that_was_taken_meanwhile_costs_another_start(launched: Any, version: Any, tmp_path: Path) -> None:
    """SGLang does not end when it cannot have its port: it stays without one for ever."""
    engine = launched(f"port:{tmp_path / 'taken'}", start_timeout_s=60.0)
    await asyncio.wait_for(engine.start(version(0)), 60)
    assert (tmp_path / "taken").exists()
    assert len((await call(engine, PROMPT, 3)).ids) == 3
    await engine.close()


async def test_a_launched_server_sleeps_by_ending_and_comes_back(launched: Any, version: Any) -> None:
    engine = launched(cpu_spare=False)
    await engine.start(version(0))
    process = engine._server.process
    assert process.resident_bytes() > 2**20
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    await engine.sleep()
    assert (await running.task).finish is FinishReason.ABORT
    assert process.resident_bytes() == 0
    await engine.wake(version(1))
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    assert await is_idle(engine)
    assert set(engine.timings) == {"start", "sleep", "wake"}
    last = Watched(engine, request_of(PROMPT, 900, name="b"))
    await last.until(2)
    await engine.close()
    assert (await last.task).finish is FinishReason.ABORT


async def test_a_spare_server_takes_over_what_the_wake_asks_for(
    context: ComponentContext, interpreter: str, version: Any
) -> None:
    engine = SGLangEngine(SGLangOptions(python=interpreter, chunk_s=0.0), context)
    await engine.start(version(0))
    await engine.sleep()
    spare = engine._starter._spare
    assert spare is not None
    await engine.wake(version(3))
    assert engine._server.process is spare
    assert (await call(engine, PROMPT, 3)).versions == [3] * 3
    await engine.sleep()
    unused = engine._starter._spare
    assert unused is not spare
    assert spare.resident_bytes() == 0
    await engine.close()
    assert engine.resident_bytes() == 0
    assert unused.resident_bytes() == 0


async def test_a_newer_server_is_warned_of(launched: Any, version: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = launched("newer")
    with caplog.at_level(logging.WARNING, "gyre.sglang"):
        await engine.start(version(0))
    assert "0.5.24" in caplog.text
    assert "written for 0.5.23" in caplog.text
    await engine.close()


async def test_an_overlapping_scheduler_is_refused_where_versions_would_be_wrong(
    context: ComponentContext, fake_path: Path, version: Any
) -> None:
    options = SGLangOptions(command=(sys.executable, str(fake_path)), overlap=True, on_update="recompute", chunk_s=0.0)
    engine = SGLangEngine(options, context)
    await engine.start(version(0))
    await engine.close()
    with pytest.raises(ValueError, match="overlap"):
        SGLangOptions(overlap=True)


async def test_no_environment_is_said_with_the_way_out(
    context: ComponentContext, version: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GYRE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"engine_env\.py sglang"):
        await SGLangEngine(SGLangOptions(), context).start(version(0))
    with pytest.raises(InfrastructureError, match="no program"):
        await SGLangEngine(SGLangOptions(python="nowhere/python"), context).start(version(0))


def test_nothing_outlives_the_owner(tmp_path: Path) -> None:
    """The owner is killed; so is what the command started, even when it ignores SIGTERM."""
    marks = tmp_path / "pids"
    stubborn = (
        "import os, signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(marks)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}\\n'); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c",
         "import subprocess, sys, time\n"
         f"subprocess.Popen([sys.executable, {guard.__file__!r}, sys.executable, '-c', {stubborn!r}],"
         " stdin=subprocess.PIPE, start_new_session=True)\ntime.sleep(600)"],
    )  # fmt: skip
    try:
        _until(lambda: marks.exists() and marks.read_text().endswith("\n"))
    finally:
        owner.kill()
        owner.wait()
    pids = [int(word) for word in marks.read_text().split()]
    _until(lambda: not any(_lives(pid) for pid in pids))


def test_the_guard_passes_input_and_status_on() -> None:
    argv = [sys.executable, guard.__file__, sys.executable, "-c", "import sys; sys.exit(int(sys.stdin.readline()))"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write(b"7\n")
    process.stdin.flush()
    assert process.wait(60) == 7


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(what: Any) -> None:
    import time

    for _ in range(6000):
        if what():
            return
        time.sleep(0.01)
    pytest.fail("did not happen in 60 s")


def test_signal_numbers_are_statuses() -> None:
    argv = [sys.executable, guard.__file__, sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    assert process.wait(60) == 128 + signal.SIGKILL
