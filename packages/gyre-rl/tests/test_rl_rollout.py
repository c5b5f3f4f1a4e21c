"""Executions through deaths of the agents' process: what rests goes on, a cut is kept, the others begin again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gyre_core import (
    CellId,
    CellLostError,
    ConfigError,
    ExecutionEnd,
    ExecutionStatus,
    InfrastructureError,
    Milestone,
    Purpose,
    Score,
    ScorerSpec,
    Task,
)
from gyre_core.testing.folder import FolderSandbox
from gyre_rl.agents.host import Cut, Outcome
from gyre_rl.agents.rests import Rests
from gyre_rl.config import load
from gyre_rl.proxy.host import Closed, CloseExecution, Opened, OpenExecution
from gyre_rl.run import helpers
from gyre_rl.run.helpers import Helper
from gyre_rl.run.rollout import GroupPlan, Rollout
from gyre_rl.views import events as ev
from gyre_sched import events as sched

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
DONE = Outcome(ExecutionEnd(ExecutionStatus.COMPLETED, "done"), Score(1.0), 1.0)


@dataclass
class Life:
    """One life of the agents' process, and the proxy at once."""

    run: Callable[[Any], Any]
    asked: list[Any] = field(default_factory=list)

    async def call(self, path: str, message: Any, kind: Any, timeout_s: float | None = 60.0) -> Any:
        self.asked.append(message)
        match message:
            case OpenExecution():
                return Opened(f"key-{message.again}", "http://127.0.0.1:1/v1")
            case CloseExecution():
                return Closed()
            case Cut():
                return None
        return await self.run(message)


class Lives:
    """A process that has one life after another; `reach` waits for `back` once the first is over."""

    def __init__(self, *lives: Life) -> None:
        self.lives, self.back, self.seen_dying = list(lives), asyncio.Event(), True
        self.missed = asyncio.Event()
        """Somebody waits for the next life."""
        self.dead: set[int] = set()

    @property
    def here(self) -> Any:
        return self.lives[0] if id(self.lives[0]) not in self.dead else None

    async def reach(self) -> Any:
        if self.here is None:
            self.missed.set()
            await self.back.wait()
            self.lives.pop(0)
        return self.lives[0]

    async def ended(self, peer: Any) -> bool:
        if self.seen_dying:
            self.dead.add(id(peer))
        return self.seen_dying


class Case:
    """A rollout of one group with one execution."""

    def __init__(self, folder: Path, *lives: Life) -> None:
        self.events: list[Any] = []
        self.posted: list[Any] = []
        self.over = asyncio.Event()
        self.agents, self.proxy = Lives(*lives), Life(lambda job: None)
        self.rests = Rests(folder / "rests", "shell")
        bus: Any = SimpleNamespace(emit=self.events.append)
        self.rollout = Rollout(
            load(QUICKSTART), self.agents, Lives(self.proxy), self.rests, self.post, bus, self.rests.forget
        )
        task = Task("t", "do", ScorerSpec("files"))
        self.rollout.plans["g"] = GroupPlan("g", task, 1, Purpose.TRAIN, 1.0)

    def post(self, event: Any) -> None:
        self.posted.append(event)
        if isinstance(event, sched.ExecutionEnded):
            self.over.set()

    async def end(self) -> None:
        async with asyncio.timeout(60):
            await self.over.wait()

    async def missed(self) -> None:
        """The agents are gone, and the execution waits for them."""
        async with asyncio.timeout(60):
            await self.agents.missed.wait()

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


async def rest(case: Case, folder: Path, execution: str = "g.0") -> None:
    workspace = await FolderSandbox(str(folder)).create("w", {})
    await case.rests.keep(execution, workspace, b"state")


def lost() -> CellLostError:
    return CellLostError("asking agents for /run", got="a closed connection")


async def dies(job: Any) -> Outcome:
    raise lost()


async def ends(job: Any) -> Outcome:
    return DONE


async def test_what_rests_goes_on_under_its_name_in_the_next_life(tmp_path):
    case = Case(tmp_path, Life(dies), Life(ends))
    await rest(case, tmp_path)
    case.rollout.start("g.0", "g", 0, 0)
    await case.missed()
    assert not case.over.is_set(), "it waits for the agents"
    case.agents.back.set()
    await case.end()
    opened = [message for message in case.proxy.asked if isinstance(message, OpenExecution)]
    assert [(message.execution, message.again) for message in opened] == [("g.0", False), ("g.0", True)]
    (job,) = case.agents.lives[0].asked
    assert (job.execution, job.endpoint.api_key) == ("g.0", "key-True")
    assert [event.execution for event in case.of(ev.ExecutionWentOn)] == ["g.0"]
    assert [(event.execution, event.score) for event in case.of(ev.ExecutionEnded)] == [("g.0", 1.0)]
    assert [type(event) for event in case.posted] == [sched.ExecutionStarted, sched.ExecutionEnded]
    assert case.rests.find("g.0") is None, "it has ended, so it rests no more"


