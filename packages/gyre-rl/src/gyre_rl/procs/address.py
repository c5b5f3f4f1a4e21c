"""Addresses of a run's processes: which one of this machine's the others reach, and how it is written in a URL.

Invariant: whatever a process of a run listens on, is on the address from which it reaches the run; so where the run
is on the loopback address, nothing is open to other machines.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from gyre_core import InfrastructureError


def own_address(control_url: str) -> str:
    """This machine's address on the way to `control_url`; nothing is sent. InfrastructureError when there is no way."""
    there = urlsplit(control_url)
    doing = f"finding this machine's address on the way to {control_url}"
    try:
        found = socket.getaddrinfo(there.hostname, there.port, type=socket.SOCK_DGRAM)
        family, kind, proto, _, where = found[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)  # of a datagram socket: asks the routing table only
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InfrastructureError(
            doing, got=str(error), expected="a route to the run's machine",
            fix="Set [network] address to one of its addresses that this machine reaches.",
        ) from error  # fmt: skip


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine reach it. A name counts as reachable, but for localhost."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def in_url(address: str) -> str:
    """As it stands in a URL: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address
