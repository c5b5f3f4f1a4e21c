"""Work that goes to its end whoever gives up waiting for it. Invariant: the cancellation of who waits is not lost.

Not here: a limit of time, which the work itself has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Wait for `work`, however often who waits is cancelled meanwhile; the cancellation comes after it, in place of an
    error of the work."""
    task, cancelled = asyncio.ensure_future(work), False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # who gave up is not told
        raise asyncio.CancelledError
    task.result()
