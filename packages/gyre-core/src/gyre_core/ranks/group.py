"""The rank processes of one trainer, driven from the cell's event loop.

Each rank is a process in an environment of its own, joined to this one by a socket pair. Every command goes to all
ranks, since most of them are collective, and ends when all have answered. Invariant: a rank that dies, answers rubbish
or does not answer in time ends the whole group, and the command that was running, and every later one, raises one
InfrastructureError that names the rank and what became of it. Nothing waits for a dead rank. When this process ends,
the ranks see the end of their socket and end as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from gyre_core.errors import InfrastructureError
from gyre_core.ranks.wire import RankCrashError, WireError, pack, read_frame, restored
from gyre_core.settings import inherited_environment

_TAIL_BYTES = 3000
_GRACE_S = 5.0
"""How long the other ranks may take to answer after one of them has failed."""
_DEATH_S = 10.0
"""How long a process whose connection broke may take to be dead: a large one is not freed at once."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """How to start the ranks. `packages` are folders of import packages that the ranks need besides what their
    environment has; they are linked, nothing is installed."""

    name: str
    python: Path
    module: str
    """Run as `python -m module FD RANK WORLD`."""
    world: int
    body: Mapping[str, Any]
    """What every rank is told first, as JSON."""
    log_folder: Path
    packages: Sequence[Path] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What one rank answered."""

    values: Mapping[str, Any]
    payload: bytes


