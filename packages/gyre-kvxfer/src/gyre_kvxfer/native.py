"""Lane sums in C where this machine has a C compiler: numpy must copy scattered blocks together before it can add them.

Invariant: the same numbers as `digest.lane_sums`, so either side of a move may have it or not. The library is built
once a machine, in a tenth of a second, into the user's cache folder; where that fails, numpy does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.digest import LANES, U64, Bytes
from gyre_kvxfer.settings import cache_folder

SOURCE = Path(__file__).parent / "kernels" / "lanes.c"
_COMPILERS = ("cc", "gcc", "clang")


def build(folder: Path) -> Path | None:
    """The library in `folder`, built if it is not there; None without a compiler or when it fails."""
    text = SOURCE.read_bytes()
    library = folder / f"kv-lanes-{hashlib.sha256(text).hexdigest()[:16]}.so"
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
        found = ctypes.CDLL(str(library)) if library else None
    except OSError:
        return None
    if found is not None:
        found.lane_rows.restype = None
        found.lane_rows.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
    return found


def lane_rows(table: Bytes, ids: npt.NDArray[np.int64], out: U64) -> bool:
    """Write the lane sums of rows `ids` of `table` (uint8[blocks, bytes]) to `out` (uint64[n, LANES]); False when it
    cannot: no library, or rows that are not whole, dense and aligned."""
    nbytes, pitch = table.shape[1], table.strides[0]
    whole = nbytes % (8 * LANES) == 0 and table.strides[1] == 1
    if not whole or pitch % 8 or table.ctypes.data % 8 or not out.flags.c_contiguous:
        return False
    library = load()
    if library is None:
        return False
    ids = np.ascontiguousarray(ids, np.int64)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(table):
        raise IndexError(f"summing blocks: got ids from {ids.min()} to {ids.max()}, expected them in [0, {len(table)})")
    library.lane_rows(table.ctypes.data, ids.ctypes.data, out.ctypes.data, len(ids), nbytes, pitch)
    return True
