"""The process of the agents: runs executions to their end and scores what stands in their workspaces.

Invariant: each job ends in one `Outcome`; an execution that was cut is scored on what it reached, one that failed by
our fault has no score. The workspace outlives the agent until it is scored. Not here: retries, what scores are for.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from gyre_core import (
    ComponentContext,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    Harness,
    InfrastructureError,
    Kind,
    PluginManager,
    Sandbox,
    Score,
    Scorer,
    ScoringJob,
    Workspace,
)

from gyre_rl.agents.carrying import at_start
from gyre_rl.agents.rests import Rests
from gyre_rl.procs.child import ChildSpec
from gyre_rl.procs.link import Link
from gyre_rl.procs.wire import Empty, Endpoint, build_app

log = logging.getLogger("gyre.agents")
WALL_SLACK_S = 30.0
"""A harness that has not stopped this long after its wall limit is cut from outside."""


@dataclass(frozen=True, slots=True)
class AgentsBody:
    """Configuration of the agents' process, in `ChildSpec.body`."""

    harness: str
    sandbox: str
    harness_options: dict[str, Any] = field(default_factory=dict)
    sandbox_options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    base_dir: str = "."
    rests: str = ""
    """Folder of executions at rest."""
    rest_every_s: float = 300.0
    scorers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of scorers, by name; the others have their defaults."""


@dataclass(frozen=True, slots=True)
class Cut:
    """End an execution now and score what it reached."""

    execution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an execution ended and what it earned; `score` is None when it failed by our fault."""

    end: ExecutionEnd
    score: Score | None
    seconds: float
    scoring_seconds: float = 0.0


class AgentEvents:
    """Counts what a harness tells, and puts its execution at rest every now and then."""

    def __init__(self, rest: Callable[[bytes], Awaitable[None]], every_s: float) -> None:
        self.turns = self.tools = self.compactions = 0
        self._rest, self._every_s = rest, every_s
        self._rested = time.monotonic()

    def turn(self, session: str, number: int) -> None:
        """A model call was answered."""
        self.turns += 1

    def tool_started(self, session: str, name: str) -> None:
        """A tool runs."""
        self.tools += 1

    def tool_ended(self, session: str, name: str, seconds: float) -> None:
        """It ended."""

    def compacted(self, session: str) -> None:
        """History was rewritten."""
        self.compactions += 1

    async def resting(self, state: Callable[[], bytes]) -> None:
        """Keep it, if it is time."""
        if time.monotonic() - self._rested < self._every_s:
            return
        try:
            await self._rest(state())
        except Exception as error:  # noqa: BLE001 - boundary: an agent's files end no execution
            log.warning("not put at rest, it would begin again at a resume: %s", error)
        self._rested = time.monotonic()


