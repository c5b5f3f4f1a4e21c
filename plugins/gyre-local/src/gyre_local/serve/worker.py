"""The engine's thread: takes commands between forward passes and posts results to the callers' event loops.

Invariants: the core is touched by this thread alone; one wake-up of an event loop carries everything a pass produced;
when the thread ends, for whatever reason, every call and every command has had an answer.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from gyre_core import FinishReason, InfrastructureError

from gyre_local.serve.calls import Call, Outcome
from gyre_local.serve.core import EngineCore
from gyre_local.serve.passes import step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    action: Callable[[EngineCore], Any]
    future: Future[Any]

    def run(self, core: EngineCore) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.action(core))
        except Exception as error:  # noqa: BLE001 - boundary: the error belongs to whoever asked
            self.future.set_exception(error)


class Worker:
    """Runs an `EngineCore` in a thread of its own until `stop`."""

    def __init__(self, core: EngineCore, threads: int, name: str) -> None:
        self._core: EngineCore | None = core
        self._threads, self._name = threads, name
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._ended = False
        self._paused = False
        self._thread = threading.Thread(target=self._run, name=f"gyre-local-{name}", daemon=True)
        self._thread.start()

    def submit(self, action: Callable[[EngineCore], T]) -> Future[T]:
        """Run `action` on the core between two passes. The future fails when the thread has ended."""
        command = _Command(action, Future())
        with self._gate:
            if self._ended:
                command.future.set_exception(self._gone())
            else:
                self._commands.put(command)
        return command.future

    async def do(self, action: Callable[[EngineCore], T]) -> T:
        """`submit`, awaited."""
        return await asyncio.wrap_future(self.submit(action))

    async def set_paused(self, paused: bool, *, abort: bool = False) -> None:
        """Stop or go on between two passes; with `abort` every call ends."""

        def change(core: EngineCore) -> None:
            if abort:
                core.abort_all()
            self._paused = paused

        await self.do(change)

    def stop(self) -> None:
        """End the thread, calls with ABORT, and drop the core; blocks for at most the running pass."""
        self._commands.put(None)
        self._thread.join()

    def _gone(self) -> InfrastructureError:
        return InfrastructureError(
            f"asking the embedded engine of {self._name!r}",
            got="no answer: its thread has ended",
            expected="a running engine",
            fix="Start or wake it; an earlier error may say why it ended.",
        )

    def _run(self) -> None:
        core = self._core
        assert core is not None
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        try:
            idle = False
            while self._take_commands(core, wait=idle):
                idle = self._paused or not step(core)
                _post(core)
            core.abort_all()
        except Exception as error:  # noqa: BLE001 - boundary: a broken core must not leave its callers waiting
            for call in core.calls():
                failure = InfrastructureError(f"running call {call.id!r}", got=f"{type(error).__name__}: {error}")
                failure.__cause__ = error
                core.outbox.append((call, failure))
        finally:
            with self._gate:
                self._ended = True
            _post(core)
            core.drop()
            self._core = None
            self._refuse_rest()

    def _take_commands(self, core: EngineCore, *, wait: bool) -> bool:
        """Run the commands that are there (with `wait`, at least one); False when the thread is to end."""
        try:
            while True:
                command = self._commands.get(block=wait)
                if command is None:
                    return False
                command.run(core)
                wait = False
        except queue.Empty:
            return True

    def _refuse_rest(self) -> None:
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None and command.future.set_running_or_notify_cancel():
                command.future.set_exception(self._gone())


def _post(core: EngineCore) -> None:
    """Hand the outbox over, one wake-up for each event loop that waits."""
    if not core.outbox:
        return
    items, core.outbox = core.outbox, []
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Call, Outcome]]] = {}
    for call, outcome in items:
        by_loop.setdefault(call.mailbox.loop, []).append((call, outcome))
    for loop, letters in by_loop.items():
        try:
            loop.call_soon_threadsafe(_deliver, letters)
        except RuntimeError:  # that event loop is closed: nobody waits for its calls any more
            for call in [c for c in core.calls() if c.mailbox.loop is loop]:
                core.finish(call, FinishReason.ABORT)
            core.outbox.clear()


def _deliver(letters: list[tuple[Call, Outcome]]) -> None:
    for call, outcome in letters:
        call.mailbox.items.put_nowait(outcome)
