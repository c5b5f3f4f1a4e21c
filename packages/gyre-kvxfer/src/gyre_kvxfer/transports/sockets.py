"""Blocking authenticated connections for bulk data, and scatter-gather system calls on iovec arrays.

Python's own `sendmsg` wants one buffer object a piece; `writev`, `readv`, `pwritev` and `preadv` take the iovec array
as it is. Requests and answers are sealed frames as on control connections; the bulk bytes between them are not tagged
(digests are for that).
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

import numpy as np

from gyre_kvxfer.channel import DATA, MAGIC, TAG, Handshake, Seal, parse_address, tune
from gyre_kvxfer.errors import ProtocolError, TransportError, explain
from gyre_kvxfer.memory import IOV_MAX, IOVEC, Iovecs, libc

MAX_REQUEST = 64 << 20
REQUEST_HEAD = 44


def _call(name: str, fd: int, vecs: Iovecs, offset: int | None) -> int:
    call = libc()[name]
    call.restype = ctypes.c_ssize_t
    kinds: list[type[ctypes._SimpleCData]] = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]  # type: ignore[type-arg]
    args: list[int] = [fd, vecs.ctypes.data, min(len(vecs), IOV_MAX)]
    if offset is not None:
        kinds.append(ctypes.c_int64)
        args.append(offset)
    call.argtypes = kinds
    while True:
        n = int(call(*args))
        if n >= 0:
            return n
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise TransportError(
                explain(f"moving bulk bytes ({name})", os.strerror(code), "an open peer", "Try again.")
            )


def transfer(name: str, fd: int, vecs: Iovecs, offset: int | None = None) -> None:
    """`writev`, `readv`, `pwritev` or `preadv` until every piece is done. Raises `TransportError` at an early end."""
    left = vecs.copy()
    while len(left):
        n = _call(name, fd, left, offset)
        if n == 0:
            raise TransportError(
                explain(
                    f"moving bulk bytes ({name})",
                    "the end of the stream",
                    f"{int(left['size'].sum())} bytes more",
                    "The peer died.",
                )
            )
        offset = None if offset is None else offset + n
        ends = np.cumsum(left["size"][:IOV_MAX].astype(np.int64))
        done = int(np.searchsorted(ends, n, side="right"))
        rest = n - (int(ends[done - 1]) if done else 0)
        left = left[done:]
        if rest:
            left["base"][0] += np.uint64(rest)
            left["size"][0] -= np.uint64(rest)


class Pipe:
    """A blocking, authenticated data connection."""

    __slots__ = ("_in", "_out", "sock")

    def __init__(self, sock: socket.socket, seals: tuple[Seal, Seal]) -> None:
        self.sock = sock
        self._out, self._in = seals

    @classmethod
    def connect(cls, address: str, key: bytes, timeout_s: float, open_s: float = 3.0) -> Pipe:
        """Connect and authenticate as data connection within `open_s` a step; later waits end after `timeout_s`."""
        family, where = parse_address(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            limit_waits(sock, open_s)
            sock.connect(where)
            tune(sock)
            nonce = os.urandom(16)
            sock.sendall(MAGIC + DATA + nonce)
            answer = _exactly(sock, 48)
            shake = Handshake(key, DATA, nonce, answer[:16])
            shake.check(b"server", answer[16:])
            sock.sendall(shake.proof(b"client"))
            limit_waits(sock, timeout_s)
            return cls(sock, shake.seals(b"client"))
        except OSError as err:
            sock.close()
            raise TransportError(
                explain(f"connecting to {address}", err, "a listening source", "Is it alive?")
            ) from err
        except BaseException:
            sock.close()
            raise

    def send(self, frame: bytes) -> None:
        """One sealed frame."""
        try:
            self.sock.sendall(struct.pack("<I", len(frame)) + frame + self._out.tag(frame))
        except OSError as err:
            raise TransportError(explain("sending a request", err, "an open connection", "Try again.")) from err

    def recv(self) -> bytes:
        """One sealed frame."""
        (size,) = struct.unpack("<I", _exactly(self.sock, 4))
        if size > MAX_REQUEST:
            raise ProtocolError(explain("receiving a request", f"{size} bytes", f"at most {MAX_REQUEST}", "Drop it."))
        body = _exactly(self.sock, size + TAG)
        self._in.check(body[:size], body[size:])
        return body[:size]


def limit_waits(sock: socket.socket, timeout_s: float) -> None:
    """Let the kernel end waits after `timeout_s`, also those of raw readv and writev (the socket stays blocking)."""
    sock.setblocking(True)
    pair = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, pair)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pair)


def _exactly(sock: socket.socket, size: int) -> bytes:
    out = bytearray(size)
    view = memoryview(out)
    while view:
        try:
            n = sock.recv_into(view)
        except OSError as err:
            raise TransportError(explain("receiving", err, "an open connection", "Try again.")) from err
        if n == 0:
            raise TransportError(explain("receiving", "the end of the stream", f"{len(view)} bytes", "The peer ended."))
        view = view[n:]
    return bytes(out)


def pack_request(carrier: str, move: str, pieces: Iovecs) -> bytes:
    """A read request: carrier name, move, pieces in the pool's flat address space (`memory.flat`)."""
    return struct.pack("<8s32sI", carrier.encode(), move.encode(), len(pieces)) + pieces.tobytes()


def unpack_request(frame: bytes) -> tuple[str, str, Iovecs]:
    """(carrier, move, pieces) of a request. Raises `ProtocolError`."""
    try:
        carrier, move, n = struct.unpack_from("<8s32sI", frame)
        if len(frame) != REQUEST_HEAD + IOVEC.itemsize * n:
            raise ValueError(f"{len(frame)} bytes for {n} pieces")
        pieces = np.frombuffer(frame, IOVEC, n, REQUEST_HEAD)
        return carrier.rstrip(b"\0").decode(), move.decode(), pieces
    except (struct.error, ValueError, UnicodeDecodeError) as err:
        raise ProtocolError(explain("reading a request", err, "one read request", "Drop the connection.")) from err
