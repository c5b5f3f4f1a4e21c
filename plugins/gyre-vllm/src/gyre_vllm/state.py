"""What an engine knows at any moment: its server, phase, version, running calls.

Invariant: `fault` is set once and is the one cause of every later error; the salt changes with every change of weights
and every flush, never back, and is no other engine's, of whatever a server has in its cache. Only `gyre_vllm.changes`
changes phase, version and salt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from enum import Enum

from gyre_core import InfrastructureError, WeightSource

from gyre_vllm.calls import RunningCall
from gyre_vllm.server import Server
from gyre_vllm.transfers import Transfers

_TRIES = 20


class Phase(Enum):
    """Of an engine's life."""

    NEW = "not started"
    READY = "ready"
    ASLEEP = "asleep"
    FAILED = "failed"
    CLOSED = "closed"


class EngineState:
    """Shared by the engine's calls and its changes; lives on one event loop."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(4)
        """Of this engine, unlike every other's."""
        self.phase = Phase.NEW
        self.server: Server | None = None
        self.version = -1
        self.vocab = 0
        self.source: WeightSource | None = None
        self.digest = ""
        """Of the weights' contents; empty when nobody knows it."""
        self.epoch = 0
        self.paused = False
        self.fault: InfrastructureError | None = None
        self.calls: set[RunningCall] = set()
        self.transfers = Transfers()
        self.open = asyncio.Event()
        """The server takes calls."""
        self.progress = time.monotonic()
        self.sampled = self.sampled_before = 0
        """Tokens sampled by this engine's servers, as last told; and what to add to the present server's own total."""

    @property
    def salt(self) -> str:
        """The prefix cache's name under the present weights."""
        return f"gyre-{self.name}-v{self.version}-{self.epoch}"

    def note_progress(self) -> None:
        """Something came from the server just now."""
        self.progress = time.monotonic()

    def ready(self, doing: str) -> Server:
        """The server; InfrastructureError when it is not there."""
        if self.fault is not None:
            raise InfrastructureError(doing, got=f"a server that failed before: {self.fault}") from self.fault
        if self.phase is not Phase.READY or self.server is None:
            raise InfrastructureError(
                doing, got=f"an engine that is {self.phase.value}", expected="a ready engine",
                fix="Call start or wake first.",
            )  # fmt: skip
        return self.server

    async def gate(self, call: RunningCall) -> None:
        """Return when the server takes calls or the call was ended meanwhile."""
        while not self.open.is_set() and not call.stirred.is_set() and self.phase is Phase.READY:
            waits = [asyncio.ensure_future(event.wait()) for event in (self.open, call.stirred)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waits:
                    task.cancel()

    def attribute(self, error: InfrastructureError, doing: str) -> InfrastructureError:
        """The error a call ends with: the server's fault when there is one."""
        if self.fault is not None:
            return InfrastructureError(doing, got=str(self.fault))
        if self.phase is not Phase.READY:
            return InfrastructureError(doing, got=f"an engine that is {self.phase.value}")
        if self.server is not None and not self.server.alive:
            return InfrastructureError(doing, got=f"a server that died: {self.server.story()}")
        return error

    async def end_segments(self, server: Server, calls: list[RunningCall]) -> None:
        """End what these calls (marked with a cut before) run on the server: by abort, which brings out what was
        sampled, and by closing the answer when that does not help in time."""
        for attempt in range(_TRIES):
            left = [call for call in calls if not call.at_rest.is_set()]
            if not left:
                return
            if attempt % 5 == 0:
                with contextlib.suppress(InfrastructureError):
                    await server.client.abort([call.server_id for call in left])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*(call.at_rest.wait() for call in left)), 0.1)
        for call in calls:
            call.drop()

    def fail(self, error: InfrastructureError) -> None:
        """Enter the cause and end everything that waits."""
        if self.fault is None and self.phase is not Phase.CLOSED:
            self.fault, self.phase = error, Phase.FAILED
        self.release()

    def release(self) -> None:
        """Let every call and transfer see that the engine is not ready any more."""
        self.transfers.cut()
        for call in list(self.calls):
            call.stirred.set()
            call.drop()
