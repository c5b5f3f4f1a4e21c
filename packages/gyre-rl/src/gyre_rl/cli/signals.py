"""Ctrl-C: once stops a run in order, twice kills it. A deadline is a Ctrl-C that comes by itself.

Invariant: after the first signal the run's task is cancelled exactly once and may take its time to leave a resumable
run; the second one ends the process at once, and with it every process that it started.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):  # noqa: N818 - an outcome, not a fault
    """The run was stopped by a signal or its deadline and ended in order."""


async def until_stopped(
    work: Coroutine[Any, Any, T], on_first: Callable[[], None], deadline_s: float | None = None
) -> T:
    """Run `work`; `Stopped` when a signal or the deadline ended it. `on_first` is called when that begins."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    count = 0

    def stop() -> None:
        nonlocal count
        count += 1
        on_first()
        task.cancel()

    def received(number: signal.Signals) -> None:
        if count == 0:
            stop()
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    timer = None if deadline_s is None else loop.call_later(deadline_s, lambda: stop() if count == 0 else None)
    for number in SIGNALS:
        loop.add_signal_handler(number, received, number)
    try:
        return await task
    except asyncio.CancelledError:
        if count:
            raise Stopped from None
        raise
    finally:
        if timer is not None:
            timer.cancel()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
