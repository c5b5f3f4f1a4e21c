"""`tcp` and `shm`: the source serves reads over an authenticated data connection.

`tcp` sends the bytes on the connection itself (`writev` from the pool, `readv` into the pool: no staging on either
side). `shm` puts them into a file under /dev/shm that both sides have open, two slots in turn, and sends only word
that a slot is full.

Invariant: bytes are served only inside the offered regions and only while the move's pins stand (`valid`); the answer
that closes a read says whether they still stood at its end. The file is unlinked as soon as the reader has opened it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from gyre_kvxfer.channel import SocketChannel
from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import ProtocolError, TransportError, explain
from gyre_kvxfer.memory import IOVEC, Iovecs, cut_streams, flat, from_flat, iovecs
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports.base import boot_id, random_cookie
from gyre_kvxfer.transports.sockets import Pipe, limit_waits, pack_request, transfer, unpack_request

REQUEST_PIECES = 1 << 16
REQUEST_BYTES = 64 << 20
SLOT_BYTES = 4 << 20
SHM_DIR = Path("/dev/shm")


class BulkServer:
    """The source's end of both carriers."""

    def __init__(self, regions: Sequence[Region], valid: Callable[[str], bool], timeout_s: float = 30.0) -> None:
        self._regions = tuple(regions)
        self._valid = valid
        self._timeout_s = timeout_s

    def serve(self, channel: SocketChannel) -> None:
        """Answer reads until the connection ends. Blocks; give it a thread."""
        limit_waits(channel.sock, self._timeout_s)
        pipe = Pipe(channel.sock, channel.seals())
        slots: Slots | None = None
        try:
            while True:
                carrier, move, pieces = unpack_request(pipe.recv())
                if carrier == "open-shm":
                    slots = Slots.create()
                    pipe.send(json.dumps({"path": str(slots.path), "cookie": slots.cookie.hex()}).encode())
                    pipe.recv()
                    slots.path.unlink(missing_ok=True)
                    continue
                problem, mine = self._check(move, pieces)
                pipe.send(json.dumps({"error": problem}).encode())
                if problem:
                    continue
                if carrier == "shm" and slots is not None:
                    slots.put(pipe, mine)
                else:
                    transfer("writev", pipe.sock.fileno(), mine)
                pipe.send(json.dumps({"error": "" if self._valid(move) else "lease"}).encode())
        finally:
            channel.sock.close()
            if slots is not None:
                slots.close()

    def _check(self, move: str, pieces: Iovecs) -> tuple[str, Iovecs]:
        if not self._valid(move):
            return "lease", pieces
        try:
            return "", from_flat(pieces, self._regions)
        except TransportError as err:
            return str(err), pieces


class Slots:
    """Two slots of a file in shared memory."""

    def __init__(self, fd: int, path: Path, cookie: bytes) -> None:
        self.fd, self.path, self.cookie = fd, path, cookie

    @classmethod
    def create(cls) -> Slots:
        """A new file, readable by this user alone, its cookie behind the slots."""
        cookie = random_cookie()
        path = SHM_DIR / f"gyre-kv-{cookie.hex()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(fd, 2 * SLOT_BYTES + 16)
            os.pwrite(fd, cookie, 2 * SLOT_BYTES)
        except OSError as err:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise TransportError(explain("making shared memory", err, "room in /dev/shm", "Use tcp.")) from err
        return cls(fd, path, cookie)

    @classmethod
    def attach(cls, path: str, cookie: str) -> Slots:
        """The file another process made. Raises `TransportError` if it is not that file."""
        where = Path(path)
        if where.parent != SHM_DIR or not where.name.startswith("gyre-kv-"):
            raise ProtocolError(explain("opening shared memory", path, f"a file in {SHM_DIR}", "Use tcp."))
        try:
            fd = os.open(where, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as err:
            raise TransportError(explain("opening shared memory", err, path, "Use tcp.")) from err
        if os.pread(fd, 16, 2 * SLOT_BYTES).hex() != cookie:
            os.close(fd)
            raise TransportError(explain("opening shared memory", "another file", "the source's", "Use tcp."))
        return cls(fd, where, bytes.fromhex(cookie))

    def put(self, pipe: Pipe, pieces: Iovecs) -> None:
        """Source: fill slots in turn, a slot again only when the reader has emptied it."""
        for i, (part, nbytes) in enumerate(_slot_parts(pieces)):
            if i >= 2:
                pipe.recv()
            transfer("pwritev", self.fd, part, (i % 2) * SLOT_BYTES)
            pipe.send(nbytes.to_bytes(8, "little"))

    def take(self, pipe: Pipe, pieces: Iovecs) -> None:
        """Destination: empty them."""
        parts = list(_slot_parts(pieces))
        for i, (part, nbytes) in enumerate(parts):
            if int.from_bytes(pipe.recv(), "little") != nbytes:
                raise ProtocolError(explain("emptying a slot", "another size", nbytes, "Drop the connection."))
            transfer("preadv", self.fd, part, (i % 2) * SLOT_BYTES)
            if i + 2 < len(parts):
                pipe.send(b"")

    def close(self) -> None:
        """Close; unlink if still there."""
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


def _slot_parts(pieces: Iovecs) -> list[tuple[Iovecs, int]]:
    """Cut at slot size."""
    whole = np.array([(0, int(pieces["size"].sum()))], IOVEC)
    return [(part, nbytes) for part, _, nbytes in cut_streams(pieces, whole, len(pieces) + 1, SLOT_BYTES)]


class BulkReader:
    """The destination's end of both carriers."""

    def __init__(self, carrier: str, pipe: Pipe, regions: Sequence[Region], slots: Slots | None) -> None:
        self._carrier, self._pipe, self._regions, self._slots = carrier, pipe, tuple(regions), slots
        self._turn = asyncio.Lock()

    @property
    def name(self) -> str:
        """`tcp` or `shm`."""
        return self._carrier

    @classmethod
    def open(
        cls, carrier: str, address: str, key: bytes, regions: Sequence[Region], timeout_s: float = 30.0
    ) -> BulkReader:
        """Connect; for `shm` also open the shared file. Blocks. Raises `TransportError`."""
        pipe = Pipe.connect(address, key, timeout_s)
        if carrier == "tcp":
            return cls(carrier, pipe, regions, None)
        try:
            pipe.send(pack_request("open-shm", "0" * 32, np.zeros(0, IOVEC)))
            said = json.loads(pipe.recv())
            slots = Slots.attach(str(said["path"]), str(said["cookie"]))
            pipe.send(b"opened")
        except BaseException:
            pipe.sock.close()
            raise
        return cls(carrier, pipe, regions, slots)

    async def read(self, move: str, remote: Runs, local: Runs, into: Sequence[Region]) -> None:
        """Read in a thread, one read at a time."""
        theirs, ours = iovecs(remote, flat(self._regions)), iovecs(local, into)
        async with self._turn:
            await asyncio.to_thread(self._read, move, theirs, ours)

    def _read(self, move: str, theirs: Iovecs, ours: Iovecs) -> None:
        for r, w, _ in cut_streams(theirs, ours, REQUEST_PIECES, REQUEST_BYTES):
            self._pipe.send(pack_request(self._carrier, move, r))
            self._ok()
            if self._slots is not None:
                self._slots.take(self._pipe, w)
            else:
                transfer("readv", self._pipe.sock.fileno(), w)
            self._ok()

    def _ok(self) -> None:
        problem = str(json.loads(self._pipe.recv())["error"])
        if problem:
            raise TransportError(
                explain("reading from the source", problem, "a readable offer", "Move again, or prefill.")
            )

    def stop(self) -> None:
        """Cut the connection: a read that waits on it ends."""
        with contextlib.suppress(OSError):
            self._pipe.sock.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close the connection and the shared file."""
        self._pipe.sock.close()
        if self._slots is not None:
            self._slots.close()


def shm_meta() -> str:
    """What a reader checks before it tries shared memory."""
    return json.dumps({"boot": boot_id()})
