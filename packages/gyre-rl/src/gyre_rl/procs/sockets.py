"""The sockets between a run's processes: those of a machine that has gone without a word fail within SILENCE_S.

The kernel asks the other kernel, so that a machine or a way to it counts as gone, and a process that is busy does not;
but a process that leaves what it is sent unread for SILENCE_S, with the kernel's buffers full, does. Invariant: every
connection of `session` and of a socket from `listening` is watched, on both sides.
"""

from __future__ import annotations

import socket
from typing import Any

import aiohttp

IDLE_S = 10
EVERY_S = 5
"""A connection without traffic is asked after IDLE_S seconds and every EVERY_S seconds from then on."""
SILENCE_S = 60
"""It fails when nothing came for so long: no answer, no acknowledgement (Linux counts no probes beside this limit)."""


def watch(sock: socket.socket) -> None:
    """Let the kernel watch the other side; sockets accepted from a watched one are watched. Where a kernel lacks an
    option its own times hold."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": EVERY_S, "TCP_KEEPCNT": SILENCE_S // EVERY_S,
        "TCP_USER_TIMEOUT": SILENCE_S * 1000,
    }  # fmt: skip
    for name, value in wanted.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _connecting(info: Any) -> socket.socket:
    family, kind, protocol, *_ = info
    sock = socket.socket(family, kind, protocol)
    watch(sock)
    return sock


def session() -> aiohttp.ClientSession:
    """A client of the run's processes, without a limit of connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, socket_factory=_connecting))


def listening(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening; OSError when the port is taken."""
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        watch(sock)
        sock.bind(where)
    except OSError:
        sock.close()
        raise
    return sock