class AgentsHost:
    """Harness, sandbox and scorers behind an HTTP interface."""

    def __init__(
        self, spec: ChildSpec, plugins: PluginManager, harness: Harness, sandbox: Sandbox, body: AgentsBody
    ) -> None:
        self._spec, self._plugins, self._harness, self._sandbox = spec, plugins, harness, sandbox
        self._body = body
        self._rests = Rests(Path(body.rests), body.harness)
        self._scorers: dict[str, Scorer] = {}
        self._running: dict[str, asyncio.Task[ExecutionEnd]] = {}
        self._cuts: dict[str, str] = {}
        self.app = build_app(spec.token, [Endpoint("/run", ExecutionJob, self.run), Endpoint("/cut", Cut, self.cut)])

    async def start(self, link: Link, http: aiohttp.ClientSession, base_url: str) -> Empty:
        """Ready at once."""
        return Empty()

    async def answer(self, topic: str, body: bytes) -> Any:
        """The run asks agents by HTTP only."""
        raise InfrastructureError(f"answering {topic!r}", got="a question by link", expected="an HTTP request")

    async def close(self) -> None:
        """Cancel all agents and delete their workspaces."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        close = getattr(self._harness, "aclose", None)
        if close is not None:
            await close()
        await self._sandbox.close()

    async def cut(self, message: Cut) -> Empty:
        """Cancel the agent, now or as soon as it is there; its `/run` then answers with a partial score. A cut may come
        before that: names are those of one attempt, so none is meant for another. It may come twice: the first holds,
        for a second would cancel what the harness does to stop."""
        if message.execution in self._cuts:
            return Empty()
        self._cuts[message.execution] = message.reason
        task = self._running.get(message.execution)
        if task is not None:
            task.cancel()
        return Empty()

    async def run(self, job: ExecutionJob) -> Outcome:
        """One execution, from a fresh workspace, or from where it rests, to its score."""
        try:
            return await self._run(job)
        finally:
            self._cuts.pop(job.execution, None)

    async def _run(self, job: ExecutionJob) -> Outcome:
        began = time.perf_counter()
        try:
            rest, name = self._rests.find(job.execution), job.execution.replace("/", "_")
            if rest is None:
                workspace = await at_start(self._sandbox, name, job.task)
            else:
                workspace = await self._sandbox.restore(name, self._rests.snapshot(rest))
                job = dataclasses.replace(job, state=rest.state)
        except Exception as error:  # noqa: BLE001 - boundary: whatever failed, there is no agent to blame yet
            return Outcome(_failed("making its sandbox", error), None, time.perf_counter() - began)
        try:
            end = await self._agent(job, workspace)
            ended = time.perf_counter()
            if end.status is ExecutionStatus.FAILED:
                return Outcome(end, None, ended - began)
            try:
                score = await self._scorer(job.task.scorer.name).score(ScoringJob(job.task, end), workspace)
            except Exception as error:  # noqa: BLE001 - boundary: judging failed, which is never a zero
                return Outcome(_failed("scoring it", error), None, ended - began, time.perf_counter() - ended)
            return Outcome(end, score, ended - began, time.perf_counter() - ended)
        finally:
            try:
                await workspace.close()
            except Exception as error:  # noqa: BLE001 - boundary: what it earned stands, whatever is left of it here
                log.error("the workspace of %s was not closed: %s", job.execution, error)

    async def _agent(self, job: ExecutionJob, workspace: Workspace) -> ExecutionEnd:
        wall = job.limits.wall_s
        if job.execution in self._cuts:
            return ExecutionEnd(ExecutionStatus.TIMEOUT, self._cuts[job.execution])
        events = AgentEvents(lambda state: self._rests.keep(job.execution, workspace, state), self._body.rest_every_s)
        task = asyncio.create_task(self._harness.run(job, workspace, events))
        self._running[job.execution] = task
        deadline = asyncio.timeout(None if wall is None else wall + WALL_SLACK_S)
        try:
            async with deadline:
                return await task
        except asyncio.CancelledError:
            reason = self._cuts.get(job.execution)
            if reason is None:
                raise
            return ExecutionEnd(ExecutionStatus.TIMEOUT, reason)
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():  # not one of the harness's own
                return ExecutionEnd(ExecutionStatus.TIMEOUT, f"its harness did not stop within {wall} s and was cut")
            log.exception("execution %s failed", job.execution)
            return _failed("running its agent", error)
        finally:
            self._running.pop(job.execution, None)

    def _scorer(self, name: str) -> Scorer:
        """What to judge comes with each task, so one instance serves all."""
        if name not in self._scorers:
            context = ComponentContext(self._spec.run_dir, "agents", base_dir=self._body.base_dir)
            self._scorers[name] = self._plugins.create(Kind.SCORER, name, self._body.scorers.get(name), context)
        return self._scorers[name]


def _failed(doing: str, error: BaseException) -> ExecutionEnd:
    return ExecutionEnd(ExecutionStatus.FAILED, f"{doing}: {type(error).__name__}: {error}")


async def make(spec: ChildSpec) -> AgentsHost:
    """Host factory."""
    body = msgspec.convert(spec.body, AgentsBody)
    plugins = PluginManager.installed()
    context = ComponentContext(spec.run_dir, spec.name, body.seed, base_dir=body.base_dir)
    harness = plugins.create(Kind.HARNESS, body.harness, body.harness_options, context)
    sandbox = plugins.create(Kind.SANDBOX, body.sandbox, body.sandbox_options, context)
    return AgentsHost(spec, plugins, harness, sandbox, body)
