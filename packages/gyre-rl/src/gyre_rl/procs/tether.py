"""Holds a process of a run on another machine: `python -m gyre_rl.procs.tether [--folder DIR] -- PROGRAM ...`.

Whoever started this from afar holds its standard input. Invariant: when that ends, for whatever reason (the run was
killed, the connection broke), the program and all of its session are killed; the word "end" asks it to end by itself.
Exit status: the program's, 128 plus the number for a signal. Not here: how it was started from afar.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading

END = b"end\n"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _follow(pid: int) -> None:
    while words := os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would abort this process at its end
        if END in words:
            _signal(pid, signal.SIGTERM)
    _signal(pid, signal.SIGKILL)


def main() -> int:
    """Run the program until it ends or its holder lets go."""
    parser = argparse.ArgumentParser(prog="python -m gyre_rl.procs.tether")
    parser.add_argument("--folder", help="where it runs")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    try:
        child = subprocess.Popen(args.program, cwd=args.folder, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        sys.stderr.write(f"starting {args.program[0]!r} in {args.folder!r}: {error}\n")
        return 127
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _signal(child.pid, signal.SIGKILL))
    threading.Thread(target=_follow, args=(child.pid,), daemon=True).start()
    status = child.wait()
    _signal(child.pid, signal.SIGKILL)  # what it left behind in its session
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
