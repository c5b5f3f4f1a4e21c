"""The control channel of a handover: short JSON messages over a socket that never blocks for good.

Invariants: every wait ends by the channel's deadline or its idle time-out, as a PeerError; nobody is listened to who
cannot prove that he knows the token (HMAC-SHA-256 over a fresh nonce). Payload on the same socket is not encrypted: a
private network is assumed, as for collectives.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gyre_weights.arrays import Bytes
from gyre_weights.digest import CHUNK, Digest
from gyre_weights.errors import PeerError, RefusedError, UnreachableError

SLOWEST = 50e6
"""Bytes a second below which a peer that works in silence (writing to memory, digesting) counts as hanging."""
_LIMIT = 64 << 20
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one process listens. `host` is a name or an IPv4 or IPv6 address. `local` is an abstract Unix socket, which
    is tried first: it is there for who shares the process's network namespace, and file descriptors travel on it, so
    that nobody needs to share a memory file system as well."""

    host: str
    port: int
    local: str
    token: str

    def save(self, path: Path) -> None:
        """Put it where satellites look, atomically, readable by this user only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        draft.replace(path)

    @staticmethod
    def load(path: Path) -> Endpoint:
        """What `save` wrote. UnreachableError when there is none."""
        try:
            return Endpoint(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UnreachableError(
                "looking for an endpoint", got=f"{type(error).__name__}: {error}", expected=f"{path}",
                fix="Who listens writes it when it starts; it may be restarting.",
            ) from error  # fmt: skip


class Channel:
    """One connection. `idle_s` bounds each wait, `total_s` the whole conversation."""

    def __init__(self, sock: socket.socket, doing: str, *, idle_s: float, total_s: float) -> None:
        self.sock, self.doing = sock, doing
        self._idle, self._end = idle_s, time.monotonic() + total_s
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_local(self) -> bool:
        """Whether file descriptors can travel on it."""
        return self.sock.family == socket.AF_UNIX

    def remaining(self, more_s: float = 0.0) -> float:
        """Seconds the next wait may take, `more_s` beyond the idle time-out; PeerError when the conversation's time is
        over."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise PeerError(self.doing, got="no end within the time allowed", expected="a faster peer or link")
        return min(left, self._idle + more_s)

    def _wait(self, more_s: float = 0.0) -> socket.socket:
        self.sock.settimeout(self.remaining(more_s))
        return self.sock

    def send(self, message: dict[str, Any]) -> None:
        """One message."""
        data = json.dumps(message, separators=(",", ":")).encode()
        self.send_bytes(np.frombuffer(len(data).to_bytes(4, "big") + data, np.uint8))

    def receive(self, more_s: float = 0.0) -> dict[str, Any]:
        """The next message, with `more_s` of patience beyond the idle time-out; PeerError when the peer is gone,
        silent, or has refused."""
        head = np.empty(4, np.uint8)
        self.receive_into(head, more_s=more_s)
        length = int.from_bytes(head.tobytes(), "big")
        if length > _LIMIT:
            raise PeerError(self.doing, got=f"a message of {length} bytes", expected=f"at most {_LIMIT}")
        body = np.empty(length, np.uint8)
        self.receive_into(body)
        try:
            message = json.loads(body.tobytes())
        except ValueError as error:
            raise PeerError(self.doing, got=f"no JSON ({error})", expected="a message") from error
        if not isinstance(message, dict):
            raise PeerError(self.doing, got=f"a {type(message).__name__}", expected="a message")
        if "refused" in message:
            raise RefusedError(
                self.doing, got=f"a refusal: {message['refused']}", expected=str(message.get("expected", ""))
            )
        return message

    def send_bytes(self, data: Bytes) -> None:
        """Raw bytes."""
        view = data.data
        try:
            while view:
                view = view[self._wait().send(view[:_PIECE]) :]
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error

    def send_file(self, handle: int) -> None:
        """All bytes of an open file, by the kernel."""
        at, size = 0, os.fstat(handle).st_size
        ready = select.poll()
        ready.register(self.sock, select.POLLOUT)
        try:
            while at < size:
                if not ready.poll(1000 * self.remaining()):
                    raise TimeoutError
                with suppress(BlockingIOError):
                    sent = os.sendfile(self._wait().fileno(), handle, at, min(size - at, _PIECE))
                    if not sent:
                        raise PeerError(self.doing, got=f"the end of a file at byte {at}", expected=f"{size} bytes")
                    at += sent
        except OSError as error:
            raise self._lost(error) from error

    def receive_into(self, data: Bytes, digest: Digest | None = None, more_s: float = 0.0) -> None:
        """Fill `data`; with `digest`, digest it while it is in the cache (then `data` must be a whole tensor's)."""
        view, at, digested = data.data, 0, 0
        try:
            while at < len(view):
                count = self._wait(more_s).recv_into(view[at : at + _PIECE])
                if not count:
                    raise PeerError(self.doing, got="the end of the connection", expected="more; the peer is gone")
                at += count
                while digest is not None and (at - digested >= CHUNK or (at == len(view) and digested < at)):
                    step = min(CHUNK, at - digested)
                    digest.add(data[digested : digested + step])
                    digested += step
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error

    def send_fd(self, handle: int, message: dict[str, Any]) -> None:
        """A message, then a file descriptor. Local channels only."""
        self.send(message)
        try:
            socket.send_fds(self._wait(), [b"f"], [handle])
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error

    def receive_fd(self) -> int:
        """The descriptor after a message."""
        try:
            data, handles, _, _ = socket.recv_fds(self._wait(), 1, 1)
        except (OSError, TimeoutError) as error:
            raise self._lost(error) from error
        if data != b"f" or len(handles) != 1:
            raise PeerError(self.doing, got="no file descriptor", expected="one; the peer is gone")
        return handles[0]

    def _lost(self, error: Exception) -> PeerError:
        if isinstance(error, TimeoutError):
            return PeerError(self.doing, got=f"silence for {self._idle:g} s", expected="an answer; the peer hangs")
        return PeerError(self.doing, got=f"a broken connection ({type(error).__name__}: {error})", expected="a peer")

    def close(self) -> None:
        """End it."""
        self.sock.close()


