"""Addresses as buffers, and lists of runs as iovecs.

Invariant: nothing here checks that an address is valid; callers pass addresses an engine gave as its regions.
Everything that comes from another side is held against those regions first (`inside`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import TransportError, explain
from gyre_kvxfer.plan import Runs

IOVEC = np.dtype([("base", np.uint64), ("size", np.uint64)])
"""struct iovec on 64-bit Linux."""

IOV_MAX = 1024
"""Pieces one system call takes."""

Iovecs: TypeAlias = npt.NDArray[np.void]


@lru_cache(maxsize=1)
def libc() -> ctypes.CDLL:
    """The C library of this process, loaded once."""
    return ctypes.CDLL(None, use_errno=True)


def host_buffer(region: Region) -> npt.NDArray[np.uint8]:
    """uint8[nbytes] over host memory of this process. Whoever owns the memory must keep it."""
    if region.device != "cpu":
        raise TransportError(
            explain("mapping a region", region.device, "host memory", "Use the nixl transport for device memory.")
        )
    return np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.addr))


def inside(runs: Runs, sizes: npt.NDArray[np.int64]) -> None:
    """Raise `TransportError` unless every run lies inside its region. `sizes`: int64[regions]."""
    if not len(runs):
        return
    bad_region = (runs.region < 0) | (runs.region >= len(sizes))
    if not bad_region.any():
        end = sizes[runs.region] - runs.nbytes
        if not ((runs.offset < 0) | (runs.nbytes < 0) | (runs.offset > end)).any():
            return
    raise TransportError(
        explain("checking ranges", "a range outside the offered regions", f"{len(sizes)} regions", "Plan it again.")
    )


def iovecs(runs: Runs, regions: Sequence[Region]) -> Iovecs:
    """The runs as iovecs of absolute addresses, checked against the regions."""
    inside(runs, np.array([r.nbytes for r in regions], np.int64))
    out = np.empty(len(runs), IOVEC)
    base = np.array([r.addr for r in regions], np.uint64)
    out["base"] = base[runs.region] + runs.offset.astype(np.uint64)
    out["size"] = runs.nbytes
    return out


def flat(regions: Sequence[Region]) -> list[Region]:
    """The regions laid end to end from address 0: an address space both sides know without knowing addresses."""
    out, at = [], 0
    for r in regions:
        out.append(Region(at, r.nbytes, r.device, r.rank))
        at += r.nbytes
    return out


def from_flat(pieces: Iovecs, regions: Sequence[Region]) -> Iovecs:
    """Pieces of the flat space as pieces of real memory. Raises `TransportError` for any outside one region."""
    ends = np.cumsum(np.array([r.nbytes for r in regions], np.uint64))
    region = np.searchsorted(ends, pieces["base"], side="right")
    if len(pieces) and int(region.max()) < len(regions):
        room = ends[region] - pieces["base"]
        if (pieces["size"] <= room).all():
            out = pieces.copy()
            start = ends[region] - np.array([r.nbytes for r in regions], np.uint64)[region]
            out["base"] += np.array([r.addr for r in regions], np.uint64)[region] - start
            return out
    if not len(pieces):
        return pieces.copy()
    raise TransportError(
        explain("checking ranges", "a range outside the offered regions", f"{len(regions)} regions", "Plan it again.")
    )


def cut_streams(a: Iovecs, b: Iovecs, max_pieces: int, max_bytes: int) -> Iterator[tuple[Iovecs, Iovecs, int]]:
    """Cut two lists that cover one stream into parts of equal size: (part of a, part of b, bytes).

    A part has at most `max_pieces` pieces on either side and at most `max_bytes` bytes.
    """
    ends = [np.cumsum(x["size"].astype(np.int64)) for x in (a, b)]
    total = int(ends[0][-1]) if len(a) else 0
    if total != (int(ends[1][-1]) if len(b) else 0):
        raise TransportError(explain("cutting a stream", "two lengths", "one", "Both lists must come from one plan."))
    at = 0
    while at < total:
        stop = min(total, at + max_bytes)
        first = [int(np.searchsorted(e, at, side="right")) for e in ends]
        for e, i in zip(ends, first, strict=True):
            if i + max_pieces <= len(e):
                stop = min(stop, int(e[i + max_pieces - 1]))
        yield (*(_slice(x, e, i, at, stop) for x, e, i in zip((a, b), ends, first, strict=True)), stop - at)  # type: ignore[misc]
        at = stop


def _slice(x: Iovecs, ends: npt.NDArray[np.int64], first: int, start: int, stop: int) -> Iovecs:
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    part = x[first:last].copy()
    skipped = start - (int(ends[first]) - int(x["size"][first]))
    part["base"][0] += np.uint64(skipped)
    part["size"][0] -= np.uint64(skipped)
    part["size"][-1] -= np.uint64(int(ends[last - 1]) - stop)
    return part


def pair_up(a: Iovecs, b: Iovecs) -> tuple[Iovecs, Iovecs]:
    """Cut both lists at each other's borders, so that pieces with one index have one size."""
    ends = [np.cumsum(x["size"].astype(np.int64)) for x in (a, b)]
    cuts = np.union1d(*ends)
    start = np.concatenate([np.zeros(1, np.int64), cuts[:-1]]) if len(cuts) else cuts
    out = []
    for x, e in zip((a, b), ends, strict=True):
        which = np.searchsorted(e, start, side="right")
        part = np.empty(len(cuts), IOVEC)
        part["base"] = x["base"][which] + (start - (e - x["size"].astype(np.int64))[which]).astype(np.uint64)
        part["size"] = (cuts - start).astype(np.uint64)
        out.append(part)
    return out[0], out[1]
