"""The life of a child process: serve, attach to the run, work, and end when the run is gone.

Invariant: a child never outlives its link to the run by more than a few seconds, whatever it was doing. What it hosts
is a `Hosted` made by the function that its spec names; this module knows no engine, trainer or agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec
from aiohttp import web
from gyre_core import CellId, GyreError

from gyre_rl.procs.address import in_url, own_address
from gyre_rl.procs.link import Link
from gyre_rl.procs.sockets import session
from gyre_rl.procs.wire import Fault, serve

log = logging.getLogger("gyre.child")
GRACE_S = 5.0
"""How long a child may take to close what it hosts once its run is gone."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """All a child knows at its start. `body` is the host's own configuration, plain JSON-able data."""

    host: str
    """"module:function" that makes the `Hosted`."""
    name: str
    incarnation: int
    control_url: str
    token: str
    run_dir: str
    body: dict[str, Any] = field(default_factory=dict)
    address: str = "127.0.0.1"
    """This machine's address on the way to the run, which the process finds itself; what it listens on."""
    port: int = 0

    @property
    def cell(self) -> CellId:
        """Name and incarnation."""
        return CellId(self.name, self.incarnation)


@dataclass(frozen=True, slots=True)
class Hello:
    """First words of a child: who it is and where it listens."""

    name: str
    incarnation: int
    pid: int
    port: int


class Hosted(Protocol):
    """What a child hosts."""

    @property
    def app(self) -> web.Application:
        """Its HTTP interface."""

    async def start(self, link: Link, http: aiohttp.ClientSession, base_url: str) -> Any:
        """Become ready (load models, open stores); the answer is sent to the run as "ready"."""

    async def answer(self, topic: str, body: bytes) -> Any:
        """A question or event of the run."""

    async def close(self) -> None:
        """Stop."""


HostFactory = Callable[[ChildSpec], Awaitable[Hosted]]


async def live(spec: ChildSpec) -> None:
    """Host until the link to the run ends or a signal asks to stop."""
    module, _, name = spec.host.partition(":")
    make: HostFactory = getattr(importlib.import_module(module), name)
    spec = replace(spec, address=own_address(spec.control_url))
    hosted = await make(spec)
    runner, port = await serve(hosted.app, spec.address, spec.port)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        async with session() as http:
            await _attached(spec, hosted, http, port, stopping)
    finally:
        _end_in(GRACE_S)
        await hosted.close()
        await runner.cleanup()


async def _attached(
    spec: ChildSpec, hosted: Hosted, http: aiohttp.ClientSession, port: int, stopping: asyncio.Event
) -> None:
    headers = {"authorization": f"Bearer {spec.token}"}
    hello = Hello(spec.name, spec.incarnation, os.getpid(), port)
    async with http.ws_connect(
        spec.control_url + "/attach",
        headers=headers,
        params={"hello": msgspec.json.encode(hello).decode()},
        max_msg_size=0,
        compress=0,
    ) as socket:
        link = Link(socket, hosted.answer, "the run")
        pump = asyncio.create_task(link.pump())
        stop = asyncio.create_task(stopping.wait())
        work = asyncio.create_task(_become_ready(link, hosted, http, f"http://{in_url(spec.address)}:{port}"))
        await asyncio.wait({pump, stop}, return_when=asyncio.FIRST_COMPLETED)
        for task in (pump, stop, work):
            task.cancel()
        await asyncio.gather(pump, stop, work, return_exceptions=True)


async def _become_ready(link: Link, hosted: Hosted, http: aiohttp.ClientSession, base_url: str) -> None:
    try:
        await link.send("ready", await hosted.start(link, http, base_url))
    except Exception as error:  # boundary: the run is told why a child cannot work
        log.exception("start failed")
        with contextlib.suppress(GyreError):
            await link.send("unusable", Fault.of(error))


def _end_in(seconds: float) -> None:
    """End this process after `seconds` even if something blocks; its log has the reason."""
    signal.signal(signal.SIGALRM, lambda *_: os._exit(70))
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main() -> None:
    """`python -m gyre_rl.procs.child SPEC.json`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=ChildSpec)
    asyncio.run(live(spec))


if __name__ == "__main__":
    main()
