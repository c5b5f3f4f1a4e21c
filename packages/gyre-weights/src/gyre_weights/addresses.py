"""Addresses of machines: names, IPv4 and IPv6. What is bound is one address, never all of them."""

from __future__ import annotations

import socket

from gyre_weights.errors import PeerError


def bound(host: str, port: int, doing: str) -> socket.socket:
    """A TCP socket bound to `host`, a name or an address of this machine; port 0 is a free one. PeerError when it is
    none, or stands for every address: a peer elsewhere could not use that."""
    if host in ("", "0.0.0.0", "::"):
        raise PeerError(
            doing, got=f"{host!r}, which stands for every address, as the host", expected="one address",
            fix="Give the address at which the other machines reach this one.",
        )  # fmt: skip
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        try:
            if port:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise PeerError(
            doing, got=f"{host!r} as the host, port {port} ({error})", expected="a name or address of this machine"
        ) from error
    return made


def own_address(host: str, port: int) -> str:
    """The address of this machine from which (host, port) is reached."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    probe = socket.socket(family, kind, protocol)
    try:
        probe.connect(address)
        return str(probe.getsockname()[0])
    finally:
        probe.close()
