"""Authenticated frames over TCP or Unix sockets, and the `Channel` protocol a caller may fulfil otherwise.

Handshake: both sides prove the shared key over fresh nonces (HMAC-SHA256, one and a half round trips); each frame
then carries a 16-byte tag over direction, counter and payload under a key derived from both nonces, so frames cannot
be forged, changed, replayed, dropped in the middle or sent back. Payloads are not encrypted. Lengths are bounded
before anything is allocated.

Addresses are text: `tcp://host:port` or `unix:///path`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from gyre_kvxfer.errors import AuthenticationError, ProtocolError, TransportError, explain

MAGIC = b"GYKV1"
CONTROL, DATA = b"c", b"d"
MAX_FRAME = 256 << 20
HELLO = len(MAGIC) + 1 + 16
TAG = 16


class Channel(Protocol):
    """Ordered, authenticated frames of bytes between two sides. Frames may be lost only by losing the channel."""

    async def send(self, frame: bytes) -> None:
        """Send one frame. Raises `TransportError` if the channel is gone."""
        ...

    async def recv(self) -> bytes:
        """The next frame. Raises `TransportError` if the channel is gone."""
        ...

    async def close(self) -> None:
        """End it; harmless when ended."""
        ...


@dataclass(slots=True)
class Seal:
    """Tags for one direction of a connection."""

    key: bytes
    count: int = 0

    def tag(self, payload: bytes | bytearray | memoryview) -> bytes:
        """The next frame's tag."""
        head = struct.pack("<QQ", self.count, len(payload))
        self.count += 1
        return hmac.digest(self.key, head + payload, "sha256")[:TAG]

    def check(self, payload: bytes | bytearray | memoryview, tag: bytes | bytearray | memoryview) -> None:
        """Raise `AuthenticationError` unless the tag fits the next frame."""
        if not hmac.compare_digest(self.tag(payload), bytes(tag)):
            raise AuthenticationError(
                explain("checking a frame", "a wrong tag", "the shared key's tag", "Drop the connection.")
            )


@dataclass(frozen=True, slots=True)
class Handshake:
    """The three messages of the handshake, computed without I/O."""

    key: bytes
    kind: bytes
    client: bytes
    server: bytes

    def proof(self, side: bytes) -> bytes:
        """What `side` (`b"server"` or `b"client"`) shows."""
        return hmac.digest(self.key, side + MAGIC + self.kind + self.client + self.server, "sha256")

    def seals(self, side: bytes) -> tuple[Seal, Seal]:
        """(outgoing, incoming) of `side`."""
        to_server = Seal(hmac.digest(self.key, b"c>s" + self.proof(b"session"), "sha256"))
        to_client = Seal(hmac.digest(self.key, b"s>c" + self.proof(b"session"), "sha256"))
        return (to_server, to_client) if side == b"client" else (to_client, to_server)

    def check(self, side: bytes, proof: bytes) -> None:
        """Raise `AuthenticationError` unless `proof` is what `side` shows."""
        if not hmac.compare_digest(self.proof(side), proof):
            raise AuthenticationError(
                explain(
                    f"authenticating the {side.decode()}",
                    "a wrong proof",
                    "the shared key's",
                    "Give both sides one key.",
                )
            )


