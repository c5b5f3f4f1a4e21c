"""The processes that there is one of, the agents' and the proxy's: where each is now, through its deaths.

Invariant: `reach` gives a process that was ready, and waits while one is started again; at most one life of a helper
runs, since the next is started when the one before has ended for good. Not here: how often it may die.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gyre_core import CellId

from gyre_rl.procs.fleet import Child, Fleet
from gyre_rl.procs.wire import Peer

NOTICED_S = 30.0
"""How long after a call to it failed the end of a helper may take to be noticed; later it was the connection alone."""


class Helper:
    """One of them. `launch` starts its next life and waits until it is ready."""

    def __init__(self, name: str, launch: Callable[[], Awaitable[Child]]) -> None:
        self.name, self._launch = name, launch
        self._child: Child | None = None
        self._arrived = asyncio.Event()

    async def start(self, fleet: Fleet) -> Child:
        """Its first or next life; raises what `launch` raises. One that is `gone` already died between its "ready" and
        now: nobody could know it as this helper's, so whoever starts it treats it as a loss.
        """
        if self._child is not None:
            await fleet.stop(self._child, grace_s=0.0)
        self._arrived.clear()
        child = self._child = await self._launch()
        self._arrived.set()
        return child

    def lives_as(self, cell: CellId) -> bool:
        """Whether `cell` names its present life."""
        return self._child is not None and self._child.id == cell

    @property
    def here(self) -> Peer | None:
        """It, if it is there at this moment."""
        child = self._child
        return None if child is None or child.gone.is_set() or not self._arrived.is_set() else child.reach()

    async def reach(self) -> Peer:
        """It, as soon as it is there."""
        while True:
            await self._arrived.wait()
            if (peer := self.here) is not None:
                return peer
            self._arrived.clear()  # its end was noticed before its next life was begun

    async def ended(self, peer: Peer) -> bool:
        """Whether the life that `peer` reached is over, once that can be said."""
        child = self._child
        if child is None or child.peer is not peer:
            return True
        try:
            await asyncio.wait_for(child.gone.wait(), NOTICED_S)
        except TimeoutError:
            return False
        return True