def challenge(channel: Channel, token: str) -> dict[str, Any]:
    """Server's side of the hello: the client's first message, once he has proved that he knows the token."""
    nonce = secrets.token_hex(16)
    channel.send({"nonce": nonce})
    first = channel.receive()
    if not hmac.compare_digest(str(first.get("proof", "")), _proof(token, nonce)):
        channel.send({"refused": "a wrong token", "expected": "the token of the endpoint"})
        raise PeerError(channel.doing, got="a wrong token", expected="the run's")
    return first


def connect(endpoint: Endpoint, first: dict[str, Any], doing: str, *, idle_s: float, total_s: float) -> Channel:
    """Client's side: connect, locally if that works, prove, and say `first`."""
    channel = Channel(_reach(endpoint, doing, idle_s), doing, idle_s=idle_s, total_s=total_s)
    try:
        nonce = channel.receive()["nonce"]
        channel.send(first | {"proof": _proof(endpoint.token, str(nonce))})
    except BaseException:
        channel.close()
        raise
    return channel


def _reach(endpoint: Endpoint, doing: str, wait_s: float) -> socket.socket:
    here = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    here.settimeout(wait_s)
    try:
        here.connect("\0" + endpoint.local)
        return here
    except OSError as error:
        here.close()
        reason = str(error)
    try:
        return socket.create_connection((endpoint.host, endpoint.port), timeout=wait_s)
    except OSError as error:
        raise UnreachableError(
            doing, got=f"nobody at {endpoint.host}:{endpoint.port} ({reason}; {error})", expected="who listens there",
            fix="It may be restarting; try again with the endpoint that it writes then.",
        ) from error  # fmt: skip


def _proof(token: str, nonce: str) -> str:
    return hmac.new(token.encode(), nonce.encode(), hashlib.sha256).hexdigest()