def parse_hello(hello: bytes) -> tuple[bytes, bytes]:
    """(kind, client nonce) of a client's first bytes."""
    if hello[: len(MAGIC)] != MAGIC or hello[len(MAGIC) : len(MAGIC) + 1] not in (CONTROL, DATA):
        raise ProtocolError(explain("accepting a connection", hello[:6], MAGIC, "This port speaks gyre-kvxfer only."))
    return hello[len(MAGIC) : len(MAGIC) + 1], hello[len(MAGIC) + 1 :]


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Socket family and address of `tcp://host:port` or `unix:///path`."""
    if address.startswith("unix://"):
        return socket.AF_UNIX, address[len("unix://") :]
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not port.isdigit():
        raise TransportError(
            explain("reading an address", repr(address), "tcp://host:port or unix:///path", "Correct the address.")
        )
    host = host.strip("[]")
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), (host, int(port))


def tune(sock: socket.socket) -> None:
    """Small messages leave at once."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class SocketChannel:
    """A `Channel` over a connected, non-blocking, authenticated socket."""

    __slots__ = ("_in", "_max", "_out", "_sending", "sock")

    def __init__(self, sock: socket.socket, seals: tuple[Seal, Seal], max_frame: int = MAX_FRAME) -> None:
        self.sock = sock
        self._out, self._in = seals
        self._max = max_frame
        self._sending = asyncio.Lock()

    async def send(self, frame: bytes) -> None:
        """Send one frame."""
        if len(frame) > self._max:
            raise ProtocolError(explain("sending a frame", f"{len(frame)} bytes", f"at most {self._max}", "Split it."))
        async with self._sending:
            data = struct.pack("<I", len(frame)) + frame + self._out.tag(frame)
            try:
                await asyncio.get_running_loop().sock_sendall(self.sock, data)
            except OSError as err:
                raise TransportError(explain("sending a frame", err, "an open connection", "Connect again.")) from err

    async def recv(self) -> bytes:
        """The next frame."""
        (size,) = struct.unpack("<I", await recv_exactly(self.sock, 4))
        if size > self._max:
            raise ProtocolError(
                explain("receiving a frame", f"{size} bytes", f"at most {self._max}", "Drop the connection.")
            )
        body = memoryview(await recv_exactly(self.sock, size + TAG))
        self._in.check(body[:size], body[size:])
        return bytes(body[:size])

    def seals(self) -> tuple[Seal, Seal]:
        """(outgoing, incoming): whoever goes on with the socket itself takes the counters along."""
        return self._out, self._in

    def hang_up(self) -> None:
        """End the connection, so that whoever waits on the socket goes on and closes it."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close the socket."""
        self.sock.close()


async def recv_exactly(sock: socket.socket, size: int) -> bytearray:
    """`size` bytes from a non-blocking socket. Raises `TransportError` if it ends before."""
    out = bytearray(size)
    view, loop = memoryview(out), asyncio.get_running_loop()
    while view:
        try:
            n = await loop.sock_recv_into(sock, view)
        except OSError as err:
            raise TransportError(explain("receiving", err, "an open connection", "Connect again.")) from err
        if n == 0:
            raise TransportError(
                explain("receiving", "the end of the stream", f"{len(view)} bytes more", "Connect again.")
            )
        view = view[n:]
    return out


async def connect(address: str, key: bytes, kind: bytes = CONTROL, timeout_s: float = 5.0) -> SocketChannel:
    """Connect and authenticate. Raises `TransportError` or `AuthenticationError`."""
    family, where = parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, where)
            tune(sock)
            nonce = os.urandom(16)
            await loop.sock_sendall(sock, MAGIC + kind + nonce)
            answer = bytes(await recv_exactly(sock, 48))
            shake = Handshake(key, kind, nonce, answer[:16])
            shake.check(b"server", answer[16:])
            await loop.sock_sendall(sock, shake.proof(b"client"))
            return SocketChannel(sock, shake.seals(b"client"))
    except (OSError, TimeoutError) as err:
        sock.close()
        came = f"{type(err).__name__}: {err}"
        raise TransportError(explain(f"connecting to {address}", came, "a listening source", "Is it alive?")) from err
    except BaseException:
        sock.close()
        raise


async def accept(sock: socket.socket, key: bytes, timeout_s: float = 5.0) -> tuple[bytes, SocketChannel]:
    """Authenticate an accepted non-blocking socket: (kind, channel). Closes it on failure."""
    try:
        async with asyncio.timeout(timeout_s):
            tune(sock)
            kind, nonce = parse_hello(bytes(await recv_exactly(sock, HELLO)))
            shake = Handshake(key, kind, nonce, os.urandom(16))
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, shake.server + shake.proof(b"server"))
            shake.check(b"client", bytes(await recv_exactly(sock, 32)))
            return kind, SocketChannel(sock, shake.seals(b"server"))
    except BaseException:
        sock.close()
        raise


def listen(address: str) -> tuple[socket.socket, str]:
    """A listening non-blocking socket and its real address (port 0 is replaced by the one given)."""
    family, where = parse_address(address)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(128)
        sock.setblocking(False)
    except OSError as err:
        sock.close()
        raise TransportError(explain(f"listening on {address}", err, "a free address", "Choose another.")) from err
    if family == socket.AF_UNIX:
        return sock, address
    host, port = sock.getsockname()[:2]
    return sock, f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
