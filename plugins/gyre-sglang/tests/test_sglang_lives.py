"""Servers that come and go: a pause ends with its server, a container with its engine; another cell's is not ours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, InfrastructureError
from gyre_core.testing.engine_rig import Watched, call, request_of
from gyre_sglang import launch
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions

PROMPT = list(range(30))


@pytest.fixture
async def after_a_paused_one_died(context: ComponentContext, interpreter: str, version: Any) -> Any:
    """An engine on its second server."""
    engine = SGLangEngine(SGLangOptions(python=interpreter, chunk_s=0.0), context)
    await engine.start(version(0))
    await engine.pause()
    assert engine._server is not None
    process = engine._server.process
    assert process is not None
    os.killpg(process._process.pid, signal.SIGKILL)
    await process.exited
    await engine.sleep()
    await engine.wake(version(1))
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    yield engine
    await engine.close()


async def test_a_pause_of_the_next_server_pauses_it(after_a_paused_one_died: Any) -> None:
    engine = after_a_paused_one_died
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    await engine.pause()
    before = (await engine.load()).sampled_tokens
    await asyncio.sleep(0.3)
    assert (await engine.load()).sampled_tokens == before
    await engine.resume()
    await running.until(len(running.chunks) + 2)
    await engine.abort("a")
    await running.task


async def test_the_next_server_goes_on_after_an_update(after_a_paused_one_died: Any, version: Any) -> None:
    engine = after_a_paused_one_died
    running = Watched(engine, request_of(PROMPT, 200, name="a"))
    await running.until(2)
    await engine.update_weights(version(2))
    result = await running.task
    assert (len(result.ids), result.versions[-1]) == (200, 2)


CLIENT = """#!{python}
import signal, subprocess, sys
server = subprocess.Popen([{python!r}, {fake!r}, *sys.argv[1:]], start_new_session=True)
open({pid!r}, "w").write(str(server.pid))
signal.signal(signal.SIGTERM, lambda *_: server.terminate())
sys.exit(server.wait())
"""


async def test_a_server_in_a_container_ends_with_its_engine(
    context: ComponentContext, fake_path: Path, tmp_path: Path, version: Any
) -> None:
    """As with `docker run`: the server is a child of somebody else, in another session; its client passes SIGTERM on,
    and leaves it behind when it is killed."""
    client, pid = tmp_path / "docker", tmp_path / "pid"
    client.write_text(CLIENT.format(python=sys.executable, fake=str(fake_path), pid=str(pid)))
    client.chmod(0o755)
    engine = SGLangEngine(SGLangOptions(command=(str(client),), chunk_s=0.0), context)
    await engine.start(version(0))
    number = int(pid.read_text())
    running = Watched(engine, request_of(PROMPT, 900, name="a"))
    await running.until(2)
    try:
        await engine.close()
        await running.task
        for _ in range(3000):  # whose child it was has to notice
            if not Path(f"/proc/{number}").exists():
                return
            await asyncio.sleep(0.01)
        pytest.fail("the container's server lives on")
    finally:
        if Path(f"/proc/{number}").exists():
            os.kill(number, signal.SIGKILL)


def slow_start(folder: Path, fake: Path, taken: str) -> str:
    """An interpreter whose server imports for long, and then says that a port is taken and stays, as SGLang does."""
    path = folder / "slow-python"
    path.write_text(
        f"#!/bin/sh\nshift 2\ncase \"$*\" in *' {taken} '*)\n"
        f"sleep 5; echo 'ERROR: address already in use'; sleep 600;; esac\nexec {sys.executable} {fake} \"$@\"\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("always", [False, True])
async def test_another_cells_server_is_not_taken_for_ours(
    engine_of: Any, context: ComponentContext, fake_path: Path, tmp_path: Path, version: Any,
    monkeypatch: pytest.MonkeyPatch, always: bool,
) -> None:  # fmt: skip
    """Two cells chose one port; the other has it, and answers, before ours has imported what it needs."""
    other, fake = await engine_of()
    port = int(other.options.url.rpartition(":")[2])
    ports = iter([port] * (9 if always else 1))
    real: Callable[[], int] = launch.free_port
    monkeypatch.setattr(launch, "free_port", lambda: next(ports, None) or real())
    asked = len(fake.asked)
    python = slow_start(tmp_path, fake_path, str(port))
    engine = SGLangEngine(SGLangOptions(python=python, chunk_s=0.0), replace(context, name="cell-1"))
    try:
        if always:
            with pytest.raises(InfrastructureError, match="already in use by another server, of random seed 0"):
                await engine.start(version(0))
        else:
            await engine.start(version(0))
            assert engine._server is not None
            assert engine._server.client.url != other.options.url
    finally:
        await engine.close()
    assert len(fake.asked) == asked


async def test_a_seed_that_the_user_names_is_no_sign_of_another(
    context: ComponentContext, interpreter: str, version: Any
) -> None:
    options = SGLangOptions(python=interpreter, arguments=("--random-seed", "5"), chunk_s=0.0)
    engine = SGLangEngine(options, context)
    await engine.start(version(0))
    assert engine._server is not None
    assert engine._server.facts.seed == 5
    await engine.close()
