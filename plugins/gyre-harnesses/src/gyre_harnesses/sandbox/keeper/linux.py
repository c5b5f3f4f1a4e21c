"""The few Linux calls the keeper needs and Python does not offer: namespaces, mounts, Landlock, prctl.

Invariant: every function either did what it says or raised OSError naming the call. Standard library only, because
this runs in a bare interpreter. Numbers are from the kernel's uapi headers; those that differ between
architectures are looked up by machine. Not here: any decision about what to isolate.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_PIDFD_GETFD = 438
_SYS_MOUNT_SETATTR = 442
_SYS_LANDLOCK_CREATE_RULESET = 444
_SYS_LANDLOCK_ADD_RULE = 445
_SYS_LANDLOCK_RESTRICT_SELF = 446

_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100

_LANDLOCK_READ = (1 << 0) | (1 << 2) | (1 << 3)
"""Execute, read file, read directory."""
_LANDLOCK_ALL_V1 = (1 << 13) - 1
_LANDLOCK_FILE_RIGHTS = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Leave the given namespaces for new ones."""
    _checked(_libc.unshare(flags), f"unshare({flags:#x})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        None if kind is None else kind.encode(),
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _checked(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount and what is below it."""
    _checked(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def detached_copy(path: str) -> int:
    """Descriptor of a copy of the mounts at and below `path`, not mounted anywhere yet. Needs the right to mount."""
    flags = 1 | os.O_CLOEXEC | _AT_RECURSIVE
    return _checked(_libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, path.encode(), flags), f"open_tree {path}")


def attach(copy: int, target: str) -> None:
    """Mount what `detached_copy` gave, and close the descriptor."""
    try:
        _checked(_libc.syscall(_SYS_MOVE_MOUNT, copy, b"", _AT_FDCWD, target.encode(), 4), f"move_mount {target}")
    finally:
        os.close(copy)


def mount_read_only(target: str) -> None:
    """Make a mount and all below it read-only, without devices and set-user-id programs."""
    attributes = struct.pack("=QQQQ", MS_RDONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    result = _libc.syscall(
        _SYS_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))
    )
    _checked(result, f"mount_setattr {target} read-only")


def pivot_root(new_root: str) -> None:
    """Make `new_root` (a mount point) the root and detach the old one."""
    os.chdir(new_root)
    number = {"x86_64": 155, "aarch64": 41, "riscv64": 41}.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"pivot_root: unknown on {os.uname().machine}")
    _checked(_libc.syscall(number, b".", b"."), f"pivot_root {new_root}")
    unmount(".")
    os.chdir("/")


def prctl(option: int, value: int = 0) -> None:
    """prctl(2) with one argument."""
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero), f"prctl({option}, {value})")


def remove_ipc(kind: str, number: int) -> None:
    """Remove a System V segment (`shm`), queue (`msg`) or set of semaphores (`sem`), if it is there and ours."""
    zero = ctypes.c_ulong(0)
    if kind == "sem":
        _libc.semctl(number, 0, 0, zero)
    else:
        getattr(_libc, f"{kind}ctl")(number, 0, zero)


def open_files(pid: int, most: int) -> Iterator[os.stat_result]:
    """What a process has open under the descriptors below `most`, where this one may trace it; else nothing."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return
    try:
        for number in range(most):
            fd = _libc.syscall(_SYS_PIDFD_GETFD, process, number, 0)
            if fd < 0:
                if ctypes.get_errno() != errno.EBADF:
                    return
                continue
            try:
                yield os.fstat(fd)
            finally:
                os.close(fd)
    finally:
        os.close(process)


def drop_capability_bounds() -> None:
    """Empty the bounding set, so that no program started from here can gain a capability."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            return


def loopback_up() -> None:
    """Switch the loopback interface of this network namespace on."""
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 when it has none."""
    return max(0, int(_libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def landlock(read: list[str], write: list[str]) -> int:
    """Confine this process and its children to reading below `read` and everything below `write`.

    Also refuses TCP (ABI 4) and signals and abstract sockets across the border (ABI 6) where the kernel can.
    Needs no_new_privs. Returns the ABI used.
    """
    abi = landlock_abi()
    if abi < 1:
        raise OSError(38, "landlock: this kernel has none")
    handled = _LANDLOCK_ALL_V1
    handled |= (1 << 13) if abi >= 2 else 0
    handled |= (1 << 14) if abi >= 3 else 0
    handled |= (1 << 15) if abi >= 5 else 0
    fields = [handled, 0b11 if abi >= 4 else 0, 0b11 if abi >= 6 else 0]
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    attributes = struct.pack("=QQQ", *fields)[:size]
    ruleset = _checked(
        _libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0), "landlock_create_ruleset"
    )
    try:
        for paths, rights in ((read, _LANDLOCK_READ), (write, handled)):
            for path in paths:
                _landlock_allow(ruleset, path, rights & handled)
        _checked(_libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    return abi


def _landlock_allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _LANDLOCK_FILE_RIGHTS
        rule = struct.pack("=Qi", rights, fd)
        _checked(_libc.syscall(_SYS_LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(fd)
