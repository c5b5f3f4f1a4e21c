"""Folders of workspaces: whose process was killed, those go; whose process lives, or that shall be kept, those stay."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest
from gyre_core import ComponentContext
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox import folders
from gyre_harnesses.sandbox.local import LocalSandbox

DIES = """
import asyncio, os, sys
from gyre_core import ComponentContext, ExecRequest
from gyre_harnesses.options import LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

async def main():
    sandbox = LocalSandbox(LocalOptions(), ComponentContext(sys.argv[1], "test"))
    workspace = await sandbox.create("w", {"a": b"1"})
    await workspace.run(ExecRequest(["sh", "-c", "mkdir d; echo x > d/f; chmod 000 d"], 60.0, 100))
    print(workspace.path, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_workspaces_of_a_killed_process_are_cleared_and_no_others(tmp_path):
    mine = LocalSandbox(LocalOptions(), ComponentContext(str(tmp_path), "test"))
    kept = LocalSandbox(LocalOptions(keep=True), ComponentContext(str(tmp_path), "test"))
    living, closed = await mine.create("w", {"b": b"2"}), await kept.create("w", {"c": b"3"})
    await closed.close()
    dying = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, str(tmp_path), stdout=-1)
    left = Path((await dying.stdout.readline()).decode().strip()).parent
    next_one = LocalSandbox(LocalOptions(), ComponentContext(str(tmp_path), "test"))
    await next_one.isolation()
    assert left.is_dir(), "its process lives"
    dying.send_signal(signal.SIGKILL)
    await dying.wait()
    assert left.is_dir(), "nobody could remove it"
    after = LocalSandbox(LocalOptions(), ComponentContext(str(tmp_path), "test"))
    await after.isolation()
    assert not left.exists()
    assert await living.read("b") == b"2"
    assert Path(closed.path, "c").read_bytes() == b"3"
    for sandbox in (mine, kept, next_one, after):
        await sandbox.close()
    assert os.listdir(tmp_path / "workspaces") == [Path(closed.path).parent.name]


def test_a_folder_that_is_cleared_as_it_is_made_is_made_again(tmp_path, monkeypatch):
    real = folders._hold
    times = []

    def robbed(path: str) -> int | None:
        times.append(path)
        if len(times) == 1:
            os.rmdir(path)
        return real(path)

    monkeypatch.setattr(folders, "_hold", robbed)
    folder = folders.make(str(tmp_path), keep=False)
    assert len(times) == 2
    assert os.path.isdir(folder.path)
    folder.free()
    assert os.listdir(tmp_path) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(folder.lock)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("keep", [False, True])
def test_where_folders_cannot_be_locked_they_are_made_unlocked_and_never_cleared(tmp_path, monkeypatch, number, keep):
    real, tries = folders.fcntl.flock, []

    def flock(descriptor, how):
        tries.append(descriptor)
        assert len(tries) < 10, "it is not tried for ever"
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    made = folders.make(str(tmp_path), keep=keep)
    assert os.listdir(tmp_path) == [Path(made.path).name]
    assert len(tries) == 1
    folders.clear(str(tmp_path))
    monkeypatch.setattr(folders.fcntl, "flock", real)
    folders.clear(str(tmp_path))  # by one that can lock here
    assert Path(made.path).is_dir()
    made.free()
    assert os.listdir(tmp_path) == []


def test_a_folder_of_others_stays_where_folders_cannot_be_locked(tmp_path, monkeypatch):
    (tmp_path / "wabc").mkdir()

    def flock(descriptor, how):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    folders.clear(str(tmp_path))
    assert os.listdir(tmp_path) == ["wabc"]


def test_a_folder_that_cannot_be_opened_is_an_error_and_not_tried_for_ever(tmp_path, monkeypatch):
    real, tries = os.open, []

    def opened(path, flags, *more, **named):
        if not flags & os.O_DIRECTORY:
            return real(path, flags, *more, **named)
        tries.append(path)
        assert len(tries) < 10, "it is not tried for ever"
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(folders.os, "open", opened)
    with pytest.raises(OSError, match="open files"):
        folders.make(str(tmp_path), keep=False)
