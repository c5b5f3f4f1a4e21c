"""Machines of a run in one kernel: each has a network and a shared memory of its own, the files are common to all.

A machine is a process that holds its namespaces; `HOST` of `command` is that process's id. It takes a kernel that lets
this user make them (root, as a rule) and iproute2; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMMAND = ("nsenter", "--target", "{host}", "--net", "--mount", "--")
"""Runs a program on a machine."""
_HOLD = "mount -t tmpfs none /dev/shm && ip link set lo up && exec sleep infinity"


@dataclass(frozen=True, slots=True)
class Machines:
    """This one's address for the others, and their names for `COMMAND`."""

    address: str
    hosts: tuple[str, ...]
    links: tuple[str, ...]
    """The end of each one's cable that is here."""

    def shared_memory(self, host: str) -> list[str]:
        """What lies in a machine's shared memory."""
        return os.listdir(Path("/proc", str(host), "root", "dev", "shm"))

    def cut_off(self, host: str) -> None:
        """Pull its cable: it goes on, and nobody hears of it."""
        _ip("link", "set", self.links[self.hosts.index(host)], "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why there can be no machines here; empty when there can."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here"
    try_it = "mount -t tmpfs none /dev/shm && ip link add gyre-a type veth peer name gyre-b"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "sh", "-c", try_it],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return tried.stderr.strip() if tried.returncode else ""


@contextlib.contextmanager
def machines(count: int) -> Iterator[Machines]:
    """`count` machines beside this one, on one network. Names and addresses are this process's own, so that several
    test runs can have theirs."""
    mark, net = f"{os.getpid():x}", f"10.{128 + os.getpid() // 256 % 96}.{os.getpid() % 256}"
    bridge, links = f"gyre{mark}", [f"gy{index}{mark}" for index in range(count)]
    holders: list[subprocess.Popen[bytes]] = []
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{net}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for index in range(count):
            holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", _HOLD], start_new_session=True)
            holders.append(holder)
            _wait_for(holder)
            _ip("link", "add", links[index], "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            _ip("link", "set", links[index], "master", bridge, "up")
            inside = ["nsenter", "--target", str(holder.pid), "--net", "ip"]
            subprocess.run([*inside, "addr", "add", f"{net}.{index + 2}/24", "dev", "eth0"], check=True)
            subprocess.run([*inside, "link", "set", "eth0", "up"], check=True)
        yield Machines(f"{net}.1", tuple(str(holder.pid) for holder in holders), tuple(links))
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
        _ip("link", "delete", bridge)


def _wait_for(holder: subprocess.Popen[bytes]) -> None:
    """Until it is the program that only holds."""
    end = time.monotonic() + 60
    while (comm := Path(f"/proc/{holder.pid}/comm").read_text().strip()) != "sleep":
        assert holder.poll() is None, "a machine has ended while it was made"
        assert time.monotonic() < end, f"a machine is still {comm}"
        time.sleep(0.02)
