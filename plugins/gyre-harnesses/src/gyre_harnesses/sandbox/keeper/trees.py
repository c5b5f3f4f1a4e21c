"""Walks folders whose owner is not to be trusted: of any depth, with any modes, and perhaps changed meanwhile.

Invariant: a walk holds one descriptor and neither recurses nor builds paths. A folder is opened below the one before,
without following links, and left by `..`, which must be the folder it was entered from; so it never leads out.
Standard library only. Not here: what is done with what is found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MOST_PATH = 3072
"""Bytes of the longest path that is listed, read and saved: with the folder before it the kernel's 4096 suffice."""


@dataclass(slots=True)
class Spot:
    """Where a walk is."""

    fd: int
    """The folder; open until the walk goes on."""
    names: list[str] = field(default_factory=list)
    """Its path from the start."""
    size: int = 0
    """Bytes of that path, and of what leads to the start, with a slash behind each name."""

    def too_long(self, name: str) -> bool:
        """The path of an entry is longer than `MOST_PATH`."""
        return self.size + len(os.fsencode(name)) > MOST_PATH

    def path(self, name: str) -> str:
        """Path of an entry from the start: to be asked for where it is not too long."""
        return "/".join((*self.names, name))


def enter(spot: Spot, name: str) -> int:
    """Descriptor of a folder."""
    return os.open(name, FOLDER, dir_fd=spot.fd)


def enter_as_owner(spot: Spot, name: str) -> int:
    """Descriptor of a folder in which its owner may do everything from now on."""
    allow(spot.fd, name, stat.S_IRWXU)
    return os.open(name, FOLDER, dir_fd=spot.fd)


def allow(folder: int, name: str, bits: int) -> None:
    """Add to the mode of what is there, unless that is a link or another's."""
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISLNK(mode) and mode & bits != bits:
                os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(mode) | bits)
        finally:
            os.close(fd)


def walk(
    start: int,
    enter: Callable[[Spot, str], int] = enter,
    leave: Callable[[Spot, str], None] | None = None,
    size: int = 0,
) -> Iterator[tuple[Spot, str, os.stat_result]]:
    """Every entry below the folder `start` with its folder, a folder before what is in it.

    `enter` opens a folder; one for which it raises OSError is passed over. `leave` gets a folder when all in it was
    seen. `size` bytes of path lead to the start. OSError when the folders were moved meanwhile.
    """
    spot = Spot(os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=start), size=size)
    above: list[tuple[tuple[int, int], list[str]]] = []
    try:
        ahead = yield from _entries(spot)
        while ahead or above:
            if ahead:
                name = ahead.pop()
                try:
                    inner = enter(spot, name)
                except OSError:
                    continue
                above.append((_identity(spot.fd), ahead))
                _move(spot, inner)
                spot.names.append(name)
                spot.size += len(os.fsencode(name)) + 1
                ahead = yield from _entries(spot)
            else:
                identity, ahead = above.pop()
                _move(spot, os.open("..", FOLDER, dir_fd=spot.fd))
                if _identity(spot.fd) != identity:
                    raise OSError(errno.ESTALE, "a folder was moved while it was walked")
                name = spot.names.pop()
                spot.size -= len(os.fsencode(name)) + 1
                if leave is not None:
                    leave(spot, name)
    finally:
        os.close(spot.fd)


def _entries(spot: Spot) -> Generator[tuple[Spot, str, os.stat_result], None, list[str]]:
    """What is in the folder; gives the names of the folders in it."""
    folders = []
    with os.scandir(spot.fd) as entries:
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # it vanished
            yield spot, entry.name, info
            if stat.S_ISDIR(info.st_mode):
                folders.append(entry.name)
    return folders


def _move(spot: Spot, fd: int) -> None:
    os.close(spot.fd)
    spot.fd = fd


def _identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino
