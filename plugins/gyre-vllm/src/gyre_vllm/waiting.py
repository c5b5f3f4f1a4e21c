"""Work that goes to its end whoever gives up waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Its result, however often who waits is cancelled meanwhile; the cancellation comes after it."""
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
