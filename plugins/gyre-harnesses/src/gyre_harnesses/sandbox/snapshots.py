"""A workspace at rest as one tar file.

Invariant: a snapshot is there whole or not at all (written beside, synced, renamed); restoring never writes outside the
folder it restores to, whatever the file holds. Not here: when to take one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tarfile

from gyre_core.errors import InfrastructureError

from gyre_harnesses.sandbox.keeper import trees

_FAULTS = (OSError, ValueError, ArithmeticError, RecursionError, tarfile.TarError)
"""What writing or reading an archive raises, whatever names and times are in it."""


def save(folder: str, location: str, most: int) -> None:
    """Put `folder` into the tar file `location`, atomically. Links stay links; sockets and pipes are left out.

    Of at most `most` bytes, holes of sparse files counted: they take no room in a workspace, but would here. And of no
    path longer than could be restored.
    """
    partial = f"{location}.{os.getpid()}.partial"
    try:
        open_up(folder)
        with open(partial, "wb") as raw:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _fill(tar, folder, most)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, location)
    except _FAULTS as error:
        raise InfrastructureError(
            f"saving a workspace to {location}", got=str(error), expected="room and the right to write there"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def _fill(tar: tarfile.TarFile, folder: str, most: int) -> None:
    size, names = 0, dict[tuple[int, int], str]()
    start = os.open(folder, trees.FOLDER)
    try:
        top = _member(tar, ".", os.fstat(start))
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for spot, name, info in trees.walk(start):
            if spot.too_long(name):
                raise OSError(errno.ENAMETOOLONG, f"a path of more than {trees.MOST_PATH} bytes")
            member = _member(tar, f"./{spot.path(name)}", info)
            if stat.S_ISLNK(info.st_mode):
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=spot.fd)
            elif stat.S_ISDIR(info.st_mode):
                member.type = tarfile.DIRTYPE
            elif not stat.S_ISREG(info.st_mode):
                continue
            elif (first := names.setdefault((info.st_dev, info.st_ino), member.name)) != member.name:
                member.type, member.linkname = tarfile.LNKTYPE, first
            else:
                size += info.st_size
                if size > most:
                    raise OSError(errno.EFBIG, f"more than {most >> 20} MB, holes of sparse files counted")
                member.size = info.st_size
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(name, flags, dir_fd=spot.fd), "rb") as file:
                    tar.addfile(member, file)
                continue
            tar.addfile(member)
    finally:
        os.close(start)


def _member(tar: tarfile.TarFile, name: str, info: os.stat_result) -> tarfile.TarInfo:
    member = tar.tarinfo(name)
    member.mode, member.mtime = stat.S_IMODE(info.st_mode), info.st_mtime
    return member


def open_up(folder: str) -> None:
    """Give the owner back what modes deny it, or the folder could not be saved. No-op for root, who reads all."""
    if os.geteuid() == 0:
        return
    os.chmod(folder, os.stat(folder).st_mode & 0o7777 | stat.S_IRWXU)
    start = os.open(folder, trees.FOLDER)
    try:
        for spot, name, info in trees.walk(start, trees.enter_as_owner):
            if not stat.S_ISDIR(info.st_mode):
                trees.allow(spot.fd, name, stat.S_IRUSR)
    finally:
        os.close(start)


def _plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() or member.isdir() or member.issym() or member.islnk()


def load(location: str, folder: str) -> None:
    """Fill the empty `folder` from a snapshot; InfrastructureError when the file is missing, cut or not a snapshot."""
    links: set[str] = set()

    def safe(member: tarfile.TarInfo) -> tarfile.TarInfo:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        through_link = any("/".join(parts[:n]) in links for n in range(1, len(parts)))
        if ".." in parts or member.name.startswith("/") or through_link or not _plain(member):
            raise tarfile.ReadError(f"member {member.name!r} is not of a workspace")
        if member.islnk() and (".." in member.linkname.split("/") or member.linkname.startswith("/")):
            raise tarfile.ReadError(f"hard link {member.name!r} leads out")
        if member.issym():
            links.add("/".join(parts))
        return member

    try:
        with tarfile.open(location) as tar:
            # Python before 3.11.4 has no filters and ignores the attribute; `safe` is stricter than the default one.
            tar.extraction_filter = lambda member, _: member
            tar.extractall(folder, [safe(member) for member in tar])
    except _FAULTS as error:
        raise InfrastructureError(
            f"restoring a workspace from {location}", got=f"{type(error).__name__}: {error}", expected="a snapshot"
        ) from error
