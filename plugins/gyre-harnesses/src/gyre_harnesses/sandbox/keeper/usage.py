"""What a workspace uses: disk, memory, and what lies in neither's books, such as files that are open and have no name.

Invariant: looking changes nothing that lasts, and whatever a command does to hide what it holds is counted where an
unprivileged process can see it, or named in the sandbox's reference as not held. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from gyre_harnesses.sandbox.keeper import linux, trees
from gyre_harnesses.sandbox.keeper.confine import Kept

ENTRY_BYTES = 4096
"""What an entry of a folder counts at least: an empty file takes no block, but an inode of the host's."""
_MOST_LENT = 64
_SEMAPHORE_BYTES = 64


def ended_for_memory(kept: Kept) -> int:
    """How many processes of the workspace's control group the kernel ended for want of memory; 0 without a group."""
    if kept.events is None:
        return 0
    lines = os.pread(kept.events, 4096, 0).decode().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def descendants() -> list[int]:
    """All processes below this one."""
    found, ahead = [], [os.getpid()]
    while ahead:
        for task in _tasks(ahead.pop()):
            with contextlib.suppress(OSError), open(f"{task}/children") as file:
                children = [int(word) for word in file.read().split()]
                found += children
                ahead += children
    return found


def _tasks(pid: int) -> list[str]:
    """Folders of a process's threads: each may have children, and open files, of its own."""
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def processes(kept: Kept) -> list[int]:
    """All that the keeper started; empty where there is no /proc, which the sandbox's problems say."""
    if not kept.alone:
        return descendants()
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


class _Lending:
    """Opens folders that their owner closed to itself, and puts their modes back when they were seen."""

    def __init__(self) -> None:
        self.refused = False
        self._lent: list[tuple[int, int, int]] = []

    def enter(self, spot: trees.Spot, name: str) -> int:
        with contextlib.suppress(PermissionError):
            inner = trees.enter(spot, name)
            if os.access(".", os.R_OK | os.X_OK, dir_fd=inner, effective_ids=True):
                return inner
            os.close(inner)
        try:
            return self._lend(spot, name)
        except PermissionError:
            self.refused = True
            raise

    def _lend(self, spot: trees.Spot, name: str) -> int:
        if len(self._lent) == _MOST_LENT:
            raise PermissionError("too many folders within one another that nobody may read")
        fd = os.open(name, os.O_PATH | trees.FOLDER, dir_fd=spot.fd)
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        self._lent.append((len(spot.names), fd, mode))
        os.chmod(f"/proc/self/fd/{fd}", mode | stat.S_IRUSR | stat.S_IXUSR)
        return os.open(name, trees.FOLDER, dir_fd=spot.fd)

    def leave(self, spot: trees.Spot, _name: str) -> None:
        while self._lent and self._lent[-1][0] >= len(spot.names):
            self._put_back()

    def end(self) -> None:
        while self._lent:
            self._put_back()

    def _put_back(self) -> None:
        _, fd, mode = self._lent.pop()
        with contextlib.suppress(OSError):
            if stat.S_IMODE(os.fstat(fd).st_mode) == mode | stat.S_IRUSR | stat.S_IXUSR:
                os.chmod(f"/proc/self/fd/{fd}", mode)
        os.close(fd)


