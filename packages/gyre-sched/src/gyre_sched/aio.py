"""Drives real cells: the only part of the scheduler that does I/O.

``SchedulerRunner`` feeds the machine, writes each accepted event to the log before acting on it, carries commands out
concurrently through a ``CellDriver``, and turns their outcomes, time-outs and failures into events. Commands for one
cell keep their order. Decides nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from . import commands as c
from . import events as e
from .driver import CellDriver, MoveRefused
from .errors import LateOutcomeError, SchedError, StaleIncarnationError, UnknownNameError
from .ids import CellId, Role
from .log import LogSink, NoLog
from .machine import Scheduler
from .view import View

__all__ = ["RunnerClosedError", "SchedulerRunner", "Timeouts"]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds after which a command is cancelled and counts as failed."""

    drain_s: float = 60.0
    switch_s: float = 600.0
    move_s: float = 120.0
    sync_s: float = 600.0
    start_s: float = 60.0
    """For what only starts work: leases, recalls, cuts, builds, seals, admissions."""


class RunnerClosedError(SchedError):
    """The runner was closed while somebody waited for it."""


class SchedulerRunner:
    """The machine at work. Use as ``async with SchedulerRunner(...) as runner:`` or ``start`` and ``close``.

    ``on_commands`` is called synchronously with every event and its commands, for sinks and tests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        driver: CellDriver,
        log: LogSink | None = None,
        *,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_commands: Callable[[e.Event, list[c.Command]], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.driver = driver
        self.log = log or NoLog()
        self.timeouts = timeouts or Timeouts()
        self.dropped: list[str] = []
        """The last messages of earlier lives and late outcomes that were dropped, for people."""
        self._clock = clock
        self._offset = scheduler.now - clock()
        self._on_commands = on_commands
        self._tasks: set[asyncio.Task[None]] = set()
        self._chains: dict[CellId, asyncio.Task[None]] = {}
        self._routes: dict[str, list[asyncio.Future[CellId]]] = {}
        self._admissions: dict[str, asyncio.Future[int]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False

    # --- life ----------------------------------------------------------------------------------------------

    async def __aenter__(self) -> SchedulerRunner:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def start(self) -> None:
        """Let time pass: begin to send ticks."""
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick(), name="gyre-sched tick")

    async def close(self) -> None:
        """Cancel what is under way, wake whoever waits with an error, close the log."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        running = [*self._tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, *([self._ticker] if self._ticker else []), return_exceptions=True)
        self._wake_all(RunnerClosedError("the scheduler runner was closed"))
        self.log.close()

    def _wake_all(self, error: BaseException) -> None:
        waiters: list[asyncio.Future[Any]] = [f for fs in self._routes.values() for f in fs]
        for future in [*waiters, *self._admissions.values()]:
            if not future.done():
                future.set_exception(error)
        self._routes.clear()
        self._admissions.clear()

    @property
    def now(self) -> float:
        """The runner's clock, in the machine's seconds."""
        return max(self.scheduler.now, self._clock() + self._offset)

    @property
    def state(self) -> View:
        """Read-only window on the machine; ``state.picture()`` is a frozen copy for dashboards."""
        return self.scheduler.view

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.scheduler.config.tick_s)
            self.post_now(e.Tick(self.now))

    # --- events in -----------------------------------------------------------------------------------------

    async def post(self, event: e.Event) -> bool:
        """Tell the machine a fact; its ``time`` is set to the runner's clock. See ``post_now``."""
        return self.post_now(event)

    def post_now(self, event: e.Event) -> bool:
        """Tell the machine a fact, from inside the event loop.

        Returns ``False`` if the fact came too late (an earlier life, an outcome that is no longer awaited) and was
        dropped; raises other ``EventError`` for what cannot be true, and ``LogError`` if it cannot be written down.
        """
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise RunnerClosedError(f"cannot take in {event}: the runner is closed")
        event = dataclasses.replace(event, time=self.now)
        try:
            commands = self.scheduler.handle(event)
        except (StaleIncarnationError, LateOutcomeError) as err:
            self.dropped.append(str(err))
            del self.dropped[:-100]
            return False
        try:
            self.log.append(event)
        except SchedError as err:
            self._failure = err
            self._wake_all(err)
            raise
        if self._on_commands is not None:
            self._on_commands(event, commands)
        for command in commands:
            self._carry_out(command)
        return True

    async def route(self, session: str, prompt_tokens: int, prefix: tuple[int, ...] = ()) -> CellId:
        """The cell for the next call of ``session``; waits while it is being moved or no cell can serve it.

        Ask again for an interrupted call. After the answer post ``CallEnded`` (or use ``call_ended``).
        """
        future: asyncio.Future[CellId] = asyncio.get_running_loop().create_future()
        waiters = self._routes.setdefault(session, [])
        waiters.append(future)
        try:
            self.post_now(e.CallRequested(0.0, session, prompt_tokens, prefix))
            return await future
        finally:
            if future in waiters:
                waiters.remove(future)
            if not waiters and self._routes.get(session) is waiters:
                del self._routes[session]

    async def call_ended(self, session: str, context_tokens: int, pause_s: float | None = None) -> bool:
        """The call was answered and the session's context has ``context_tokens`` now."""
        return self.post_now(e.CallEnded(0.0, session, context_tokens, pause_s))

    async def admit(self, group: str, size: int) -> int:
        """Queue a group and wait until it may start; returns the policy version it starts from."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._admissions[group] = future
        try:
            self.post_now(e.GroupQueued(0.0, group, size))
            return await future
        finally:
            self._admissions.pop(group, None)

    # --- commands out --------------------------------------------------------------------------------------

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.RouteCall():
                for future in self._routes.pop(command.session, []):
                    if not future.done():
                        future.set_result(command.cell)
            case c.AdmitGroup():
                future_version = self._admissions.get(command.group)
                if future_version is not None and not future_version.done():
                    future_version.set_result(command.version)
                self._spawn(self._start(command))
            case c.DrainCell() | c.UndrainCell() | c.SwitchCell() | c.SyncWeights():
                self._in_order(command.cell, command)
            case c.MoveSession():
                self._spawn(self._move(command))
            case c.GrantLease() | c.RecallLease():
                self._in_order(command.cell, command)
            case _:
                self._spawn(self._start(command))

    def _starter(self, command: c.Command) -> Awaitable[None]:
        driver = self.driver
        match command:
            case c.AdmitGroup():
                return driver.admit(command.group, command.version)
            case c.RetryExecution():
                return driver.retry(command.execution, command.group, command.attempt)
            case c.CutExecution():
                return driver.cut(command.execution, command.reason)
            case c.BuildGroup():
                return driver.build_group(command.group, command.step, command.executions, command.left_out)
            case c.DropGroup():
                return driver.drop_group(command.group, command.reason)
            case c.GroupEvaluated():
                return driver.evaluated(command.group, command.executions)
            case c.SealStep():
                return driver.seal(command.step, command.groups)
            case c.ApplyStep():
                return driver.apply_step(command.step, command.groups)
            case c.Alarm():
                return driver.alarm(command.subject, command.reason)
            case _:
                raise TypeError(f"no way to carry out {command}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (err := task.exception()) is not None and self._failure is None:
            self._failure = err
            self._wake_all(err)

    def _in_order(self, cell: CellId, command: c.Command) -> None:
        """Commands for one cell one after another, in the order the machine gave them."""
        before = self._chains.get(cell)

        async def link() -> None:
            if before is not None and not before.done():
                await asyncio.wait([before])
            await self._on_cell(command)

        self._chains[cell] = self._spawn(link())

    async def _on_cell(self, command: c.Command) -> None:
        match command:
            case c.DrainCell():
                err = await self._try(self.driver.drain(command.cell), self.timeouts.drain_s)
                if err is None:
                    self._tell(e.DrainDone(0.0, command.cell))
                else:
                    await self._try(self.driver.undrain(command.cell), self.timeouts.drain_s)
                    self._tell(e.DrainFailed(0.0, command.cell, err))
            case c.UndrainCell():
                err = await self._try(self.driver.undrain(command.cell), self.timeouts.drain_s)
                if err is not None:
                    self._tell(e.CellLost(0.0, command.cell, f"does not serve again after a drain: {err}"))
            case c.SwitchCell():
                await self._switch(command)
            case c.SyncWeights():
                await self._sync(command)
            case c.GrantLease():
                err = await self._try(
                    self.driver.lease(command.cell, command.lease, command.step, command.batches),
                    self.timeouts.start_s,
                )
                if err is not None:
                    self._tell(e.LeaseFailed(0.0, command.cell, command.lease, err))
            case c.RecallLease():
                await self._try(self.driver.recall_lease(command.cell, command.lease), self.timeouts.start_s)

    async def _switch(self, command: c.SwitchCell) -> None:
        """Change a cell's role; a change that fails half-way is undone, or the cell is lost."""
        cell, role = command.cell, command.role
        took: list[float] = []

        async def change(to: Role) -> None:
            took.append(await self.driver.switch(cell, to))

        err = await self._try(change(role), self.timeouts.switch_s)
        if err is None:
            self._tell(e.SwitchDone(0.0, cell, role, took[-1]))
            return
        undo = await self._try(change(role.other), self.timeouts.switch_s)
        reason = err if undo is None else f"{err}; undoing it: {undo}"
        self._tell(e.SwitchFailed(0.0, cell, role, reason, fell_back=undo is None))

    async def _sync(self, command: c.SyncWeights) -> None:
        took: list[float] = []

        async def load() -> None:
            took.append(await self.driver.sync_weights(command.cell, command.version))

        err = await self._try(load(), self.timeouts.sync_s)
        if err is None:
            self._tell(e.WeightsLoaded(0.0, command.cell, command.version, took[-1]))
        else:
            self._tell(e.WeightsFailed(0.0, command.cell, command.version, err))

    async def _move(self, command: c.MoveSession) -> None:
        refused = False
        reports = []

        async def bring() -> None:
            nonlocal refused
            try:
                reports.append(
                    await self.driver.move_session(
                        command.session,
                        command.src,
                        command.dst,
                        carry_kv=command.carry_kv,
                        interrupt=command.interrupt,
                    )
                )
            except MoveRefused:
                refused = True
                raise

        err = await self._try(bring(), self.timeouts.move_s)
        if err is None:
            r = reports[-1]
            self._tell(e.MoveDone(0.0, command.move, command.session, r.carried, r.bytes, r.tokens, r.seconds))
        else:
            self._tell(e.MoveFailed(0.0, command.move, command.session, err, refused))

    async def _start(self, command: c.Command) -> None:
        """Work that only starts something: if even that fails, say so and stop the run."""
        err = await self._try(self._starter(command), self.timeouts.start_s)
        if err is not None:
            raise SchedError(f"the driver could not carry out {command}: {err}")

    async def _try(self, work: Awaitable[Any], limit: float) -> str | None:
        """Run driver code under a limit; what went wrong, in words. The boundary to foreign code."""
        try:
            async with asyncio.timeout(limit):
                await work
        except TimeoutError:
            return f"no answer within {limit} s"
        except Exception as err:  # noqa: BLE001 - a driver's failure is an event, not a crash of the scheduler
            return f"{type(err).__name__}: {err}"
        return None

    def _tell(self, event: e.Event) -> None:
        """An outcome. What it speaks of may be gone by now."""
        if not self._closed:
            try:
                self.post_now(event)
            except UnknownNameError as err:
                self.dropped.append(str(err))
