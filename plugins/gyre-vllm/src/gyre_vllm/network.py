"""This machine's side of the network: free ports, and which interface an address is of.

Invariant: nothing is sent and nothing stays open. Not here: what listens where (`gyre_vllm.launch`).
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from gyre_core import InfrastructureError

_SIOCGIFADDR = 0x8915
_IPV6_TABLE = Path("/proc/net/if_inet6")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it. A name counts as reachable from others, but for localhost."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def free_port(host: str) -> int:
    """A port of this address that is free now. InfrastructureError when the address is not one of this machine's."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise InfrastructureError(
            f"finding a port for vLLM on {host}", got=str(error), expected="an address of this machine",
            fix="Leave `host` in [engine] empty: then it is the address from which this machine reaches the run's.",
        ) from error  # fmt: skip


def interface_of(address: str) -> str:
    """Name of the interface with this address; empty when none has it as its first one, or there is no telling."""
    try:
        found = str(socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][4][0])
        wanted = ipaddress.ip_address(found.partition("%")[0])
    except (OSError, ValueError):
        return ""
    return _of_ipv4(wanted.packed) if wanted.version == 4 else _of_ipv6(wanted.packed.hex())


def _of_ipv4(packed: bytes) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # an interface without an address
                continue
            if answer[20:24] == packed:
                return name
    return ""


def _of_ipv6(digits: str) -> str:
    try:
        rows = [line.split() for line in _IPV6_TABLE.read_text().splitlines()]
    except OSError:
        return ""
    return next((row[-1] for row in rows if row[0] == digits), "")
