"""The memory of versions that have ended, used again for the next one.

Fresh pages of shared memory have to be found and cleared, and those of a dropped version given back: together more than
the copy itself. So the shards of the version dropped last are kept aside and written over. Invariants: nobody else has
a shard open or mapped when it is written over (the kernel is asked, by a lease; who had the dropped version open keeps
what he had); a shard kept aside has a name of nobody's version; at most one version's shards are kept. Where the kernel
knows no leases nothing is used again. Not here: what is written.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from pathlib import Path

FOLDER = ".spare"


class Spares:
    """The shards kept aside under one root. Several processes may take from it at once: each shard goes to one."""

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER

    def keep(self, version: Path) -> None:
        """Take the shards of a version that ends, in place of those kept before."""
        self.clear()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for shard in version.glob("*.safetensors"):
            shard.rename(self._folder / uuid.uuid4().hex)

    def take(self, path: Path) -> int | None:
        """The largest shard kept, as `path`, open for writing, with its old bytes; None when there is none that
        nobody else has open."""
        found = sorted(self._folder.glob("*"), key=_size, reverse=True)
        for spare in found:
            try:
                spare.rename(path)
            except FileNotFoundError:  # another process took it
                continue
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if alone(handle):
                return handle
            os.close(handle)
            path.unlink()
        return None

    def clear(self) -> None:
        """Give the memory back."""
        for spare in self._folder.glob("*"):
            spare.unlink(missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def alone(handle: int) -> bool:
    """Whether this is the only open description of a file, and no mapping of it is left. The lease that tells is
    ended at once; nobody can come in between where nobody else knows the file's name."""
    lease = getattr(fcntl, "F_SETLEASE", None)
    if lease is None:
        return False
    try:
        fcntl.fcntl(handle, lease, fcntl.F_WRLCK)
    except OSError:
        return False
    fcntl.fcntl(handle, lease, fcntl.F_UNLCK)
    return True
