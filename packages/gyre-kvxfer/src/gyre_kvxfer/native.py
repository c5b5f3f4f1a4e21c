"""`fast` digests in C where this machine has a C compiler: numpy must copy scattered blocks together before it can
add them, and cannot look at bytes while a read goes on.

Invariant: the same numbers as `digest.fast_part`, so either side of a move may have it or not. The library is built
once a kind of processor, in a tenth of a second, into the user's cache folder, which machines may share; where that
fails, numpy does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.digest import LANES, U64, Bytes
from gyre_kvxfer.memory import Iovecs
from gyre_kvxfer.settings import cache_folder

SOURCE = Path(__file__).parent / "kernels" / "lanes.c"
BATCH_BYTES = 256 << 10
"""Bytes that are read before they are summed: they and the source's own fit into a core's cache."""

_COMPILERS = ("cc", "gcc", "clang")


def processor(info: Path = Path("/proc/cpuinfo")) -> str:
    """Names what this machine's processor can do: code built for it (`-march=native`) runs where this is equal."""
    kinds = ("flags", "Features", "isa", "vendor_id", "cpu family", "model", "CPU part")
    try:
        first = info.read_text(errors="replace").split("\n\n")[0]
        told = [line for line in first.splitlines() if line.partition(":")[0].strip() in kinds]
    except OSError:
        told = [platform.processor()]
    words = [platform.system(), platform.machine(), *told]
    return f"{platform.machine()}-{hashlib.sha256(chr(10).join(words).encode()).hexdigest()[:12]}"


def build(folder: Path) -> Path | None:
    """The library in `folder`, built if it is not there; None without a compiler or when it fails."""
    text = SOURCE.read_bytes()
    library = folder / f"kv-lanes-{hashlib.sha256(text).hexdigest()[:16]}-{processor()}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    part = library.with_name(f"{library.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", str(SOURCE), "-o", str(part)]
        if subprocess.run(command, capture_output=True, timeout=60, check=False).returncode:
            return None
        part.rename(library)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return library


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL | None:
    """The library, or None where there is none."""
    library = build(cache_folder())
    try:
        found = ctypes.CDLL(str(library), use_errno=True) if library else None
    except OSError:
        return None
    if found is not None:
        number, pointer = ctypes.c_int64, ctypes.c_void_p
        found.block_parts.restype = None
        found.block_parts.argtypes = [pointer, number, pointer, number, number, number, pointer]
        found.read_parts.restype = number
        found.read_parts.argtypes = [number, pointer, pointer, *[number] * 4, pointer]
    return found


def whole(nbytes: int) -> bool:
    """Whether a piece of so many bytes is a whole number of lane rows, which is all that the library sums."""
    return nbytes > 0 and nbytes % (8 * LANES) == 0


def block_parts(tables: Sequence[Bytes], ids: npt.NDArray[np.int64], out: U64) -> bool:
    """Write the digests of blocks `ids` to `out` (uint64[n]); `tables`: every piece of all blocks, uint8[blocks,
    bytes], as `blocks.rows` has them. False when it cannot: no library, or pieces not whole, dense and aligned."""
    blocks, nbytes = tables[0].shape
    pitch = tables[0].strides[0]
    aligned = all(t.strides == (pitch, 1) and t.shape == (blocks, nbytes) and t.ctypes.data % 8 == 0 for t in tables)
    if not aligned or not whole(nbytes) or pitch % 8 or not out.flags.c_contiguous:
        return False
    library = load()
    if library is None:
        return False
    ids = np.ascontiguousarray(ids, np.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < blocks:
        raise IndexError(f"summing blocks: got ids from {ids.min()} to {ids.max()}, expected them in [0, {blocks})")
    planes = np.array([t.ctypes.data for t in tables], np.uint64)
    library.block_parts(planes.ctypes.data, len(planes), ids.ctypes.data, len(ids), nbytes, pitch, out.ctypes.data)
    return True


def read_parts(pid: int, local: Iovecs, remote: Iovecs, first: int, blocks: int, parts: U64) -> int:
    """Read pieces of process `pid`, remote[i] into local[i]; parts[i]: what each adds to its block's digest.

    The pieces are `first` and those after it of a list that goes plane by plane, `blocks` in each; all `whole`, local
    ones aligned to 8 bytes. Returns how many were read; `ctypes.get_errno()` says why not all. Needs the library.
    """
    library = load()
    assert library is not None
    told = (len(local), first, blocks, BATCH_BYTES, parts.ctypes.data)
    return int(library.read_parts(pid, local.ctypes.data, remote.ctypes.data, *told))
