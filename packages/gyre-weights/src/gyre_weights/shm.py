"""Versions in shared memory: where they live, who owns them, when they go.

A root is a folder under /dev/shm (Linux), named after the run's own folder, with the owner's pid in it. Versions in it
have the same form as on disk, so any reader of a folder can take them, and a mapping of them is the memory itself.
Invariants: `v<N>` in the run's folder is a link to the version in memory, so a crash of one process loses nothing
while the machine lives; `settle` puts the version published last on disk and gives the memory back; roots whose owner
is gone, which nobody uses and nobody has published to for an hour are removed by `sweep`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
import uuid
from pathlib import Path

from gyre_weights.errors import IncompleteError
from gyre_weights.folder import flush, new_folder, version_folder, versions_in

SHM = Path("/dev/shm")
_PREFIX = "gyre-weights-"
_OWNER = "owner.json"
_USERS = ".users"
ABANDONED_S = 3600.0


def shm_root(folder: str | Path, *, base: Path = SHM) -> Path:
    """The root in shared memory that belongs to the run's `folder`; made, and owned by this process.
    IncompleteError where there is no shared memory file system."""
    if not base.is_dir():
        raise IncompleteError(
            "making room in shared memory", got=f"no {base}", expected="a memory file system there (Linux)",
            fix="Publish to disk on this machine.",
        )  # fmt: skip
    place = Path(folder).resolve()
    mark = hashlib.blake2b(str(place).encode(), digest_size=8).hexdigest()
    root = base / f"{_PREFIX}{os.getuid()}-{mark}"
    root.mkdir(mode=0o700, exist_ok=True)
    _require_ours(root)
    own(root, place)
    return root


def _require_ours(root: Path) -> None:
    """Names under /dev/shm can be guessed, and anybody may make a folder there."""
    found = os.lstat(root)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise IncompleteError(
            "making room in shared memory", got=f"{root} of user {found.st_uid}",
            expected=f"a folder of user {os.getuid()}", fix="Remove it, or publish to disk.",
        )  # fmt: skip
    if stat.S_IMODE(found.st_mode) & 0o077:
        root.chmod(0o700)


def own(root: Path, folder: Path) -> None:
    """Say that this process publishes to `root`."""
    draft = root / f".{_OWNER}.{uuid.uuid4().hex}"
    draft.write_text(json.dumps({"pid": os.getpid(), "started": _started(os.getpid()), "folder": str(folder)}))
    draft.replace(root / _OWNER)


def link_version(folder: str | Path, version: int, target: Path) -> Path:
    """Make `folder`/v<version> a link to the version in memory, in place of an older one."""
    link = version_folder(folder, version)
    link.parent.mkdir(parents=True, exist_ok=True)
    draft = link.with_name(f".{link.name}.link.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    if link.is_dir() and not link.is_symlink():
        shutil.rmtree(link)
    draft.rename(link)
    return link


def drop_links(folder: str | Path) -> None:
    """Remove links to versions that memory does not hold any more."""
    for path in Path(folder).glob("v*"):
        if path.is_symlink() and not path.exists():
            path.unlink(missing_ok=True)


def settle(folder: str | Path, root: Path, last: int | None = None) -> Path | None:
    """Put version `last`, the one published last (None: the newest there is), on disk as `folder`/v<N>, then give the
    memory back. Where it lies now; None when there was none. OSError when the disk is full: the memory is kept then."""
    versions = versions_in(root)
    target: Path | None = None
    if versions:
        wanted = last if last in versions else max(versions)
        target = version_folder(folder, wanted)
        with new_folder(target) as draft:
            for path in versions[wanted].iterdir():
                shutil.copyfile(path, draft / path.name)
                flush(draft / path.name)
    remove(root)
    drop_links(folder)
    return target


def remove(root: Path) -> None:
    """Give a root's memory back; who has a version mapped keeps it until he lets go."""
    shutil.rmtree(root, ignore_errors=True)


def join(root: Path) -> int:
    """Use a root together with other processes of this machine, until `part` with what this returns."""
    while True:
        root.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(root / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_SH)
        try:
            if os.path.samestat(os.fstat(handle), os.stat(root / _USERS)):
                return handle
        except FileNotFoundError:  # the last user was removing it
            pass
        os.close(handle)


def part(root: Path, handle: int) -> bool:
    """Use it no longer; the last user gives its memory back, which is told. The kernel parts for who is killed."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        remove(root)
        return True
    finally:
        os.close(handle)


def sweep(*, base: Path = SHM, abandoned_s: float = ABANDONED_S) -> list[Path]:
    """Remove this user's roots whose owner is gone, which nobody has joined, and which nobody published to for
    `abandoned_s` or whose run's folder is gone; which were removed."""
    gone = []
    for root in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            owner = json.loads((root / _OWNER).read_text())
            idle = time.time() - max(path.stat().st_mtime for path in (root, root / _OWNER))
            alive = _started(int(owner["pid"])) == owner["started"]
            orphan = not Path(owner["folder"]).is_dir()
        except (OSError, ValueError, KeyError):
            if not _idle_for(root, abandoned_s):
                continue  # being made or being removed by somebody else
            alive, orphan, idle = False, True, 0.0
        if not alive and (orphan or idle > abandoned_s) and _remove_unused(root):
            gone.append(root)
    return gone


def _remove_unused(root: Path) -> bool:
    """Give a root's memory back unless some process has joined it: its first owner may be gone long before them."""
    try:
        handle = os.open(root / _USERS, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # never shared
        remove(root)
        return True
    except OSError:
        return False
    return part(root, handle)


def _idle_for(root: Path, seconds: float) -> bool:
    try:
        return time.time() - root.stat().st_mtime > seconds
    except OSError:
        return False


def _started(pid: int) -> str:
    """When the process started, in clock ticks since boot; empty when there is none. Tells a pid used twice apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]
