"""The folders of workspaces: made, held while they are in use, removed, and cleared when whoever made them was killed.

Invariant: a folder is locked by the process that made it as long as it is in use, so a folder that can be locked is
nobody's and is removed; one that shall be kept, or that lies where folders cannot be locked (NFS), is never cleared.
Not here: what is in a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import tempfile
import time
from dataclasses import dataclass

from gyre_core.errors import InfrastructureError

from gyre_harnesses.sandbox.keeper import trees

log = logging.getLogger("gyre.sandbox")

_PREFIX, _KEPT, _UNLOCKED = "w", "kept-", "unlocked-"
_PASSES, _PAUSE_S = 50, 0.02


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that this process holds."""

    path: str
    lock: int | None
    """Descriptor of the folder; the lock ends with it, or with this process. None where folders cannot be locked."""

    def free(self) -> None:
        """Remove it; InfrastructureError when something stays."""
        try:
            remove(self.path)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Hold it no more and leave it where it is."""
        if self.lock is not None:
            os.close(self.lock)


def make(base: str, *, keep: bool) -> Folder:
    """A fresh folder in `base`. One to `keep`, or that cannot be locked, has a name of its own kind. OSError when there
    is no room or right.
    """
    os.makedirs(base, exist_ok=True)
    while True:
        path = tempfile.mkdtemp(prefix=_KEPT if keep else _PREFIX, dir=base)
        try:
            held = _hold(path)
        except _NoLocksError as error:
            log.info("folders in %s cannot be locked (%s); those of a process that is killed stay", base, error)
            if keep:
                return Folder(path, None)
            os.rmdir(path)  # who can lock here, from another machine say, would take it for nobody's
            return Folder(tempfile.mkdtemp(prefix=_UNLOCKED, dir=base), None)
        if held is not None and os.path.isdir(path):
            return Folder(path, held)
        if held is not None:  # another process cleared it in the moment before it was held
            os.close(held)


def clear(base: str) -> None:
    """Remove the folders in `base` that nobody holds: those of a process that was killed. What stays is told."""
    with contextlib.suppress(FileNotFoundError), os.scandir(base) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX) or not entry.is_dir(follow_symlinks=False):
                continue
            try:
                held = _hold(entry.path)
            except (_NoLocksError, OSError) as error:
                log.info("%s is left alone: %s", entry.path, error)
                continue
            if held is None:
                continue
            try:
                Folder(entry.path, held).free()
            except InfrastructureError as error:
                log.warning("%s", error)


class _NoLocksError(Exception):
    """The file system has no locks for folders."""


def _hold(path: str) -> int | None:
    """The folder's descriptor with the lock on it; None when another holds it, or it is gone. OSError when it cannot be
    opened, _NoLocksError when it cannot be locked by anybody.
    """
    try:
        found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(found)
        return None
    except OSError as error:
        os.close(found)
        raise _NoLocksError(str(error)) from error
    return found


def remove(folder: str) -> None:
    """Delete a folder however deep it is and whatever modes its owner gave to what is in it; InfrastructureError when
    something stays.
    """
    problem: OSError | None = None
    for number in range(_PASSES):
        time.sleep(_PAUSE_S if number else 0.0)  # whoever puts new files there is about to be ended
        try:
            _remove(folder)
        except OSError as error:
            problem = error
        if not os.path.lexists(folder):
            return
    raise InfrastructureError(
        f"deleting the workspace {folder}", got=f"files that stay ({problem})", fix="Delete it by hand."
    )


def _remove(folder: str) -> None:
    """One pass; OSError when something stays."""
    outer = os.open(os.path.dirname(folder) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        name = os.path.basename(folder)
        start = trees.enter_as_owner(trees.Spot(outer), name)
        try:
            for spot, entry, info in trees.walk(start, trees.enter_as_owner, _remove_empty):
                if not stat.S_ISDIR(info.st_mode):
                    with contextlib.suppress(OSError):
                        os.unlink(entry, dir_fd=spot.fd)
        finally:
            os.close(start)
        os.rmdir(name, dir_fd=outer)
    finally:
        os.close(outer)


def _remove_empty(spot: trees.Spot, name: str) -> None:
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=spot.fd)