@pytest.mark.parametrize("why", ["no rest", "only the connection broke", "another failure"])
async def test_otherwise_it_fails_by_our_fault_and_is_closed(tmp_path, why):
    async def fails(job: Any) -> Outcome:
        raise InfrastructureError("unpacking") if why == "another failure" else lost()

    case = Case(tmp_path, Life(fails), Life(ends))
    case.agents.seen_dying = why == "no rest"
    if why != "no rest":
        await rest(case, tmp_path)
    case.rollout.start("g.0", "g", 0, 0)
    await case.end()
    assert [(e.status, e.score) for e in case.of(ev.ExecutionEnded)] == [("failed", None)]
    assert [m.status for m in case.proxy.asked if isinstance(m, CloseExecution)] == ["failed"]
    assert case.of(ev.ExecutionWentOn) == []
    assert case.posted[-1].status == "failed"


async def test_an_attempt_that_begins_while_the_agents_are_gone_waits_and_spends_no_retry(tmp_path):
    case = Case(tmp_path, Life(dies), Life(ends))
    case.agents.dead.add(id(case.agents.lives[0]))
    case.rollout.start("g.0", "g", 1, 0)
    await case.missed()
    assert not case.over.is_set()
    case.agents.back.set()
    await case.end()
    assert [(e.execution, e.status) for e in case.of(ev.ExecutionEnded)] == [("g.0.r1", "completed")]


async def test_a_cut_while_the_agents_are_gone_is_told_to_the_next_life(tmp_path):
    case = Case(tmp_path, Life(dies), Life(ends))
    await rest(case, tmp_path)
    case.rollout.start("g.0", "g", 0, 0)
    await case.missed()
    await case.rollout.cut("g.0", "the step closed")
    case.agents.back.set()
    await case.end()
    told = case.agents.lives[0].asked
    assert told[0] == Cut("g.0", "the step closed")
    assert len(told) == 2, "first the cut, then the job"
    await case.rollout.cut("g.0", "too late")
    assert len(told) == 2


async def test_a_helper_is_one_process_at_a_time_and_is_waited_for(monkeypatch):
    monkeypatch.setattr(helpers, "NOTICED_S", 0.05)
    stopped: list[Any] = []

    async def stop(child: Any, grace_s: float) -> None:
        stopped.append(child)

    fleet: Any = SimpleNamespace(stop=stop)
    ready = asyncio.Event()
    made: list[Any] = []

    async def launch() -> Any:
        await ready.wait()
        peer = object()
        child = SimpleNamespace(id=CellId("agents", len(made) + 1), gone=asyncio.Event(), peer=peer)
        child.reach = lambda: peer
        made.append(child)
        return child

    helper = Helper("agents", launch)
    waiting = asyncio.create_task(helper.reach())
    starting = asyncio.create_task(helper.start(fleet))
    await asyncio.sleep(0.01)
    assert (helper.here, waiting.done()) == (None, False)
    ready.set()
    first = await waiting
    await starting
    assert helper.here is first
    assert helper.lives_as(CellId("agents", 1))
    assert not await helper.ended(first), "a call to it failed, but it lives"
    made[0].gone.set()
    assert await helper.ended(first)
    again = asyncio.create_task(helper.reach())
    await asyncio.sleep(0.01)
    assert (helper.here, again.done()) == (None, False)
    await helper.start(fleet)
    assert stopped == [made[0]], "the old life has ended before the new one begins"
    assert await again is made[1].peer
    assert await helper.ended(first)
    assert not helper.lives_as(CellId("agents", 1))


@pytest.mark.parametrize(("kind", "ends"), [("ConfigError", 1), ("InfrastructureError", 0)])
async def test_a_task_that_cannot_be_scored_is_told_at_once(tmp_path, kind, ends):
    async def run(job: Any) -> Outcome:
        return Outcome(ExecutionEnd(ExecutionStatus.FAILED, f"scoring it: {kind}: key 'exitt'"), None, 1.0)

    case = Case(tmp_path, Life(run))
    refused: list[ConfigError] = []
    case.rollout.on_refused = refused.append
    case.rollout.start("g.0", "g", 0, 0)
    await case.end()
    assert [("g.0" in str(error), "key 'exitt'" in str(error)) for error in refused] == [(True, True)] * ends


@pytest.mark.parametrize(
    ("status", "partial"),
    [(ExecutionStatus.COMPLETED, False), (ExecutionStatus.TIMEOUT, True), (ExecutionStatus.TRUNCATED, True)],
)
async def test_the_score_of_what_was_cut_is_partial_and_its_evidence_is_kept(tmp_path, status, partial):
    milestone = Milestone("letter", True, 2.0, "x" * 5000)
    outcome = Outcome(ExecutionEnd(status, "why"), Score.of_milestones([milestone], complete=not partial), 1.0)

    async def run(job: Any) -> Outcome:
        return outcome

    case = Case(tmp_path, Life(run))
    case.rollout.start("g.0", "g", 0, 0)
    await case.end()
    assert [(e.status, e.partial) for e in case.of(ev.ExecutionEnded)] == [(status.value, partial)]
    assert (case.rollout.finished["g.0"].partial, case.rollout.partial_scores) == (partial, int(partial))
    (closed,) = [message for message in case.proxy.asked if isinstance(message, CloseExecution)]
    told = {"name": "letter", "passed": True, "weight": 2.0, "evidence": "x" * 1000}
    assert closed.verdict == {"complete": not partial, "why": "", "milestones": [told]}
    assert closed.milestones == {"letter": 1.0}
