"""Which transports can be used on this machine, and why not. Probes by doing, within this process and its
children.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from gyre_kvxfer.errors import KVError
from gyre_kvxfer.transports import nixl
from gyre_kvxfer.transports.bulk import Slots
from gyre_kvxfer.transports.choose import has_rdma
from gyre_kvxfer.transports.process_vm import ProcessVmExporter


@dataclass(frozen=True, slots=True)
class Finding:
    """A transport, whether it works here, and the reason in words."""

    name: str
    usable: bool
    reason: str


def examine() -> list[Finding]:
    """One finding a transport. Starts one short-lived child; leaves nothing behind."""
    return [_process_vm(), _nixl(), _shm(), Finding("tcp", True, "sockets are always there")]


_CHILD = """
import sys
from gyre_kvxfer.transports.process_vm import ProcessVmReader
ProcessVmReader.probe(sys.stdin.read(), [])
"""


def _process_vm() -> Finding:
    """Another process reads this one: reading oneself is always allowed and would prove nothing."""
    meta = ProcessVmExporter()
    command = [sys.executable, "-c", _CHILD]
    done = subprocess.run(command, input=meta.meta(), text=True, capture_output=True, timeout=60, check=False)
    if done.returncode == 0:
        return Finding("process_vm", True, "a process may read the memory of another of the same user")
    said = done.stderr.strip().rpartition("\n")[2]
    return Finding("process_vm", False, f"not permitted here (ptrace scope, seccomp or namespace): {said}")


def _nixl() -> Finding:
    name = nixl.flavour()
    if not name:
        return Finding("nixl", False, "no NIXL module is installed (extra `nixl`)")
    fabric = "an RDMA device is there" if has_rdma() else "no RDMA device: used for device memory, or when asked for"
    return Finding("nixl", True, f"{name} is installed; {fabric}")


def _shm() -> Finding:
    try:
        slots = Slots.create()
    except (KVError, OSError) as err:
        return Finding("shm", False, str(err))
    slots.close()
    return Finding("shm", True, "/dev/shm can be written")
