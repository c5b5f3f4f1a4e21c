"""A server process: started under the guard, watched, ended with everything it started.

Invariant: nothing of a server outlives `stop`, and nothing outlives this process (see `guard`). Not here: what is asked
of a server by HTTP, and when it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from gyre_core import InfrastructureError
from gyre_core.settings import inherited_environment

from gyre_sglang import guard
from gyre_sglang.plan import LaunchPlan

LEFT_S = 30.0
"""How long the kernel may take to clear away a killed session."""
TAIL_BYTES = 6000
TAIL_LINES = 12


class ServerProcess:
    """One server and its children, from `start` to `stop`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, log_from: int, grace_s: float = 0.0) -> None:
        self._process, self.log, self._log_from, self.grace_s = process, log, log_from, grace_s
        self.exited = asyncio.ensure_future(process.wait())
        """Done when the server has ended; its result is the exit status."""

    @classmethod
    async def start(cls, plan: LaunchPlan, log: Path, argv: Sequence[str] | None = None) -> ServerProcess:
        """Start `plan` (or `argv` in its environment), output appended to `log`; InfrastructureError when the program
        cannot be run."""
        words = list(argv or plan.argv)
        log.parent.mkdir(parents=True, exist_ok=True)
        log_from = log.stat().st_size if log.exists() else 0
        if not os.access(words[0], os.X_OK) and "/" in words[0]:
            raise InfrastructureError(
                "starting SGLang", got=f"no program {words[0]}", expected="the interpreter of SGLang's environment",
                fix="Build it with `python tools/engine_env.py sglang`, or set engine.python, engine.command or "
                "engine.url.",
            )  # fmt: skip
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-I", guard.__file__, *words,
                env={**inherited_environment(), **plan.env},
                stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        return cls(process, log, log_from, plan.grace_s)

    def send(self, argv: Sequence[str]) -> None:
        """Tell a spare server what to serve."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(list(argv)).encode() + b"\n")

    async def stop(self) -> None:
        """End it and all its children; where the plan has a grace they are asked first. Returns when their memory is
        free."""
        try:
            if self.grace_s and not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait([self.exited], timeout=self.grace_s)
        finally:
            self._signal(signal.SIGKILL)
        await asyncio.shield(self.exited)
        for _ in range(int(LEFT_S / 0.01)):
            if not _session(self._process.pid):
                return
            await asyncio.sleep(0.01)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def output(self) -> str:
        """All that it has written so far."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(self._log_from)
            return file.read().decode(errors="replace")
        return ""

    def tail(self) -> str:
        """The last lines of its output."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_from, size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(line for line in lines[-TAIL_LINES:] if line.strip())
        return ""

    def resident_bytes(self) -> int:
        """Memory of the server and its children: proportional set size where the kernel tells, else resident set."""
        return sum(_memory(pid) for pid in _session(self._process.pid))


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _session(leader: int) -> list[int]:
    """Living processes of the session led by `leader`."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry))
    return found


def _memory(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0
