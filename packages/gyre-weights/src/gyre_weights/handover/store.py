"""The folder of a machine's fetched versions: one process at a time works in it, and it says when it is full."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gyre_weights.errors import NoRoomError, PeerError
from gyre_weights.folder import drop_old

LOCK = ".lock"
_LOOK_S = 0.02


@contextmanager
def locked(into: Path, doing: str, wait_s: float) -> Iterator[None]:
    """Alone among the threads and processes of this machine that fetch into `into`, which is made. The kernel ends the
    lock with its owner, so none is left over. PeerError when another has it for `wait_s`."""
    end = time.monotonic() + wait_s
    while (handle := _take(into)) is None:
        if time.monotonic() >= end:
            raise PeerError(
                doing, got=f"another process fetching into {into} for {wait_s:g} s", expected="its end",
                fix=f"It may hang: look who has the file {LOCK} in it open.",
            )  # fmt: skip
        time.sleep(_LOOK_S)
    try:
        yield
    finally:
        os.close(handle)


def _take(into: Path) -> int | None:
    """The lock, if it is free. One on a file that was removed with its folder meanwhile is none."""
    into.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(into / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(into / LOCK)):
            return handle
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(handle)
        raise
    os.close(handle)
    return None


def make_room(into: Path, need: int, keep: int | None, chain: Sequence[Path], newest: int | None, doing: str) -> None:
    """See that `need` bytes fit into `into`; where they do not, what `keep` would drop afterwards goes now, all but the
    folders of `chain`. NoRoomError when that is not enough."""
    if _free(into) < need and keep is not None:
        drop_old(into, keep - 1, chain, newest=newest)
    free = _free(into)
    if free < need:
        raise _no_room(doing, into, f"{free} bytes free in {into}", f"{need}")


@contextmanager
def told_place(doing: str, into: Path) -> Iterator[None]:
    """An OSError of the folder as NoRoomError, with the folder's name and what to do."""
    try:
        yield
    except OSError as error:
        raise _no_room(doing, into, f"{error.strerror or error} while writing to {into}", "room there") from error


def _free(into: Path) -> int:
    return shutil.disk_usage(into).free


def _no_room(doing: str, into: Path, got: str, expected: str) -> NoRoomError:
    return NoRoomError(
        doing, got=got, expected=expected,
        fix="Make room there, keep fewer versions, or fetch into a folder on another medium.",
    )  # fmt: skip
