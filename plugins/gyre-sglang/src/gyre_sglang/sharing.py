"""The folder of KV pages that servers of several cells share: where it is, and when it goes.

In shared memory it serves the cells of one machine; the cells of another have their own, find no page of these there,
and compute. In a folder that all machines of a run see (`kv_share_folder`) it serves all of them. Invariant: the folder
in memory is there while a cell of this machine holds it and goes with the last that lets go; what a killed last one
leaves, the next cell of the run takes over. A folder that the user named is never removed. Not here: the pages
(`gyre_sglang_server.pages`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from gyre_core import ConfigError

MEMORY = Path("/dev/shm")
_HOLDERS = "holders.lock"


def shared_folder(run_dir: str, named: str = "", base_dir: str = ".") -> Path:
    """Where the cells of a run leave KV pages: in the folder that was named, else in this machine's shared memory, else
    among its temporary files. A relative name means the folder `base_dir`."""
    mark = hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]
    if named:
        return Path(base_dir, named) / f"gyre-kv-{mark}"
    return (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"gyre-kv-{os.getuid()}-{mark}"


class SharedFolder:
    """One cell's hold on it."""

    def __init__(self, run_dir: str, named: str, base_dir: str) -> None:
        self.path = shared_folder(run_dir, named, base_dir)
        self._named = named
        self._lock: int | None = None

    def hold(self) -> None:
        """Make it, and keep it from going. ConfigError when the folder that was named is not there."""
        if self._named and not self.path.parent.is_dir():
            raise ConfigError(
                "sharing KV pages between cells", got=f"no folder {self.path.parent} on this machine",
                expected="a folder that all machines of the run see",
                fix="Make or mount it, or leave engine.kv_share_folder out: then each machine's cells share their own.",
            )  # fmt: skip
        while self._lock is None:
            self.path.mkdir(mode=0o700, exist_ok=True)
            if not self._named:
                self._require_ours()
                self._take()
            else:
                return

    def _require_ours(self) -> None:
        """Names in shared memory can be guessed, and anybody may make a folder there."""
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return  # the last holder has removed it; the next try makes it anew
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(
                "sharing KV pages between cells", got=f"{self.path} of user {found.st_uid}",
                expected=f"a folder of user {os.getuid()}", fix="Remove it, or set kv_share_folder or kv_share_gb = 0.",
            )  # fmt: skip

    def _take(self) -> None:
        """Try once; the last holder may be removing the folder."""
        try:
            lock = os.open(self.path / _HOLDERS, os.O_CREAT | os.O_RDWR, 0o600)
        except FileNotFoundError:
            return
        fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_there(lock, self.path / _HOLDERS):
            self._lock = lock
        else:
            os.close(lock)

    def let_go(self) -> None:
        """Let it go with all its pages if nobody else of this machine holds it. The server that used it has ended."""
        lock, self._lock = self._lock, None
        if lock is None:
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            shutil.rmtree(self.path, ignore_errors=True)
        finally:
            os.close(lock)


def _is_there(handle: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
