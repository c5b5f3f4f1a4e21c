"""Holds a process of a run on another machine: `python -m gyre_rl.procs.tether [--folder DIR] -- PROGRAM ...`.

Whoever started this from afar holds its standard input, whose first line are the program's own variables (JSON), so
that they stand in no process's arguments. Invariant: when that input ends, for whatever reason (the run was killed, the
connection broke), the program is asked to end and, GRACE_S later, killed with its process group; the word "end" only
asks. Exit status: the program's, 128 plus the number for a signal. Not here: how it was started from afar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

END = b"end\n"
GRACE_S = 5.0
"""How long a program may take to put its things in order once nobody holds it any more."""
DEVICES = "CUDA_VISIBLE_DEVICES"


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


def _variables() -> dict[str, str]:
    """This process's own, and those that came first on its standard input. Of accelerators that the machine's own
    scheduler gave, the wanted ones are counted from the first of those."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):  # nothing of what follows is taken
        line += byte
    wanted = dict(json.loads(line))
    if DEVICES in wanted:
        wanted[DEVICES] = own_devices(wanted[DEVICES], os.environ.get(DEVICES))
    return os.environ | wanted


def own_devices(wanted: str, given: str | None) -> str:
    """Which of the devices `given` (the value of CUDA_VISIBLE_DEVICES, None: all there are) the indices `wanted` mean.
    IndexError when there are too few."""
    if not given:
        return wanted
    there = given.split(",")
    return ",".join(there[int(index)] for index in wanted.split(","))


def _follow(pid: int) -> None:
    while words := os.read(sys.stdin.fileno(), 4096):  # unbuffered: a buffer's lock would abort this process at its end
        if END in words:
            _signal(pid, signal.SIGTERM)
    _signal(pid, signal.SIGTERM)
    time.sleep(GRACE_S)
    _signal(pid, signal.SIGKILL)


def main() -> int:
    """Run the program until it ends or its holder lets go."""
    parser = argparse.ArgumentParser(prog="python -m gyre_rl.procs.tether")
    parser.add_argument("--folder", help="where it runs")
    parser.add_argument("program", nargs="+")
    args = parser.parse_args()
    try:
        child = subprocess.Popen(
            args.program, cwd=args.folder, env=_variables(), stdin=subprocess.DEVNULL, start_new_session=True
        )
    except (OSError, ValueError, IndexError) as error:
        sys.stderr.write(f"starting {args.program[0]!r} in {args.folder!r}: {error}\n")
        return 127
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: _signal(child.pid, signal.SIGKILL))
    threading.Thread(target=_follow, args=(child.pid,), daemon=True).start()
    status = child.wait()
    _signal(child.pid, signal.SIGKILL)  # what it left behind in its process group
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