class _Rank:
    """One process and its socket; its words begin at byte `begin` of the log, behind those of ranks before it."""

    def __init__(self, index: int, process: asyncio.subprocess.Process, log: Path, begin: int) -> None:
        self.index, self.process, self.log, self.begin = index, process, log, begin
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def connect(self, link: socket.socket) -> None:
        self.reader, self.writer = await asyncio.open_connection(sock=link)

    async def ask(self, number: int, frame: bytes) -> tuple[dict[str, Any], bytes]:
        assert self.reader is not None
        assert self.writer is not None
        self.writer.write(frame)
        await self.writer.drain()
        while True:
            header, payload = await read_frame(self.reader)
            if header.get("id") == number:
                return header, payload

    def tail(self) -> str:
        try:
            with self.log.open("rb") as log:
                log.seek(max(self.begin, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = log.read().decode(errors="replace").strip()
        except OSError:
            return ""
        return f" The end of its log {self.log}:\n{text}" if text else f" It wrote nothing to its log {self.log}."

    def end(self) -> None:
        if self.process.returncode is None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
        if self.writer is not None:
            self.writer.close()


class RankGroup:
    """All ranks of one trainer. One command at a time; others wait."""

    def __init__(self, plan: RankPlan) -> None:
        self.plan = plan
        self._ranks: list[_Rank] = []
        self._lock = asyncio.Lock()
        self._number = 0
        self._folder: Path | None = None
        self._end: InfrastructureError | None = None

    @property
    def alive(self) -> bool:
        """Whether commands can be given."""
        return bool(self._ranks) and self._end is None

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]

    async def start(self, timeout: float) -> None:
        """Start the processes and let them import and meet; InfrastructureError when one cannot."""
        plan = self.plan
        plan.log_folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"gyre-{plan.name}-"))
        for package in plan.packages:
            (self._folder / package.name).symlink_to(package.resolve())
        links = [await self._spawn(index, self._folder) for index in range(plan.world)]
        for rank, link in zip(self._ranks, links, strict=True):
            await rank.connect(link)
        body = dict(plan.body) | {"rendezvous": str(self._folder / "rendezvous")}
        await self.call("hello", {"body": body}, timeout=timeout)

    async def _spawn(self, index: int, folder: Path) -> socket.socket:
        plan = self.plan
        mine, theirs = socket.socketpair()
        log = plan.log_folder / f"{plan.name}-rank{index}.log"
        env = inherited_environment() | dict(plan.env) | {"PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
        env |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(plan.world)}
        try:
            with log.open("ab") as out:  # whoever is sent to the log looks for why the ranks before these ended
                begin = out.tell()
                process = await asyncio.create_subprocess_exec(
                    str(plan.python), "-m", plan.module, str(theirs.fileno()), str(index), str(plan.world),
                    pass_fds=(theirs.fileno(),), env=env, start_new_session=True, cwd=str(folder),
                    stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out,
                )  # fmt: skip
        except OSError as error:
            mine.close()
            await self.close()
            raise InfrastructureError(
                f"starting rank {index} of the trainer {plan.name}", got=str(error),
                expected=f"an interpreter at {plan.python}",
            ) from error  # fmt: skip
        finally:
            theirs.close()
        self._ranks.append(_Rank(index, process, log, begin))
        return mine

    async def call(
        self, op: str, args: Mapping[str, Any] | None = None, payload: bytes = b"", *, timeout: float
    ) -> list[Reply]:
        """Give all ranks a command; their answers by rank.

        When all ranks refuse it alike, their error is raised and the group lives on. Anything else that is no answer
        of all of them ends the group: InfrastructureError.
        """
        async with self._lock:
            if self._end is not None:
                raise self._end
            if not self._ranks:
                raise InfrastructureError(f"{op} in the trainer {self.plan.name}", got="ranks that were not started")
            self._number += 1
            frame = pack({"id": self._number, "op": op, "args": dict(args or {})}, payload)
            asked = [asyncio.create_task(rank.ask(self._number, frame)) for rank in self._ranks]
            try:
                found = await self._gather(op, asked, timeout)
            finally:
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            return found

    async def _gather(
        self, op: str, asked: Sequence[asyncio.Task[tuple[dict[str, Any], bytes]]], timeout: float
    ) -> list[Reply]:
        deadline = asyncio.get_running_loop().time() + timeout
        waiting = set(asked)
        refused: dict[int, Exception] = {}
        while waiting:
            left = deadline - asyncio.get_running_loop().time()
            done, waiting = await asyncio.wait(waiting, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                late = [index for index, task in enumerate(asked) if task in waiting]
                if refused:
                    break
                raise await self._fail(op, late[0], f"no answer from ranks {late} in {timeout:.0f} s")
            for index, task in enumerate(asked):
                if task in done:
                    lost = task.exception()
                    if lost is not None:
                        raise await self._fail(op, index, f"{type(lost).__name__}: {lost}", dead=True)
                    if "error" in task.result()[0]:
                        refused[index] = restored(task.result()[0]["error"])
                        deadline = min(deadline, asyncio.get_running_loop().time() + _GRACE_S)
        if not refused:
            return [Reply(task.result()[0].get("ok") or {}, task.result()[1]) for task in asked]
        first = refused[min(refused)]
        crashed = [index for index, error in refused.items() if isinstance(error, RankCrashError)]
        if len(refused) == len(asked) and not crashed:
            raise first
        broken = min(crashed or refused)
        raise await self._fail(op, broken, str(refused[broken]), cause=refused[broken])

    async def _fail(
        self, op: str, index: int, what: str, *, dead: bool = False, cause: Exception | None = None
    ) -> InfrastructureError:
        """End the group; the error that says why."""
        rank = self._ranks[index]
        if dead:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(rank.process.wait(), _DEATH_S)
            status = rank.process.returncode
            if status is not None:
                ended = f"signal {-status}" if status < 0 else f"status {status}"
                what = f"its process {rank.process.pid} ended with {ended}"
        self._end = InfrastructureError(
            f"{op} in rank {index} of {len(self._ranks)} of the trainer {self.plan.name}",
            got=what,
            expected="an answer of every rank",
            fix="All ranks were ended; what was leased to this cell returns." + rank.tail(),
        )
        self._end.__cause__ = cause
        await self._kill()
        return self._end

    async def _kill(self) -> None:
        for rank in self._ranks:
            rank.end()
        await asyncio.gather(*(rank.process.wait() for rank in self._ranks))
        if self._folder is not None:
            rmtree(self._folder, ignore_errors=True)

    async def close(self, timeout: float = 10.0) -> None:
        """End the ranks: they are asked to, then killed."""
        if self.alive:
            for rank in self._ranks:
                if rank.writer is not None:
                    rank.writer.close()
            waits = [asyncio.create_task(rank.process.wait()) for rank in self._ranks]
            await asyncio.wait(waits, timeout=timeout)
            for wait in waits:
                wait.cancel()
        await self._kill()
        if self._end is None:
            self._end = InfrastructureError(f"using the trainer {self.plan.name}", got="one that was closed")


def package_folders(*modules: Any) -> list[Path]:
    """The folders of imported packages, for `RankPlan.packages`."""
    return [Path(module.__file__).resolve().parent for module in modules]


__all__ = ["RankGroup", "RankPlan", "Reply", "WireError", "package_folders"]
