"""The agents' process: cut executions are scored on what stands, and a workspace lives until it is scored."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from gyre_core import (
    ExecRequest,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    InfrastructureError,
    Limits,
    ModelEndpoint,
    Score,
    ScorerSpec,
    Task,
)
from gyre_core.testing.folder import FolderSandbox
from gyre_rl.agents import host as agents
from gyre_rl.agents.host import AgentsBody, AgentsHost, Cut, Outcome
from gyre_rl.procs.child import ChildSpec


@dataclass
class Slow:
    """A harness that writes two files and never ends by itself; a scorer that counts files with a command."""

    wrote: asyncio.Event = field(default_factory=asyncio.Event)
    judging: asyncio.Event = field(default_factory=asyncio.Event)
    judged: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[ExecutionStatus] = field(default_factory=list)

    async def run(self, job: ExecutionJob, workspace: Any, events: Any) -> ExecutionEnd:
        for number in range(2):
            await workspace.write(f"done-{number}", b"x")
        self.wrote.set()
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def score(self, job: Any, workspace: Any) -> Score:
        self.statuses.append(job.end.status)
        self.judging.set()
        await self.judged.wait()
        result = await workspace.run(ExecRequest(["sh", "-c", "ls | wc -l"], 60.0, 100))
        return Score(int(result.stdout) / 4, complete=not job.end.status.partial)


class Doors(FolderSandbox):
    """A sandbox that opens when it is told to."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self.asked, self.open = asyncio.Event(), asyncio.Event()

    async def create(self, name: str, files: Any) -> Any:
        self.asked.set()
        await self.open.wait()
        return await super().create(name, files)


def make_host(tmp_path: Any, played: Slow) -> tuple[AgentsHost, Doors]:
    sandbox = Doors(str(tmp_path))
    plugins: Any = SimpleNamespace(create=lambda *_: played)
    spec = ChildSpec("", "agents", 1, "", "token", str(tmp_path))
    body = AgentsBody("played", "doors", rests=str(tmp_path / "rests"))
    return AgentsHost(spec, plugins, played, sandbox, body), sandbox  # type: ignore[arg-type]


def job(**limits: Any) -> ExecutionJob:
    task = Task("t", "write", ScorerSpec("played"))
    return ExecutionJob("g.0", task, ModelEndpoint("http://127.0.0.1:1/v1", "k", "m"), Limits(**limits))


async def begin(host: AgentsHost, sandbox: Doors, **limits: Any) -> asyncio.Task[Outcome]:
    running = asyncio.create_task(host.run(job(**limits)))
    await sandbox.asked.wait()
    return running


async def test_a_cut_execution_is_scored_on_what_stands(tmp_path):
    played = Slow()
    played.judged.set()
    host, sandbox = make_host(tmp_path, played)
    sandbox.open.set()
    running = await begin(host, sandbox)
    await played.wrote.wait()
    await host.cut(Cut("g.0", "the step closed"))
    outcome = await running
    assert (outcome.end.status, outcome.end.reason) == (ExecutionStatus.TIMEOUT, "the step closed")
    assert outcome.score == Score(0.5, complete=False)
    await host.close()


async def test_a_cut_that_comes_before_the_sandbox_is_made_holds(tmp_path):
    played = Slow()
    played.judged.set()
    host, sandbox = make_host(tmp_path, played)
    running = await begin(host, sandbox)
    await host.cut(Cut("g.0", "the step closed"))
    sandbox.open.set()
    async with asyncio.timeout(60):
        outcome = await running
    assert outcome.end.reason == "the step closed"
    assert (outcome.score, played.wrote.is_set()) == (Score(0.0, complete=False), False)
    again = asyncio.create_task(host.run(job()))
    await played.wrote.wait()
    assert not again.done(), "a cut is for one attempt"
    again.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await again
    await host.close()


async def test_a_cut_that_comes_before_the_execution_holds(tmp_path):
    """A step may close between the moment an execution is opened and its job's arrival here."""
    played = Slow()
    played.judged.set()
    host, sandbox = make_host(tmp_path, played)
    sandbox.open.set()
    await host.cut(Cut("g.0", "the step closed"))
    async with asyncio.timeout(60):
        outcome = await host.run(job())
    assert (outcome.end.reason, played.wrote.is_set()) == ("the step closed", False)
    await host.close()


