"""Virtual time and the machine in it: what the parts of a simulated run share.

Invariant: actions run in the order of their times, ties in the order in which they were planned. The machine's commands
are carried out after the event that caused them, in order, never inside one another. Knows neither cells nor agents.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.config import SchedConfig
from gyre_sched.errors import LateOutcomeError
from gyre_sched.machine import Scheduler
from gyre_sched.policies import Policy

from .models import Hardware
from .workload import Workload

__all__ = ["Stage"]

Do = Callable[[Any], None]


class Stage:
    """One run's clock, machine and constants. ``do`` says who carries out which command."""

    def __init__(self, hw: Hardware, load: Workload, config: SchedConfig, policy: Policy) -> None:
        self.hw = hw
        self.load = load
        self.config = config
        self.machine = Scheduler(config, policy)
        self.now = 0.0
        self.events = 0
        """Actions that happened; wake-ups that had become void are not counted."""
        self.do: dict[type, Do] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0
        self._pending: deque[c.Command] = deque()
        self._busy = False

    def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        """Plan ``action`` for ``time``."""
        self._planned += 1
        heapq.heappush(self._heap, (time, self._planned, action, args))

    def play(self, going: Callable[[], bool], limit_s: float) -> None:
        """Let time pass while ``going()``, there is something planned, and it is before ``limit_s``."""
        heap = self._heap
        while heap and going():
            at, _, action, args = heapq.heappop(heap)
            if at > limit_s:
                return
            self.now = at
            self.events += 1
            action(*args)

    def post(self, event: e.Event) -> None:
        """Tell the machine, and carry out what it asks for. Outcomes that come too late are dropped, as they should."""
        try:
            out = self.machine.handle(event)
        except LateOutcomeError:
            return
        if out:
            self._pending.extend(out)
        if self._busy:
            return
        self._busy = True
        pending = self._pending
        while pending:
            command = pending.popleft()
            self.do[type(command)](command)
        self._busy = False
