"""Executions: opened at the proxy, run by the agents' process, scored, closed, and told to the scheduler.

Invariant: every execution that starts ends in exactly one `ExecutionEnded`; what it earned is in the store before the
scheduler hears of its end. One that is at rest outlives the agents' process. Not here: when groups start, what their
scores mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from gyre_core import (
    CellLostError,
    ConfigError,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    GyreError,
    ModelEndpoint,
    Purpose,
    Score,
    Task,
)
from gyre_sched import EndStatus
from gyre_sched import events as sched

from gyre_rl.agents.host import Cut, Outcome
from gyre_rl.agents.rests import Rests
from gyre_rl.config.schema import RunConfig
from gyre_rl.procs.wire import Empty, Peer
from gyre_rl.proxy.host import Closed, CloseExecution, Opened, OpenExecution
from gyre_rl.run.bus import EventBus
from gyre_rl.views.events import ExecutionEnded, ExecutionStarted, ExecutionWentOn

log = logging.getLogger("gyre.run")
Post = Callable[[sched.Event], None]
EVIDENCE = 1000
"""Characters of a milestone's evidence that are kept in the store."""
CLOSES = 3
"""How often closing an execution is tried at most, each time in the next life of the proxy."""


SCORING_REFUSED = "scoring it: ConfigError: "
"""How the agents' process begins the reason where a scorer cannot use what its task says; no further try mends that."""


class Process(Protocol):
    """The agents' or the proxy's process, through its deaths; see `gyre_rl.run.helpers.Helper`."""

    @property
    def here(self) -> Peer | None:
        """It, if it is there at this moment."""

    async def reach(self) -> Peer:
        """It, as soon as it is there."""

    async def ended(self, peer: Peer) -> bool:
        """Whether the life that `peer` reached is over."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group that may be started: its task and how often it is attempted."""

    name: str
    task: Task
    size: int
    purpose: Purpose
    temperature: float


@dataclass(frozen=True, slots=True)
class Finished:
    """An execution that ended; `recorded` is its name in the store (it names the attempt)."""

    execution: str
    recorded: str
    end: ExecutionEnd
    score: float | None
    partial: bool


def seed_of(run_seed: int, recorded: str) -> int:
    """A seed of its own for every attempt, the same in every life of the run; below 2**31."""
    return int.from_bytes(blake2b(f"{run_seed}/{recorded}".encode(), digest_size=4).digest()) >> 1


def verdict_of(score: Score) -> dict[str, Any]:
    """A score with its evidence, as the store keeps it."""
    milestones = [
        {"name": m.name, "passed": m.passed, "weight": m.weight, "evidence": m.evidence[:EVIDENCE]}
        for m in score.milestones
    ]
    return {"complete": score.complete, "why": score.why, "milestones": milestones}


