"""A workspace at rest as one tar file.

Invariant: a snapshot is there whole or not at all (written beside, synced, renamed); restoring never writes outside the
folder it restores to, whatever the file holds. Not here: when to take one.
"""

from __future__ import annotations

import errno
import os
import tarfile

from gyre_core.errors import InfrastructureError


def save(folder: str, location: str, most: int) -> None:
    """Put `folder` into the tar file `location`, atomically. Links stay links; sockets and pipes are left out.

    Of at most `most` bytes, holes of sparse files counted: they take no room in a workspace, but would here.
    """
    partial, size = f"{location}.{os.getpid()}.partial", 0

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal size
        size += member.size
        if size > most:
            raise OSError(errno.EFBIG, f"more than {most >> 20} MB, holes of sparse files counted")
        return _plain(member)

    open_up(folder)
    try:
        with open(partial, "wb") as raw:
            with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                tar.add(folder, arcname=".", filter=counted)
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, location)
    except OSError as error:
        if os.path.exists(partial):
            os.unlink(partial)
        raise InfrastructureError(
            f"saving a workspace to {location}", got=str(error), expected="room and the right to write there"
        ) from error


def open_up(folder: str) -> None:
    """Give the owner back what modes deny it, or the folder could not be saved. No-op for root, who reads all."""
    if os.geteuid() == 0:
        return
    os.chmod(folder, os.stat(folder).st_mode & 0o7777 | 0o700)
    ahead = [folder]
    while ahead:
        here = ahead.pop()
        with os.scandir(here) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                mode = entry.stat(follow_symlinks=False).st_mode & 0o7777
                wanted = mode | (0o700 if entry.is_dir(follow_symlinks=False) else 0o400)
                if mode != wanted:
                    os.chmod(entry.path, wanted)
                if entry.is_dir(follow_symlinks=False):
                    ahead.append(entry.path)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


def load(location: str, folder: str) -> None:
    """Fill the empty `folder` from a snapshot; InfrastructureError when the file is missing, cut or not a snapshot."""
    links: set[str] = set()

    def safe(member: tarfile.TarInfo) -> tarfile.TarInfo:
        parts = [part for part in member.name.split("/") if part not in ("", ".")]
        through_link = any("/".join(parts[:n]) in links for n in range(1, len(parts)))
        if ".." in parts or member.name.startswith("/") or through_link or _plain(member) is None:
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
    except (OSError, tarfile.TarError) as error:
        raise InfrastructureError(
            f"restoring a workspace from {location}", got=f"{type(error).__name__}: {error}", expected="a snapshot"
        ) from error
