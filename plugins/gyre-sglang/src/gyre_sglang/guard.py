"""Runs one command in a session of its own and ends the whole session when its owner is gone.

Started as a script: `python guard.py COMMAND...` with a pipe for its standard input, which the owner keeps open.
Standard library only, so that it starts at once. Invariant: when the owner dies, however it dies, the pipe closes and
nothing that the command started is left; the exit status is the command's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 3.0


def _end_session() -> None:
    """SIGTERM to everything here, which we do not heed, then SIGKILL to all, ourselves too."""
    os.killpg(0, signal.SIGTERM)
    threading.Event().wait(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _no_heed(number: int, frame: object) -> None:
    """A handler, unlike an ignored signal, is not passed on to the command."""


def _watch_owner(forward: int) -> None:
    while data := os.read(0, 65536):
        with contextlib.suppress(BrokenPipeError):
            os.write(forward, data)
    _end_session()


def main(argv: list[str]) -> int:
    """Run the command; what the owner writes into our standard input goes on to its."""
    signal.signal(signal.SIGTERM, _no_heed)
    child = subprocess.Popen(argv, stdin=subprocess.PIPE)
    assert child.stdin is not None
    threading.Thread(target=_watch_owner, args=(child.stdin.fileno(),), daemon=True).start()
    status = child.wait()
    os.killpg(0, signal.SIGTERM)  # what the command left behind
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
