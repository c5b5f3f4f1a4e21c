"""Opens files below a folder without ever leaving it, whoever made the links in it.

Invariant: every component is opened relative to the one before with O_NOFOLLOW, links are resolved here and may not
be absolute or climb above the folder; so a link swapped in between two calls changes nothing. Not here: limits.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from gyre_harnesses.sandbox.keeper import trees

_MOST_LINKS = 40
_ROOT = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def refuse(path: str) -> PermissionError:
    """The error for a path that leads out."""
    return PermissionError(errno.EPERM, "path leads out of the workspace", path)


def _parts(path: str) -> list[str]:
    if "\0" in path:
        raise PermissionError(errno.EPERM, "path holds a NUL byte", path.replace("\0", "\\0"))
    if path.startswith("/"):
        raise refuse(path)
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise OSError(errno.EILSEQ, os.strerror(errno.EILSEQ), ascii(path)[:100]) from error
    if size > trees.MOST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path[:100])
    return [part for part in path.split("/") if part not in ("", ".")]


def open_beneath(root: str, path: str, flags: int, mode: int = 0o644, *, parents: bool = False) -> int:
    """File descriptor of `path` below `root`; the caller closes it.

    Raises PermissionError when the path or a link on it leads out, and what open(2) raises otherwise. `parents`
    creates missing folders. The file opened is never a link.
    """
    ahead = _parts(path)
    here, names, links = os.open(root, _ROOT), list[str](), 0
    try:
        while ahead:
            part = ahead.pop(0)
            if part == "..":
                if not names:
                    raise refuse(path)
                names.pop()
                here = _again(root, names, here)
                continue
            link = _link_at(part, here)
            if link is not None:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                if link.startswith("/"):
                    raise refuse(path)
                ahead = [*_parts(link), *ahead]
            elif ahead:
                inner = _folder_at(part, here, parents)
                os.close(here)
                here = inner
                names.append(part)
            else:
                return os.open(part, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=here)
        return os.open(".", flags | os.O_CLOEXEC, dir_fd=here)
    finally:
        os.close(here)


def _again(root: str, names: list[str], instead_of: int) -> int:
    """The folder of these names from the top on: `..` of a folder may lie outside by now."""
    here = os.open(root, _ROOT)
    try:
        for name in names:
            inner = os.open(name, trees.FOLDER, dir_fd=here)
            os.close(here)
            here = inner
    except OSError:
        os.close(here)
        raise
    os.close(instead_of)
    return here


def _link_at(name: str, folder: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _folder_at(name: str, folder: int, create: bool) -> int:
    if create:
        try:
            os.mkdir(name, 0o777, dir_fd=folder)
        except FileExistsError:
            pass
        else:
            made = os.open(name, trees.FOLDER, dir_fd=folder)
            own_like(made, folder)
            return made
    return os.open(name, trees.FOLDER, dir_fd=folder)


def own_like(fd: int, folder: int) -> None:
    """Give a new file to the owner of the workspace, where we may."""
    if os.geteuid() == 0:
        owner = os.fstat(folder)
        os.fchown(fd, owner.st_uid, owner.st_gid)


def read_beneath(root: str, path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; PermissionError when it is none or leads out."""
    fd = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        _require_regular(fd, path)
        return file.read(limit)


def write_beneath(root: str, path: str, data: bytes) -> None:
    """Create or replace a regular file, with its parents."""
    fd = open_beneath(root, path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK, parents=True)
    with os.fdopen(fd, "wb") as file:
        _require_regular(fd, path)
        if os.geteuid() == 0:
            base = os.stat(root)
            os.fchown(fd, base.st_uid, base.st_gid)
        file.truncate(0)
        file.write(data)


def _require_regular(fd: int, path: str) -> None:
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise PermissionError(errno.EPERM, "not a regular file", path)


def list_beneath(root: str, path: str) -> list[str]:
    """Relative paths of all regular files below `path`, sorted; links are not followed, and what lies deeper than
    `trees.MOST_PATH` is left out."""
    start = open_beneath(root, path, trees.FOLDER)
    try:
        prefix = "/".join(part for part in _parts(path) if part != "..") if ".." not in path.split("/") else None
        if prefix is None:
            prefix = os.path.relpath(os.path.realpath(f"/proc/self/fd/{start}"), os.path.realpath(root))
            prefix = "" if prefix == "." else prefix
        return sorted(_files(start, f"{prefix}/" if prefix else ""))
    finally:
        os.close(start)


def _files(start: int, prefix: str) -> Iterator[str]:
    for spot, name, info in trees.walk(start, _enter, size=len(os.fsencode(prefix))):
        if stat.S_ISREG(info.st_mode) and not spot.too_long(name):
            yield prefix + spot.path(name)


def _enter(spot: trees.Spot, name: str) -> int:
    if spot.too_long(name):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    return trees.enter(spot, name)
