"""`process_vm`: read the source's memory directly, by one system call for many pieces (process_vm_readv, Linux).

One copy, no work at the source. Needs one kernel, one process namespace and the right to trace the source (same user,
and no ptrace restriction in force). Whether it works is found by reading a 16-byte cookie the source holds, never
assumed.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
from collections.abc import Awaitable, Iterable, Sequence

import numpy as np

from gyre_kvxfer import native
from gyre_kvxfer.digest import U64
from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import TransportError, explain
from gyre_kvxfer.memory import IOV_MAX, IOVEC, Iovecs, cut_streams, iovecs, libc
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports.base import boot_id, random_cookie, stopped

CALL_BYTES = 16 << 20
"""At most so many bytes a call: a cancelled move ends soon."""

THREADS = 2
"""Reads from `SHARED_BYTES` on are shared by so many threads: for scattered pieces the kernel's walk over pages, not
the memory's speed, is the bound, and the call releases Python's lock."""

SHARED_BYTES = 8 << 20

INLINE_BYTES = 1 << 20
"""Up to here a read is done on the event loop's thread: a switch of threads would take longer."""


class ProcessVmExporter:
    """Offers this process's memory."""

    name = "process_vm"

    def __init__(self) -> None:
        self._cookie = np.frombuffer(random_cookie(), np.uint8).copy()

    def meta(self) -> str:
        """Process id and where the cookie lies."""
        cookie = {"addr": self._cookie.ctypes.data, "cookie": self._cookie.tobytes().hex()}
        return json.dumps({"pid": os.getpid(), "boot": boot_id(), **cookie})

    def close(self) -> None:
        """Nothing is held."""


def readv(pid: int, local: Iovecs, remote: Iovecs) -> int:
    """One process_vm_readv; the bytes read. Raises `TransportError` with the system's reason."""
    call = libc()["process_vm_readv"]
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    n = call(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if n < 0:
        code = ctypes.get_errno()
        name = errno.errorcode.get(code, str(code))
        raise TransportError(
            explain(f"reading memory of process {pid}", name, "permitted, mapped memory", "Use another transport.")
        )
    return int(n)


async def _together(works: Iterable[Awaitable[None]]) -> None:
    """Wait for all, whatever fails: none may write on after this returns. Then raise the first failure."""
    ended = await asyncio.gather(*works, return_exceptions=True)
    for error in filter(None, ended):
        raise error


class ProcessVmReader:
    """Reads another process's regions."""

    name = "process_vm"

    def __init__(self, pid: int, addr: int, cookie: bytes, regions: Sequence[Region]) -> None:
        self._pid, self._addr, self._cookie = pid, addr, cookie
        self._regions = tuple(regions)
        self._stopped = False

    @classmethod
    def probe(cls, meta: str, regions: Sequence[Region]) -> ProcessVmReader:
        """A reader, if the cookie can be read. Raises `TransportError` saying why not."""
        data = json.loads(meta)
        if data["boot"] != boot_id():
            raise TransportError(explain("probing process_vm", "another machine", "this one", "Use another transport."))
        reader = cls(int(data["pid"]), int(data["addr"]), bytes.fromhex(data["cookie"]), regions)
        reader._check()
        return reader

    def _check(self) -> None:
        """The process under this number is still the source: its cookie is there. (Numbers are reused.)"""
        got = np.zeros(16, np.uint8)
        readv(self._pid, np.array([(got.ctypes.data, 16)], IOVEC), np.array([(self._addr, 16)], IOVEC))
        if got.tobytes() != self._cookie:
            came = f"process {self._pid} without the cookie"
            raise TransportError(explain("reading by process_vm", came, "the source itself", "Use another transport."))

    async def read(self, move: str, remote: Runs, local: Runs, into: Sequence[Region]) -> None:
        """Read; large reads run in a thread."""
        theirs, ours = iovecs(remote, self._regions), iovecs(local, into)
        if remote.total <= INLINE_BYTES:
            self._read(cut_streams(theirs, ours, IOV_MAX, CALL_BYTES))
        else:
            threads = THREADS if remote.total >= SHARED_BYTES else 1
            each = min(CALL_BYTES, -(-remote.total // threads))
            parts = list(cut_streams(theirs, ours, IOV_MAX, each))
            reads = (asyncio.to_thread(self._read, parts[n::threads]) for n in range(threads))
            await _together(reads)
        self._check()

    @property
    def can_sum(self) -> bool:
        """Where there is a C compiler."""
        return native.load() is not None

    async def read_summed(self, move: str, remote: Runs, local: Runs, into: Sequence[Region], blocks: int) -> U64:
        """Read and digest in the reading threads."""
        theirs, ours = iovecs(remote, self._regions), iovecs(local, into)
        parts = np.empty(len(ours), np.uint64)
        threads = THREADS if local.total >= SHARED_BYTES else 1
        step = max(1, min(CALL_BYTES // int(local.nbytes[0]), -(-len(ours) // threads)))
        firsts = range(0, len(ours), step)

        def work(n: int) -> None:
            for at in firsts[n::threads]:
                stopped(self._stopped)
                end = min(at + step, len(ours))
                self._read_parts(ours[at:end], theirs[at:end], at, blocks, parts[at:end])

        await _together(asyncio.to_thread(work, n) for n in range(threads))
        self._check()
        return parts

    def _read_parts(self, ours: Iovecs, theirs: Iovecs, first: int, blocks: int, parts: U64) -> None:
        got = native.read_parts(self._pid, ours, theirs, first, blocks, parts)
        if got != len(ours):
            name = errno.errorcode.get(ctypes.get_errno(), "less than was offered")
            came, want = f"{name} after {got} pieces", f"{len(ours)} pieces"
            raise TransportError(
                explain("reading the source's memory", came, want, "The source has ended or unmapped its pool.")
            )

    def _read(self, parts: Iterable[tuple[Iovecs, Iovecs, int]]) -> None:
        for r, w, nbytes in parts:
            stopped(self._stopped)
            got = readv(self._pid, w, r)
            if got != nbytes:
                raise TransportError(
                    explain("reading the source's memory", f"{got} bytes", f"{nbytes}", "The source unmapped its pool.")
                )

    def stop(self) -> None:
        """End after the call that is running."""
        self._stopped = True

    async def close(self) -> None:
        """Nothing is held."""