def disk_use(folders: tuple[str, ...], most: int) -> int:
    """Bytes of disk below the folders, links not followed, counted until they are over `most`; a folder that cannot be
    looked into is over it. What vanishes, or is moved, meanwhile is left to the next look.
    """
    total = 0
    for folder in folders:
        lendings = _Lending(), _Lending()
        fds: list[int] = []
        try:
            fds.append(os.open(os.path.dirname(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            fds.append(lendings[0].enter(trees.Spot(fds[0]), os.path.basename(folder)))
            for _, _, info in trees.walk(fds[1], lendings[1].enter, lendings[1].leave):
                total += max(info.st_blocks * 512, ENTRY_BYTES)
                if total > most:
                    break
        except OSError:
            pass
        finally:
            for lending in reversed(lendings):
                lending.end()
            for fd in fds:
                os.close(fd)
        if any(lending.refused for lending in lendings):
            return max(total, most + 1)
    return total


@dataclass
class _Nameless:
    """Files that processes hold and no folder does, each once."""

    blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of open ones: bytes of disk, or of memory."""
    mapped: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Of mapped ones: lengths of the parts in memory's addresses, by where they begin. The file need not be open."""


def nameless(kept: Kept, pids: list[int]) -> tuple[int, int]:
    """Bytes of disk and of memory in files without a name that processes hold open, or of disk: mapped."""
    found, disks = _Nameless(), {os.stat(folder).st_dev for folder in kept.watch if os.path.isdir(folder)}
    for pid in pids:
        for info in _open_files(pid, kept.setup.open_files):
            if info.st_nlink == 0 and stat.S_ISREG(info.st_mode):
                found.blocks[info.st_dev, info.st_ino] = info.st_blocks * 512
        _add_mapped(found, pid, kept.watch)
    disk = sum(size for (device, _), size in found.blocks.items() if device in disks)
    disk += sum(sum(parts.values()) for file, parts in found.mapped.items() if file not in found.blocks)
    memory = sum(size for (device, _), size in found.blocks.items() if device not in disks and not os.major(device))
    return disk, memory


def _open_files(pid: int, most: int) -> Iterator[os.stat_result]:
    for task in _tasks(pid):
        try:
            names = os.listdir(f"{task}/fd")
        except PermissionError:  # it forbids others to look into it
            yield from linux.open_files(pid, most)
            continue
        except OSError:
            continue
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(f"{task}/fd/{name}")


def _add_mapped(found: _Nameless, pid: int, watch: tuple[str, ...]) -> None:
    below = tuple(os.fsencode(f"{folder}/") for folder in watch)
    for task in _tasks(pid):
        try:
            with open(f"{task}/maps", "rb") as file:
                lines = [line for line in file if line.endswith(b" (deleted)\n")]
        except OSError:
            continue
        for line in lines:
            words = line.split(None, 5)
            if len(words) == 6 and words[5].startswith(below):
                begin, _, end = words[0].partition(b"-")
                major, _, minor = words[3].partition(b":")
                file_id = os.makedev(int(major, 16), int(minor, 16)), int(words[4])
                parts = found.mapped.setdefault(file_id, {})
                offset, length = int(words[2], 16), int(end, 16) - int(begin, 16)
                parts[offset] = max(parts.get(offset, 0), length)
        return  # threads share their memory; a first one that ended shows none


def memory_use(kept: Kept, pids: list[int], files: int) -> int:
    """Bytes of memory of these processes, of `files` in memory, and of shared segments. What is shared counts for each
    process that has it, but segments and files in memory not beside that.
    """
    own = shared = 0
    for pid in pids:
        for task in _tasks(pid):
            sizes = _resident(f"{task}/status")
            if sizes is not None:  # a first thread that ended shows none
                own += sizes[0]
                shared += sizes[1]
                break
    return own + max(shared, files + _segments_use(kept))


def _resident(status: str) -> tuple[int, int] | None:
    """Bytes that are a process's own or of its files, and bytes in shared memory."""
    try:
        with open(status, "rb") as file:
            sizes = {line[:8]: int(line.split()[1]) << 10 for line in file if line.startswith(b"Rss")}
    except (OSError, ValueError, IndexError):
        return None
    if not sizes:
        return None
    own = sizes.get(b"RssAnon:", 0) + sizes.get(b"RssFile:", 0)
    return own, sizes.get(b"RssShmem", 0)


def _owned(kept: Kept, kind: str) -> Iterator[dict[str, int]]:
    """System V objects of the workspace: all that its namespace shows; else those of its own user, if it has one."""
    if not kept.alone and os.geteuid() != 0:
        return
    try:
        with open(f"/proc/sysvipc/{kind}", "rb", buffering=0) as file:
            lines = file.readall().decode().splitlines()
    except OSError:
        return
    names = lines[0].split()
    rows = [dict(zip(names, line.split(), strict=False)) for line in lines[1:]]
    for row in rows:
        if kept.alone or row["cuid"] == str(kept.setup.uid):
            yield {name: int(word) for name, word in row.items() if name not in ("key", "perms")}


def _segments_use(kept: Kept) -> int:
    segments = sum(row["rss"] + row["swap"] for row in _owned(kept, "shm"))
    messages = sum(row["cbytes"] for row in _owned(kept, "msg"))
    return segments + messages + sum(row["nsems"] * _SEMAPHORE_BYTES for row in _owned(kept, "sem"))


def remove_segments(kept: Kept) -> None:
    """They would outlive the command that made them, as no process does."""
    for kind, number in (("shm", "shmid"), ("msg", "msqid"), ("sem", "semid")):
        for row in _owned(kept, kind):
            linux.remove_ipc(kind, row[number])
