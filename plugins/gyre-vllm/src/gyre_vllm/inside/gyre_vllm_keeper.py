"""Runs a command and ends it, with all its children, when the process that asked for it is gone.

    python gyre_vllm_keeper.py GRACE_SECONDS COMMAND...

Standard input is a pipe whose other end the owner holds: a byte in it, or its end for whatever reason, ends the
command (SIGTERM to its session, SIGKILL after the grace). The exit status is the command's, 128 + n for signal n.
Standard library only; imports nothing else.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1


def _kill(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_with_parent() -> None:
    """Have the kernel end this process with the one that made it, should that be killed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(grace: float, argv: list[str]) -> int:
    """Run `argv`; returns its exit status."""
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    while child.poll() is None:
        ready, _, _ = select.select([0], [], [], 0.2)
        if ready:
            _kill(child.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            break
    _kill(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
