"""The spawner: a small bare interpreter that forks one keeper for every workspace.

Invariant: it forks and nothing else; what is large (the trainer's process with its threads) is never forked. It runs in
`python -I -S`, so it may import this folder and the standard library only. Each packet on its sequential-packet socket
brings a JSON setup and the keeper's own socket. It ends when that socket closes. Keepers end when theirs do.
"""

from __future__ import annotations

import json
import os
import signal
import socket

from gyre_harnesses.sandbox.keeper import linux
from gyre_harnesses.sandbox.keeper.commands import serve
from gyre_harnesses.sandbox.keeper.confine import Setup, enter

_LARGEST_SETUP = 1 << 16


def _keep(channel: socket.socket, setup: Setup) -> None:
    """Body of a keeper: confine, say so, serve until the socket closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        kept = enter(setup)
    except OSError as error:
        problem = json.dumps({"error": f"{error.strerror or error}"}).encode()
        channel.sendall(len(problem).to_bytes(4, "big") + bytes(4) + problem)
        return
    serve(channel, kept)


def main(fd: int) -> None:
    """Fork a keeper for each setup that arrives."""
    control = socket.socket(fileno=fd)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    while True:
        packet, fds, _, _ = socket.recv_fds(control, _LARGEST_SETUP, 1)
        if not packet:
            return
        channel = socket.socket(fileno=fds[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            try:
                _keep(channel, Setup(**json.loads(packet)))
            finally:
                os._exit(0)
        channel.close()
