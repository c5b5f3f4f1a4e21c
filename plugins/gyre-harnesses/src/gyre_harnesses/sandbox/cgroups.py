"""Control groups for workspaces: the kernel's own count of a workspace's memory and processes.

Invariant: a group is made below this process's own group, or in the folder that the user names, and removed with its
workspace after all in it was killed; where none can be made, `find` says why and limits are kept by rlimits and by
looking. Both versions of the interface. Not here: which limits, and who joins a group (the keeper does).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from gyre_core.errors import InfrastructureError

CONTROLLERS = ("memory", "pids")
_OWN = 8
"""Processes that a group may hold beside those of the command: its keeper, and the keeper's helpers as it starts."""
_PREFIX = "gyre-"
_END_S = 5.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where groups can be made: one folder for both controllers (version 2), or one for each (version 1)."""

    version: int
    folders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """One workspace's group."""

    version: int
    folders: tuple[str, ...]
    """Its processes are in each of them."""

    @property
    def events(self) -> str:
        """File with a line `oom_kill N`: how many of its processes the kernel ended for want of memory."""
        return f"{self.folders[0]}/{'memory.events' if self.version == 2 else 'memory.oom_control'}"

    def end(self) -> None:
        """Kill all that is in it and remove it; InfrastructureError when something stays."""
        deadline = time.monotonic() + _END_S
        for folder in self.folders:
            while os.path.isdir(folder):
                _kill(folder)
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
                    break
                if time.monotonic() > deadline:
                    raise InfrastructureError(
                        f"removing the control group {folder}", got="processes that stay", expected="none after SIGKILL"
                    )
                time.sleep(0.005)


def _kill(folder: str) -> None:
    with contextlib.suppress(OSError):
        for word in Path(folder, "cgroup.procs").read_text().split():
            # Version 2 prints 0 for a process of a namespace beyond ours; killing 0 would end our own process group.
            if pid := int(word):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def find(asked: str, *, proc: Path = Path("/proc/self")) -> Place | str:
    """Where groups can be made, tried out; or why none can. `asked`: `auto`, `none`, or a folder of version 2."""
    if asked == "none":
        return "switched off"
    if asked != "auto":
        return _usable(Place(2, (asked,)))
    whys = []
    for place in candidates(proc):
        found = place if isinstance(place, str) else _usable(place)
        if isinstance(found, Place):
            return found
        whys.append(found)
    return "; ".join(whys)


def candidates(proc: Path) -> tuple[Place | str, Place | str]:
    """This process's own groups in version 2 and version 1, or why there is none; `proc` is its folder in /proc."""
    mounts, own = _mounts(proc / "mountinfo"), _own_paths(proc / "cgroup")
    return _second(mounts, own), _first(mounts, own)


def make(place: Place, name: str, memory_bytes: int, processes: int) -> Group:
    """A group with these limits; OSError when the kernel refuses."""
    group = Group(place.version, tuple(f"{folder}/{_PREFIX}{os.getpid()}-{name}" for folder in place.folders))
    try:
        for folder in group.folders:
            os.mkdir(folder)
        _limit(group, memory_bytes, processes)
    except OSError:
        for folder in group.folders:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
        raise
    return group


def _limit(group: Group, memory_bytes: int, processes: int) -> None:
    memory, pids = group.folders[0], group.folders[-1]
    names = ("memory.max", "memory.swap.max") if group.version == 2 else _FIRST_NAMES
    Path(memory, names[0]).write_text(str(memory_bytes))
    swap = Path(memory, names[1])
    try:
        swap.write_text("0" if group.version == 2 else str(memory_bytes))
    except OSError:  # no such file on a kernel that does not count swap, and none can be made in these filesystems
        if swap.exists():
            raise
    Path(pids, "pids.max").write_text(str(processes + _OWN))


_FIRST_NAMES = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")


def _usable(place: Place) -> Place | str:
    """`place` if a group can be made there (not whether it can be joined); clears what runs that were killed left."""
    try:
        if place.version == 2:
            Path(place.folders[0], "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
        for folder in place.folders:
            _clear(folder)
        make(place, f"probe-{secrets.token_hex(4)}", 1 << 24, 1).end()
    except OSError as error:
        return f"version {place.version}: {error.strerror} in {error.filename or place.folders[0]}"
    return place


def _clear(folder: str) -> None:
    for entry in os.scandir(folder):
        pid = entry.name.removeprefix(_PREFIX).partition("-")[0]
        if entry.name.startswith(_PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                os.rmdir(entry.path)


def _mounts(file: Path) -> dict[str, tuple[str, str]]:
    """`2` and each controller of version 1 -> (root, mount point)."""
    found: dict[str, tuple[str, str]] = {}
    for line in _lines(file):
        left, _, right = line.partition(" - ")
        words, (kind, *rest) = left.split(), right.split()
        if kind == "cgroup2":
            found["2"] = (words[3], words[4])
        elif kind == "cgroup":
            found.update({name: (words[3], words[4]) for name in rest[-1].split(",") if name in CONTROLLERS})
    return found


def _own_paths(file: Path) -> dict[str, str]:
    """`2` and each controller of version 1 -> this process's group."""
    found: dict[str, str] = {}
    for line in _lines(file):
        number, names, path = line.split(":", 2)
        second = ["2"] if number == "0" else []
        found.update(dict.fromkeys(names.split(",") if names else second, path))
    return found


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _folder(mount: tuple[str, str], path: str) -> str:
    root, point = mount
    inside = os.path.relpath(path, root) if path.startswith(root) else "."
    return os.path.normpath(os.path.join(point, inside))


def _second(mounts: dict[str, tuple[str, str]], own: dict[str, str]) -> Place | str:
    if "2" not in mounts:
        return "version 2: not mounted"
    folder = _folder(mounts["2"], own.get("2", "/"))
    try:
        there = Path(folder, "cgroup.controllers").read_text().split()
    except OSError as error:
        return f"version 2: {error.strerror}"
    missing = [name for name in CONTROLLERS if name not in there]
    return f"version 2: no {' and no '.join(missing)} controller" if missing else Place(2, (folder,))


def _first(mounts: dict[str, tuple[str, str]], own: dict[str, str]) -> Place | str:
    missing = [name for name in CONTROLLERS if name not in mounts]
    if missing:
        return f"version 1: no {' and no '.join(missing)} hierarchy"
    return Place(1, tuple(_folder(mounts[name], own.get(name, "/")) for name in CONTROLLERS))