@dataclass(slots=True)
class Rollout:
    """Runs executions."""

    config: RunConfig
    agents: Process
    proxy: Process
    rests: Rests
    post: Post
    bus: EventBus
    on_over: Callable[[str], None]
    """Told the recorded name of each execution that ended."""
    on_refused: Callable[[ConfigError], None] = lambda error: None
    """Told that a task cannot be scored, by anybody's work."""
    plans: dict[str, GroupPlan] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    """By execution, the last attempt."""
    owners: dict[str, str] = field(default_factory=dict)
    """Name in the store -> the scheduler's name, for running executions."""
    first_attempt: dict[str, int] = field(default_factory=dict)
    """Attempts that earlier lives of the run used up, by execution."""
    done_before: dict[str, frozenset[str]] = field(default_factory=dict)
    """Executions of a group that an earlier life of the run finished."""
    going_on: set[str] = field(default_factory=set)
    """Recorded names of executions that an earlier life, of the run or of the agents' process, left at rest; they go on
    where they stood."""
    answered: dict[str, int] = field(default_factory=dict)
    """Recorded name -> model calls that its agent got an answer to, where its harness tells."""
    last_failure: str = ""
    """Why an execution failed by our fault, most recently."""
    partial_scores: int = 0
    branches: int = 0
    """Paths beyond the first, over all trees."""
    _slots: asyncio.Semaphore | None = None
    _running: dict[str, str] = field(default_factory=dict)
    _cuts: dict[str, str] = field(default_factory=dict)
    """Recorded name -> why it is to end, for running executions: agents that come back are told again."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def start_group(self, group: str, step: int) -> None:
        """Start all executions of a planned group; one that an earlier life finished ends at once as it did."""
        for member in range(self.plans[group].size):
            execution = f"{group}.{member}"
            if execution in self.done_before.get(group, ()):
                self._repeat(execution, group)
            else:
                self.start(execution, group, 0, step)

    def _repeat(self, execution: str, group: str) -> None:
        """Tell the scheduler again what it was told in an earlier life."""
        end = self.finished[execution].end
        self.post(sched.ExecutionStarted(time.monotonic(), execution, group))
        self.post(sched.ExecutionEnded(time.monotonic(), execution, EndStatus(end.status.value), end.reason))

    def forget(self, group: str) -> None:
        """The group has trained or was judged."""
        plan = self.plans.pop(group, None)
        self.done_before.pop(group, None)
        for member in range(plan.size if plan else 0):
            self.finished.pop(f"{group}.{member}", None)
            self.first_attempt.pop(f"{group}.{member}", None)

    def start(self, execution: str, group: str, attempt: int, step: int) -> None:
        """Start one attempt."""
        attempt += self.first_attempt.get(execution, 0)
        task = asyncio.create_task(self._run(execution, group, attempt, step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cut(self, execution: str, reason: str) -> None:
        """End a running execution; it is scored on what stands."""
        recorded = self._running.get(execution)
        if recorded is None:
            return
        self._cuts[recorded] = reason
        if (agents := self.agents.here) is not None:
            with contextlib.suppress(CellLostError):
                await agents.call("/cut", Cut(recorded, reason), Empty)

    async def cut_all(self, reason: str) -> None:
        """End every training execution that runs."""
        groups = {name for name, plan in self.plans.items() if plan.purpose is Purpose.TRAIN}
        running = [name for name in self._running if name.rpartition(".")[0] in groups]
        await asyncio.gather(*(self.cut(execution, reason) for execution in running))

    @property
    def in_flight(self) -> int:
        """Executions that run."""
        return len(self._running)

    async def stop(self) -> None:
        """Cancel all; they are unfinished, and a resume takes them up."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, execution: str, group: str, attempt: int, step: int) -> None:
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.config.rollout.max_in_flight or 1_000_000)
        async with self._slots:
            await self._run_now(execution, group, attempt, step)

    async def _run_now(self, execution: str, group: str, attempt: int, step: int) -> None:
        plan = self.plans[group]
        recorded = execution if attempt == 0 else f"{execution}.r{attempt}"
        self._running[execution] = recorded
        self.owners[recorded] = execution
        began, closed = time.perf_counter(), Closed()
        try:
            self.post(sched.ExecutionStarted(time.monotonic(), execution, group))
            self.bus.emit(ExecutionStarted(recorded, plan.task.id, group, step, plan.purpose.value, attempt))
            outcome = await self._attempt(plan, recorded, step)
            closed = await self._close(recorded, outcome)
        except GyreError as error:
            outcome = await self._give_up(recorded, str(error))
        except Exception as error:  # boundary: a failed execution is a record with a cause, not the end of the run
            log.exception("execution %s failed", recorded)
            outcome = await self._give_up(recorded, f"{type(error).__name__}: {error}")
        finally:
            self._running.pop(execution, None)
            self._cuts.pop(recorded, None)
        self._keep(execution, recorded, outcome)
        self.branches += closed.branches
        self._tell(plan, recorded, outcome, step, closed, time.perf_counter() - began)
        self.owners.pop(recorded, None)
        self.going_on.discard(recorded)
        status = EndStatus(outcome.end.status.value)
        try:
            self.on_over(recorded)
        finally:
            self.post(sched.ExecutionEnded(time.monotonic(), execution, status, outcome.end.reason))

    def _keep(self, execution: str, recorded: str, outcome: Outcome) -> None:
        score = None if outcome.score is None else outcome.score.value
        if outcome.end.status is ExecutionStatus.FAILED:
            self.last_failure = outcome.end.reason
            if self.last_failure.startswith(SCORING_REFUSED):
                told = self.last_failure.removeprefix(SCORING_REFUSED)
                self.on_refused(ConfigError(f"scoring {recorded}", got=told, expected="a task that can be scored"))
        if outcome.end.answered_calls is not None:
            self.answered[recorded] = outcome.end.answered_calls
        partial = outcome.end.status.partial and score is not None
        self.finished[execution] = Finished(execution, recorded, outcome.end, score, partial)
        self.partial_scores += partial and (score or 0.0) > 0.0

    async def _attempt(self, plan: GroupPlan, recorded: str, step: int) -> Outcome:
        """Run it to its end. When the agents' process dies, it goes on from where it last rested; without a rest it
        fails, which is ours."""
        while True:
            opened = await self._open(plan, recorded, step)
            agents = await self.agents.reach()
            try:
                if recorded in self._cuts:
                    await agents.call("/cut", Cut(recorded, self._cuts[recorded]), Empty)
                return await agents.call("/run", self._job(plan, recorded, opened), Outcome, timeout_s=None)
            except CellLostError:
                if not await self.agents.ended(agents) or self.rests.find(recorded) is None:
                    raise
                self.going_on.add(recorded)

    async def _open(self, plan: GroupPlan, recorded: str, step: int) -> Opened:
        again = recorded in self.going_on
        asked = OpenExecution(
            recorded, plan.task.id, plan.name, step, plan.purpose.value, plan.temperature, self._top_p(plan), again
        )
        if again:
            self.bus.emit(ExecutionWentOn(recorded, plan.name, plan.purpose.value))
        return await (await self.proxy.reach()).call("/open", asked, Opened)

    def _job(self, plan: GroupPlan, recorded: str, opened: Opened) -> ExecutionJob:
        return ExecutionJob(
            recorded,
            plan.task,
            ModelEndpoint(opened.base_url, opened.api_key, self.config.name),
            self.config.limits,
            plan.purpose,
            seed_of(self.config.seed, recorded),
            plan.temperature,
            self._top_p(plan),
        )

    def _top_p(self, plan: GroupPlan) -> float:
        return self.config.rollout.top_p if plan.purpose is Purpose.TRAIN else 1.0

    async def _give_up(self, recorded: str, why: str) -> Outcome:
        """It failed by our fault: end what the proxy still does for it, if the proxy is there."""
        outcome = Outcome(ExecutionEnd(ExecutionStatus.FAILED, why), None, 0.0)
        if (proxy := self.proxy.here) is not None:
            with contextlib.suppress(GyreError):  # it may never have been opened
                await proxy.call("/close", CloseExecution(recorded, outcome.end.status.value, cause=why), Closed)
        return outcome

    async def _close(self, recorded: str, outcome: Outcome) -> Closed:
        """Keep what it earned. Closing twice does no harm, and the work of hours must not end with the proxy's life."""
        score = outcome.score
        milestones = {} if score is None else {m.name: float(m.passed) for m in score.milestones}
        value = None if score is None else score.value
        verdict = {} if score is None else verdict_of(score)
        closing = CloseExecution(recorded, outcome.end.status.value, value, milestones, outcome.end.reason, verdict)
        for _ in range(CLOSES - 1):
            proxy = await self.proxy.reach()
            with contextlib.suppress(CellLostError):
                return await proxy.call("/close", closing, Closed)
            await self.proxy.ended(proxy)  # so that its next life is reached, not this one once more
        return await (await self.proxy.reach()).call("/close", closing, Closed)

    def _tell(
        self, plan: GroupPlan, recorded: str, outcome: Outcome, step: int, closed: Closed, seconds: float
    ) -> None:
        end, score = outcome.end, outcome.score
        self.bus.emit(
            ExecutionEnded(
                recorded,
                end.status.value,
                None if score is None else score.value,
                end.status.partial and score is not None,
                plan.purpose.value,
                plan.name,
                step,
                turns=end.turns,
                sampled_tokens=closed.sampled_tokens,
                branches=closed.branches,
                sub_agents=end.sub_agents,
                compactions=end.compactions,
                seconds=seconds,
                reason=end.reason,
            )
        )
