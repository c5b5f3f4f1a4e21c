"""The run's side of its processes: the control port, the children attached to it, and their deaths.

Invariant: a child is in `children` exactly while its link is open; whoever waits for it is told when it goes. A child
that comes back does so under the next incarnation; a hello of an older one is refused.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from gyre_core import CellId, GyreError, InfrastructureError, Launcher, ProcessHandle, ProcessSpec

from gyre_rl.procs.address import in_url
from gyre_rl.procs.child import ChildSpec, Hello
from gyre_rl.procs.link import Link
from gyre_rl.procs.sockets import session
from gyre_rl.procs.wire import Fault, Peer, authorised, serve, unpack

T = TypeVar("T")
START_TIMEOUT_S = 180.0
"""Longest time from the start of a process to its "ready" (imports and weights on a loaded machine)."""
CLOSING_S = 10.0
"""A connection that stands so long after its process ended (another one may have inherited it) is closed from here."""


@dataclass(slots=True)
class Child:
    """A process of the run."""

    id: CellId
    process: ProcessHandle
    link: Link | None = None
    peer: Peer | None = None
    ready: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Its link is over, and what it told is handled."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def reach(self) -> Peer:
        """Its HTTP interface; raises CellLostError-like InfrastructureError before it attached."""
        if self.peer is None:
            raise InfrastructureError(f"talking to {self.id}", got="a process that has not attached yet")
        return self.peer


MessageHandler = Callable[[CellId, str, bytes], Awaitable[Any]]
LossHandler = Callable[[CellId, str], None]


class Fleet:
    """Starts children through a launcher and keeps their links."""

    def __init__(self, launcher: Launcher, run_dir: Path, *, on_message: MessageHandler, on_loss: LossHandler) -> None:
        self._launcher, self._run_dir = launcher, run_dir
        self._on_message, self._on_loss = on_message, on_loss
        self.token = secrets.token_urlsafe(24)
        self.children: dict[CellId, Child] = {}
        self._lives: dict[str, int] = {}
        self._closing = False

    async def open(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Open the control port. `host` is this machine's address for every process of the run."""
        app = web.Application()
        app.router.add_get("/attach", self._attach)
        self._runner, self._port = await serve(app, host, port)
        self.control_url = f"http://{in_url(host)}:{self._port}"
        self.http = session()

    async def start(
        self,
        name: str,
        host: str,
        body: dict[str, Any],
        *,
        env: dict[str, str] | None = None,
        port: int = 0,
        accelerators: int = 0,
        cell: int | None = None,
    ) -> Child:
        """Start a process under its next incarnation; it may be waited for with `ready`. `cell`: see `ProcessSpec`."""
        life = self._lives[name] = self._lives.get(name, 0) + 1
        spec = ChildSpec(host, name, life, self.control_url, self.token, str(self._run_dir), body, port=port)
        path = self._run_dir / "procs" / f"{name}.{life}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # it holds the run's token
        path.write_bytes(msgspec.json.encode(spec))
        log = self._run_dir / "logs" / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = await self._launcher.start(
            ProcessSpec(
                name, [sys.executable, "-m", "gyre_rl.procs.child", str(path)], env or {}, str(log), accelerators, cell
            )
        )
        child = Child(spec.cell, process)
        self.children[child.id] = child
        self._watch = asyncio.create_task(self._watch_start(child, log))
        return child

    async def _watch_start(self, child: Child, log: Path) -> None:
        """Turn an end before "ready" into a failure of `ready` that shows the log's last lines."""
        status = await child.process.wait()
        if not child.ready.done():
            tail = log.read_text(errors="replace").splitlines()[-12:] if log.exists() else []
            child.ready.set_exception(
                InfrastructureError(
                    f"starting {child.id}",
                    got=f"its end with status {status}; the last lines of {log}:\n" + "\n".join(tail),
                    expected="it to become ready",
                )
            )
            child.ready.exception()  # somebody may have given up waiting
        if child.link is not None:  # what it told before it died comes before its death
            try:
                await asyncio.wait_for(child.heard.wait(), CLOSING_S)
            except TimeoutError:
                await child.link.close()
                await child.heard.wait()
        self._lose(child, f"its process ended with status {status}")

    async def ready(self, child: Child, as_type: type[T], timeout_s: float = START_TIMEOUT_S) -> T:
        """Wait until it said it is ready; returns what it said."""
        try:
            body = await asyncio.wait_for(asyncio.shield(child.ready), timeout_s)
        except TimeoutError as error:
            raise InfrastructureError(
                f"starting {child.id}", got=f"no sign of readiness in {timeout_s:.0f} s"
            ) from error
        return unpack(body, as_type)

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        authorised(request, self.token)
        hello = unpack_hello(request.query.get("hello", ""))
        child = self.children.get(CellId(hello.name, hello.incarnation))
        if child is None or child.link is not None:
            raise web.HTTPConflict(text=f"{hello.name}#{hello.incarnation} is not awaited by this run")
        socket = web.WebSocketResponse(max_msg_size=0, compress=False, autoping=True)
        await socket.prepare(request)
        child.link = Link(socket, lambda topic, body: self._message(child, topic, body), str(child.id))
        host = request.remote or "127.0.0.1"
        child.peer = Peer(self.http, f"http://{in_url(host)}:{hello.port}", self.token, str(child.id))
        try:
            await child.link.pump()
        finally:
            child.heard.set()
            if child.ready.done():  # else its process ends now, and its log says more than a closed connection does
                self._lose(child, "its connection ended")
        return socket

    async def _message(self, child: Child, topic: str, body: bytes) -> Any:
        if topic == "ready":
            if not child.ready.done():
                child.ready.set_result(body)
            return None
        if topic == "unusable":
            if not child.ready.done():
                child.ready.set_exception(unpack(body, Fault).error())
                child.ready.exception()
            return None
        return await self._on_message(child.id, topic, body)

    def _lose(self, child: Child, reason: str) -> None:
        if self.children.pop(child.id, None) is None:
            return
        child.gone.set()
        if not child.ready.done():
            child.ready.set_exception(InfrastructureError(f"starting {child.id}", got=reason))
            child.ready.exception()
        if not self._closing:
            self._on_loss(child.id, reason)

    def get(self, cell: CellId) -> Child:
        """The living child; raises InfrastructureError for one that is gone."""
        child = self.children.get(cell)
        if child is None:
            raise InfrastructureError(f"talking to {cell}", got="a process that is gone")
        return child

    async def stop(self, child: Child, grace_s: float = 5.0) -> None:
        """End one child without calling it a loss."""
        self.children.pop(child.id, None)
        child.gone.set()
        await child.process.terminate(grace_s)

    async def close(self) -> None:
        """End all children and the control port."""
        self._closing = True
        for child in list(self.children.values()):
            if child.link is not None:
                try:
                    await child.link.close()
                except (GyreError, ConnectionError, RuntimeError):
                    continue
        await self._launcher.close()
        await self.http.close()
        await self._runner.cleanup()


def unpack_hello(text: str) -> Hello:
    """Read a hello; a malformed one is an HTTP 400."""
    try:
        return msgspec.json.decode(text.encode(), type=Hello)
    except msgspec.DecodeError as error:
        raise web.HTTPBadRequest(text=f"a hello that cannot be read: {error}") from error


def pid_alive(pid: int) -> bool:
    """Whether a process of this host lives."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