async def test_a_workspace_outlives_its_deadline_until_it_is_scored(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "WALL_SLACK_S", 0.05)
    played = Slow()
    host, sandbox = make_host(tmp_path, played)
    sandbox.open.set()
    running = await begin(host, sandbox, wall_s=0.05)
    async with asyncio.timeout(60):
        await played.judging.wait()
    await asyncio.sleep(0.3)  # several times the limit and its slack: the judge is not hurried
    assert not running.done()
    (stands,) = [path for path in tmp_path.iterdir() if path.name.startswith("g.0")]
    files = len(list(stands.iterdir()))
    played.judged.set()
    outcome = await running
    assert outcome.end.status is ExecutionStatus.TIMEOUT
    assert "was cut" in outcome.end.reason
    assert (outcome.score, played.statuses) == (Score(files / 4, complete=False), [ExecutionStatus.TIMEOUT])
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("g.0")], "the workspace goes with its score"
    await host.close()


@pytest.mark.parametrize("error", [InfrastructureError("ending it", got="a process"), RecursionError("deep")], ids=str)
async def test_a_workspace_that_cannot_be_closed_takes_no_score_away(tmp_path, monkeypatch, error):
    played = Slow()
    played.judged.set()
    host, sandbox = make_host(tmp_path, played)
    sandbox.open.set()
    made = await sandbox.create("probe", {})

    async def stuck(_self):
        raise error

    monkeypatch.setattr(type(made), "close", stuck)
    running = await begin(host, sandbox)
    await played.wrote.wait()
    await host.cut(Cut("g.0", "the step closed"))
    assert (await running).score == Score(0.5, complete=False)


class Tidy(Slow):
    """It has something to do when it is cancelled."""

    async def run(self, job: ExecutionJob, workspace: Any, events: Any) -> ExecutionEnd:
        try:
            return await super().run(job, workspace, events)
        finally:
            for _ in range(10):
                await asyncio.sleep(0)
            await workspace.write("tidied", b"x")


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_second_cut_does_not_disturb_the_first(tmp_path, turns):
    played = Tidy()
    played.judged.set()
    host, sandbox = make_host(tmp_path, played)
    sandbox.open.set()
    running = await begin(host, sandbox)
    await played.wrote.wait()
    await host.cut(Cut("g.0", "the step closed"))
    for _ in range(turns):
        await asyncio.sleep(0)
    await host.cut(Cut("g.0", "all are cut"))
    outcome = await running
    assert (outcome.end.reason, outcome.score) == ("the step closed", Score(0.75, complete=False))
    await host.close()


class Unreachable(Slow):
    """Its own connection is slow, which is not its agent's fault."""

    async def run(self, job: ExecutionJob, workspace: Any, events: Any) -> ExecutionEnd:
        raise TimeoutError("connecting")


@pytest.mark.parametrize("wall_s", [None, 600.0])
async def test_a_timeout_of_the_harness_is_not_the_agents(tmp_path, wall_s):
    host, sandbox = make_host(tmp_path, Unreachable())
    sandbox.open.set()
    outcome = await (await begin(host, sandbox, wall_s=wall_s))
    assert (outcome.end.status, outcome.score) == (ExecutionStatus.FAILED, None)
    assert "TimeoutError: connecting" in outcome.end.reason
    await host.close()


async def test_a_sandbox_that_fails_in_any_way_is_our_fault(tmp_path, monkeypatch):
    host, sandbox = make_host(tmp_path, Slow())

    async def deep(*_):
        raise RecursionError("deep")

    monkeypatch.setattr(sandbox, "create", deep)
    outcome = await host.run(job())
    assert (outcome.end.status, outcome.score) == (ExecutionStatus.FAILED, None)
    assert "RecursionError: deep" in outcome.end.reason


async def test_a_run_that_stops_leaves_no_workspace(tmp_path):
    played = Slow()
    host, sandbox = make_host(tmp_path, played)
    sandbox.open.set()
    running = await begin(host, sandbox)
    await played.wrote.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await host.close()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("g.0")]
