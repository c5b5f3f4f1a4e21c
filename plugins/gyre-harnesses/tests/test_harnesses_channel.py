"""The way to a keeper when callers give up: at whatever moment and however often, the next answer is the next one's."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from gyre_core import ComponentContext, ExecRequest, InfrastructureError
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

ECHO = ExecRequest(["echo", "on"], 60.0, 100)
ENDLESS = ExecRequest(["sh", "-c", "touch started; exec sleep 600"], 600.0, 100)


@pytest.fixture
async def workspace(tmp_path):
    sandbox = LocalSandbox(LocalOptions(), ComponentContext(str(tmp_path), "test"))
    yield await sandbox.create("w", {})
    await sandbox.close()


async def begun(workspace, request=ENDLESS):
    running = asyncio.ensure_future(workspace.run(request))
    while "started" not in await workspace.list():
        await asyncio.sleep(0.01)
    return running


async def goes_on(workspace):
    async with asyncio.timeout(15):  # less than a keeper may be silent
        result = await workspace.run(ECHO)
    assert (result.exit_code, result.stdout, result.limit) == (0, b"on\n", None)


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_cancelled_twice_leaves_no_answer_behind(workspace, turns):
    running = await begun(workspace)
    running.cancel()
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await goes_on(workspace)
    await goes_on(workspace)


@pytest.mark.parametrize("turns", [1, 2, 4])
async def test_cancelled_while_it_is_sent(workspace, turns):
    large = ExecRequest(["sleep", "600"], 600.0, 100, stdin=b"x" * (40 << 20))
    running = asyncio.ensure_future(workspace.run(large))
    for _ in range(turns):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await goes_on(workspace)


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 5])
async def test_a_way_out_that_is_given_up_costs_no_workspace(workspace, turns):
    asking = asyncio.ensure_future(workspace.listen())
    for _ in range(turns):
        await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await asking).close()
    await goes_on(workspace)
    with await workspace.listen() as made:
        assert made.getsockname()[0] == "127.0.0.1"
    await goes_on(workspace)


async def test_one_that_waits_for_its_turn_is_given_up_at_once(workspace):
    running = await begun(workspace)
    waiting = asyncio.ensure_future(workspace.run(ECHO))
    for _ in range(5):
        await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not running.done()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await goes_on(workspace)


async def test_a_command_under_way_is_told_when_its_workspace_closes(workspace):
    running = await begun(workspace)
    await workspace.close()
    async with asyncio.timeout(60):
        with pytest.raises(InfrastructureError):
            await running
