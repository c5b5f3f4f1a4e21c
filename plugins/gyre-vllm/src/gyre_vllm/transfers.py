"""The requests that bring KV from one server to another, as far as a change of weights must know of them.

With a KV connector the server is not paused while its weights change (`gyre_vllm.changes`), so a request that waits
there could compute its last tokens under the next weights and be told for the present ones. Invariant: inside `none`
no such request is out: those that are, are given up at once, and new ones refused. Nobody waits for the other: a change
never waits for a transfer, and a transfer that was given up is a prefill. What the server still does with it then is in
the prefix cache of a salt that nobody asks for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

FETCH_S = 30.0
"""How long a fetch may take until its first token, the wait for the destination's scheduler included. A source whose
machine has fallen silent lets vLLM wait until the kernel gives up the connection, for a quarter of an hour."""


class Transfers:
    """Those of one engine; lives on its event loop."""

    def __init__(self) -> None:
        self._out: set[asyncio.Timeout] = set()
        self._barred = 0

    @property
    def barred(self) -> bool:
        """Whether a change is under way."""
        return self._barred > 0

    @asynccontextmanager
    async def one(self, limit_s: float | None = None) -> AsyncIterator[None]:
        """For one request. TimeoutError when it took longer than this, or when a change began before it was over."""
        if self._barred:
            raise TimeoutError("the engine is changing")
        async with asyncio.timeout(limit_s) as scope:
            self._out.add(scope)
            try:
                yield
            finally:
                self._out.discard(scope)

    @contextmanager
    def none(self) -> Iterator[None]:
        """For a change of what the server computes with."""
        self._barred += 1
        self.cut()
        try:
            yield
        finally:
            self._barred -= 1

    def cut(self) -> None:
        """Give up those that are out."""
        for scope in self._out:
            if not scope.expired():
                scope.reschedule(0.0)
        self._out.clear()
