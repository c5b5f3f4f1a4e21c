"""Puts a keeper where its agent may work: own user, mount, process, network and IPC namespaces, or Landlock.

Invariant: after `enter` returned, a command started by the keeper can write below the workspace's own folders only,
cannot see or signal a process outside, and cannot gain a privilege; what the kernel did not grant is listed in
`Kept.problems`, never passed over in silence. Standard library only. Not here: running commands.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from gyre_harnesses.sandbox.keeper import linux

INNER_ID = 1000
"""User and group that commands see themselves as, inside a user namespace."""

_DEVICES = ("null", "zero", "full", "random", "urandom")


@dataclass(frozen=True)
class Setup:
    """What the sandbox asks for; see `LocalOptions` for units and meaning."""

    folder: str
    isolation: str
    uid: int
    network: str
    visible: list[str]
    memory_bytes: int
    total_bytes: int
    file_bytes: int
    disk_bytes: int
    processes: int
    cpu_s: int
    open_files: int
    groups: list[str]
    """Folders of the control group that the keeper joins, and so all that it starts; empty without one."""
    events: str
    """File that counts its processes which the kernel ended for want of memory; empty without one."""


@dataclass(frozen=True)
class Kept:
    """How commands are to be started and ended."""

    setup: Setup
    work: str
    """The workspace as commands see it."""
    home: str
    tmp: str
    watch: tuple[str, ...]
    """Folders whose use of disk counts."""
    alone: bool
    """The keeper is the first process of its own process namespace."""
    before_exec: Callable[[], None] | None
    problems: tuple[str, ...] = ()
    events: int | None = None
    """Open descriptor of `Setup.events`, which lies outside of what commands can see."""


def enter(setup: Setup) -> Kept:
    """Confine the calling process as `setup.isolation` says; OSError naming the call when the kernel refuses."""
    for group in setup.groups:
        with open(f"{group}/cgroup.procs", "w") as file:
            file.write("0")
    return _confined(setup, os.open(setup.events, os.O_RDONLY | os.O_CLOEXEC) if setup.events else None)


def _confined(setup: Setup, events: int | None) -> Kept:
    if setup.isolation == "namespaces":
        return replace(_enter_namespaces(setup), events=events)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    folder = setup.folder
    kept = Kept(
        setup,
        work=f"{folder}/work",
        home=f"{folder}/home",
        tmp=f"{folder}/tmp",
        watch=(f"{folder}/work", f"{folder}/home", f"{folder}/tmp"),
        alone=False,
        before_exec=lambda: _confine_child(setup),
        events=events,
    )
    if setup.isolation == "landlock":
        if linux.landlock_abi() < 1:
            raise OSError(38, "landlock: this kernel has none")
        lacks = [
            text
            for abi, text in ((4, "TCP is not refused"), (6, "signals to other processes of this user are not refused"))
            if linux.landlock_abi() < abi
        ]
        return replace(kept, problems=("other processes are visible", "UDP is not refused", *lacks))
    return replace(kept, problems=("files, processes and network of the host are open to commands",))


def tasks_of(uid: int) -> int:
    """Processes and threads of a user."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == uid:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
    return total


def set_limits(setup: Setup, *, processes: int) -> None:
    """Resource limits of the calling process and what it starts. CPU time is set for each command instead."""
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, setup.file_bytes),
        (resource.RLIMIT_NOFILE, setup.open_files),
        (resource.RLIMIT_NPROC, processes),
    ]
    if setup.memory_bytes:
        limits.append((resource.RLIMIT_AS, setup.memory_bytes))
    for which, value in limits:
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (bound, bound))


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _confine_child(setup: Setup) -> None:
    """Between fork and exec where there are no namespaces."""
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if setup.isolation == "landlock":
        own = [f"{setup.folder}/{part}" for part in ("work", "home", "tmp")]
        devices = [f"/dev/{name}" for name in (*_DEVICES, "tty")]
        linux.landlock([*setup.visible, "/proc"], [*own, *devices])
    root = os.geteuid() == 0
    # The kernel counts by user: without one of its own, the workspace's share comes on top of what runs already.
    set_limits(setup, processes=setup.processes + (0 if root else tasks_of(os.geteuid())))
    if root:
        _become(setup.uid)


def _enter_namespaces(setup: Setup) -> Kept:
    os.chdir(setup.folder)
    outer = os.geteuid()
    copies: dict[str, int] = {}
    if outer == 0:
        outer = setup.uid
        copies = _copies(setup.visible)
        _become(outer)
    group = os.getegid()
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    flags = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    if setup.network == "none":
        flags |= linux.CLONE_NEWNET
    linux.unshare(flags)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {outer} 1"),
        ("gid_map", f"{INNER_ID} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if os.fork() != 0:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    problems = _build_root(setup, copies)
    if setup.network == "none":
        linux.loopback_up()
    linux.drop_capability_bounds()
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    set_limits(setup, processes=setup.processes)
    return Kept(
        setup,
        work="/workspace",
        home="/home/agent",
        tmp="/tmp",
        watch=("/workspace", "/home/agent", "/tmp"),
        alone=True,
        before_exec=None,
        problems=tuple(problems),
    )


def _copies(paths: list[str]) -> dict[str, int]:
    """What root can reach and the user commands run as cannot, such as a folder below another user's home."""
    copies = {}
    for path in paths:
        if os.path.isdir(path) and not os.path.islink(path):
            try:
                copies[path] = linux.detached_copy(path)
            except OSError:
                continue  # an old kernel: mounted by path later on, if that can be reached
    return copies


def _build_root(setup: Setup, copies: dict[str, int]) -> list[str]:
    """A new root of read-only system folders, the workspace, and private /tmp, /home, /dev and /proc."""
    problems: list[str] = []
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "root", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,mode=755")
    for source, inside in (("work", "workspace"), ("home", "home/agent"), ("tmp", "tmp")):
        os.makedirs(f"root/{inside}", exist_ok=True)
        linux.mount(source, f"root/{inside}", None, linux.MS_BIND)
        linux.mount("none", f"root/{inside}", None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_NOSUID | linux.MS_NODEV)
    _mount_visible(setup, copies)
    _build_devices()
    os.mkdir("root/proc")
    try:
        linux.mount("proc", "root/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        with open("root/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError as error:
        problems.append(f"/proc is missing or open to nested namespaces ({error})")
    linux.pivot_root("root")
    linux.mount(
        "none", "/", None, linux.MS_BIND | linux.MS_REMOUNT | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    )
    os.chdir("/workspace")
    return problems


def _mount_visible(setup: Setup, copies: dict[str, int]) -> None:
    bind = linux.MS_BIND | linux.MS_REC
    for path in setup.visible:
        inside = "root" + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.symlink(os.readlink(path), inside)
        elif path in copies or os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
            if path in copies:
                linux.attach(copies[path], inside)
            else:
                linux.mount(path, inside, None, bind)
            linux.mount_read_only(inside)


def _build_devices() -> None:
    os.mkdir("root/dev")
    for name in _DEVICES:
        with open(f"root/dev/{name}", "w"):
            pass
        linux.mount(f"/dev/{name}", f"root/dev/{name}", None, linux.MS_BIND)
    os.mkdir("root/dev/shm")
    linux.mount("tmpfs", "root/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=64m,mode=1777")
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"root/dev/{name}")
