"""The way from this process to keepers: starts the spawner, asks it for keepers, talks to each over its own socket.

Invariant: one request is under way on a channel at a time, and one that its caller gave up, however often and at
whatever moment, is ended and its reply consumed before the channel is used again. Not here: folders and files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from gyre_core.errors import InfrastructureError

_SOURCES = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from gyre_harnesses.sandbox.keeper.spawn import main; main(int(sys.argv[2]))"
)
_GRACE_S = 20.0
"""How long after its limit a command's reply may take before we call the keeper lost."""


T = TypeVar("T")


class Channel:
    """Requests to one keeper."""

    def __init__(self, name: str, sock: socket.socket) -> None:
        self._name, self._sock = name, sock
        self._lock = asyncio.Lock()
        self._closed = False

    async def receive(self, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The next frame; InfrastructureError when the keeper is gone or silent."""
        try:
            async with asyncio.timeout(timeout_s):
                text_size, data_size = struct.unpack("!II", await self._exactly(8))
                text = await self._exactly(text_size)
                return json.loads(text), await self._exactly(data_size)
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            raise InfrastructureError(
                f"waiting for the keeper of workspace {self._name!r}",
                got=f"{type(error).__name__} {error}".rstrip(),
                expected="its answer",
                fix="Look at the kernel's log for an out-of-memory kill; the execution will be tried again.",
            ) from error

    async def _exactly(self, size: int) -> bytes:
        loop, parts = asyncio.get_running_loop(), bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._sock, min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError("the keeper closed its socket")
            parts += part
        return bytes(parts)

    async def _send(self, header: Mapping[str, Any], data: bytes) -> None:
        text = json.dumps(header).encode()
        frame = struct.pack("!II", len(text), len(data)) + text + data
        try:
            async with asyncio.timeout(_GRACE_S):
                await asyncio.get_running_loop().sock_sendall(self._sock, frame)
        except (OSError, TimeoutError) as error:
            raise InfrastructureError(
                f"asking the keeper of workspace {self._name!r}",
                got=f"{type(error).__name__} {error}".rstrip(),
                expected="that it reads",
            ) from error

    async def request(self, header: Mapping[str, Any], data: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for its reply. When cancelled, end the command first; cancelled again, it ends
        without this caller, before the next request's turn.
        """
        given_up = asyncio.Event()

        async def exchange() -> tuple[dict[str, Any], bytes]:
            await self._send(header, data)
            reply = asyncio.ensure_future(self.receive(timeout_s + _GRACE_S))
            cut = asyncio.ensure_future(given_up.wait())
            try:
                await asyncio.wait({reply, cut}, return_when=asyncio.FIRST_COMPLETED)
                if not reply.done():
                    await self._send({"op": "end"}, b"")
                return await reply
            finally:
                cut.cancel()
                reply.cancel()

        return await self._whole(exchange, given_up)

    async def _whole(self, exchange: Callable[[], Awaitable[T]], given_up: asyncio.Event) -> T:
        """An exchange that goes to its end whoever gives it up: what is left of a half one would be the next one's."""

        begun = False

        async def in_turn() -> T:
            nonlocal begun
            async with self._lock:
                begun = True
                try:
                    return await exchange()
                except BaseException:
                    self.close()
                    raise
                finally:
                    if self._closed:
                        self._sock.close()

        task = asyncio.ensure_future(in_turn())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            if not begun:
                task.cancel()
            await asyncio.wait({task})
            raise

    async def listener(self) -> socket.socket:
        """A socket that listens on the loopback that the workspace's commands see."""
        given_up = asyncio.Event()

        async def exchange() -> socket.socket:
            await self._send({"op": "listen"}, b"")
            loop, ready = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._sock.fileno(), ready.set)
            try:
                await asyncio.wait_for(ready.wait(), _GRACE_S)
                _, fds, _, _ = socket.recv_fds(self._sock, 1, 1)
            except (OSError, TimeoutError):
                fds = []
            finally:
                loop.remove_reader(self._sock.fileno())
            if not fds:
                raise InfrastructureError(
                    f"asking the keeper of workspace {self._name!r} for a socket", got="no answer"
                )
            made = socket.socket(fileno=fds[0])
            if given_up.is_set():
                made.close()
            return made

        return await self._whole(exchange, given_up)

    def close(self) -> None:
        """The keeper ends what it runs, and itself, when its socket closes. An exchange under way is told so."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._lock.locked():
            self._sock.close()


class Spawner:
    """Owns the spawner process; made on first use, ended by `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def _start(self) -> socket.socket:
        if self._control is None or self._process is None or self._process.poll() is not None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _START, _SOURCES, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={},
                    start_new_session=True,
                )
            self._control = ours
        return self._control

    async def keeper(self, name: str, setup: Mapping[str, Any]) -> tuple[Channel, dict[str, Any]]:
        """A channel to a new keeper and what it said of its confinement ("error" when it could not confine itself)."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._start(), [json.dumps(setup).encode()], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise InfrastructureError(f"making workspace {name!r}", got=f"no spawner: {error}") from error
        channel = Channel(name, ours)
        try:
            hello, _ = await channel.receive(_GRACE_S)
        except BaseException:
            channel.close()
            raise
        return channel, hello

    def close(self) -> None:
        """End the spawner; keepers live on until their channels close."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
