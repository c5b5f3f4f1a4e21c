"""Work that goes to its end: cancellations wait, errors come through, and neither is lost."""

from __future__ import annotations

import asyncio

import pytest
from gyre_core.waiting import to_its_end


async def test_the_work_ends_first_however_often_its_caller_is_cancelled() -> None:
    go, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    waiting = asyncio.create_task(to_its_end(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done.is_set()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_error_comes_through_unless_nobody_waits_for_it(cancelled: bool) -> None:
    go = asyncio.Event()

    async def fails() -> None:
        await go.wait()
        raise ValueError("no")

    waiting = asyncio.create_task(to_its_end(fails()))
    await asyncio.sleep(0)
    if cancelled:
        waiting.cancel()
        await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError if cancelled else ValueError):
        await waiting


async def test_work_that_is_cancelled_itself_ends_the_wait() -> None:
    """As by an event loop that ends."""
    work = asyncio.create_task(asyncio.Event().wait())

    async def waits() -> None:
        await work

    waiting = asyncio.create_task(to_its_end(waits()))
    await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
