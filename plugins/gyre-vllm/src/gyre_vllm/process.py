"""A server's process: started through a keeper, watched, ended with all its children.

Invariant: the server does not outlive this process, however it ends: the keeper holds a pipe of ours and ends the
server when it breaks. Not here: what the server is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from gyre_core import InfrastructureError
from gyre_core.settings import inherited_environment

from gyre_vllm.launch import SERVER_MODULES, LaunchPlan

KEEPER = SERVER_MODULES / "gyre_vllm_keeper.py"
_TAIL_BYTES = 16384
_TELLING = ("error", "exception", "out of memory", "killed", "illegal instruction", "no space left")


def telling_lines(log: Path, count: int = 6) -> str:
    """The lines at the end of a server's log that most likely say why it ended."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "no log"
    chosen = [line for line in lines if any(word in line.lower() for word in _TELLING)] or lines
    return " | ".join(line.strip()[-300:] for line in chosen[-count:])


class ServerProcess:
    """A running server of ours. `log` holds its output."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self.log = process, log
        self.ended = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, plan: LaunchPlan, log: Path, grace_s: float = 15.0) -> ServerProcess:
        """Start it; InfrastructureError if the program cannot be started."""
        log.parent.mkdir(parents=True, exist_ok=True)
        env = inherited_environment() | dict(plan.env)
        words = (sys.executable, "-I", str(KEEPER), str(grace_s), *plan.argv)
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *words,
                    env=env,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise InfrastructureError(
                f"starting {plan.argv[0]}", got=str(error), expected="a running server"
            ) from error
        return cls(process, log)

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return not self.ended.done()

    def story(self) -> str:
        """How it ended and what it said last."""
        status = f"exit status {self.ended.result()}" if self.ended.done() else "still running"
        return f"{status}; its log {self.log} says: {telling_lines(self.log)}"

    async def end(self, timeout_s: float = 30.0) -> None:
        """End it and all its children; returns when they are gone."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(b"x")  # what was forked from this process may hold the pipe open
            self._process.stdin.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), timeout_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.ended
