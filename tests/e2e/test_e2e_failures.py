"""Five in a hundred attempts fail by our fault: no zeros come of it, groups stay, the gradient estimate stays unbiased.

Real: the agents' host, the rollout, the run's driver, the scheduler's machine and runner, the making of groups. Played:
the agent (a policy with one choice, so that its gradient is known), its sandbox and its scorer, which fail at will.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core import (
    CellLostError,
    ExecutionEnd,
    ExecutionStatus,
    InfrastructureError,
    PluginManager,
    Purpose,
    Score,
    ScorerSpec,
    Task,
)
from gyre_rl.agents.host import AgentsBody, AgentsHost
from gyre_rl.agents.rests import Rests
from gyre_rl.procs.child import ChildSpec
from gyre_rl.proxy.host import Closed, Opened
from gyre_rl.run.batches import BuiltGroup, Member, build_group
from gyre_rl.run.bus import EventBus
from gyre_rl.run.driver import RunDriver
from gyre_rl.run.rollout import GroupPlan, Rollout
from gyre_rl.run.scheduling import make_scheduler
from gyre_rl.views import events as ev
from gyre_sched import CellId, Role
from gyre_sched import events as sched
from gyre_sched.aio import SchedulerRunner
from small import Probe, small_config

GROUPS, SIZE, SHARE = 160, 8, 0.05
CHOICE = 0.3
"""Chance of the policy's good choice; its gradient in the logit is known: (1 - POOR) * CHOICE * (1 - CHOICE)."""
POOR = 0.2
"""Score of the other choice: partial credit, so that a zero is never a true score here."""
KNOWN = (1.0 - POOR) * CHOICE * (1.0 - CHOICE)
KINDS = ("sandbox", "agent raises", "agent breaks", "agent says", "scorer", "transport", "recording")


def chosen(execution: str) -> bool:
    """The policy's choice in this execution, whichever attempt of it."""
    return random.Random(f"choice {execution.partition('.r')[0]}").random() < CHOICE


@dataclass
class Faults:
    """Which attempts fail, and how: `share` of them, independent of what the policy chose."""

    share: float
    always: frozenset[str] = frozenset()
    """Executions that fail at every attempt."""
    injected: Counter[str] = field(default_factory=Counter)

    def kind(self, recorded: str) -> str | None:
        draw = random.Random(f"fault {recorded}")
        if recorded.partition(".r")[0] in self.always or draw.random() < self.share:
            return draw.choice(KINDS)
        return None

    def at(self, recorded: str, kind: str) -> bool:
        found = self.kind(recorded) == kind
        self.injected[recorded] += found
        return found


class Played:
    """Agent, sandbox and scorer in one: the score is what the policy chose."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    async def create(self, name: str, files: Any) -> Any:
        if self.faults.at(name, "sandbox"):
            raise InfrastructureError("making a workspace", got="no room")
        return SimpleNamespace(name=name, close=self.close)

    async def close(self) -> None:
        """Nothing is held."""

    async def run(self, job: Any, workspace: Any, events: Any) -> ExecutionEnd:
        if self.faults.at(job.execution, "agent raises"):
            raise InfrastructureError("calling the model", got="HTTP 503")
        if self.faults.at(job.execution, "agent breaks"):
            raise ZeroDivisionError("a bug of ours")
        if self.faults.at(job.execution, "agent says"):
            return ExecutionEnd(ExecutionStatus.FAILED, "the container is gone")
        return ExecutionEnd(ExecutionStatus.COMPLETED, "done")

    async def score(self, job: Any, workspace: Any) -> Score:
        if self.faults.at(workspace.name, "scorer"):
            raise InfrastructureError("judging", got="the judge is away")
        return Score(1.0 if chosen(workspace.name) else POOR)


class Peers:
    """The processes of agents and proxy, in this one."""

    def __init__(self, host: AgentsHost, faults: Faults) -> None:
        self.host, self.faults = host, faults

    async def call(self, path: str, message: Any, kind: Any, timeout_s: float | None = 60.0) -> Any:
        match path:
            case "/open":
                return Opened("key", "http://127.0.0.1:1/v1")
            case "/close":
                if self.faults.at(message.execution, "recording"):
                    raise InfrastructureError("recording an execution's end", got="a broken connection")
                return Closed()
            case "/run":
                if self.faults.at(message.execution, "transport"):
                    raise CellLostError("asking the agents process", got="it is gone")
                return await self.host.run(message)
        raise AssertionError(path)

    @property
    def here(self) -> Peers:
        return self

    async def reach(self) -> Peers:
        return self

    async def ended(self, peer: Any) -> bool:
        return False


def tree(execution: str) -> dict[str, Any]:
    """A prompt of one token and the one sampled token."""
    on = np.array([False, True])
    return {
        "node_parent": np.array([-1], np.int32),
        "node_start": np.array([0, 2], np.int64),
        "token_ids": np.array([1, 2 + chosen(execution)], np.int32),
        "sampled": on,
        "logprobs": np.where(on, -0.5, np.nan).astype(np.float32),
        "versions": np.where(on, 0, -1).astype(np.int32),
    }


@dataclass
class Groups:
    """In place of the training: keeps what each group became, through the real making of groups."""

    rollout: Rollout
    config: Any
    post: Any
    built: dict[str, tuple[list[Member], BuiltGroup]] = field(default_factory=dict)
    applied: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def build_group(self, group: str, step: int, executions: tuple[str, ...], left_out: int) -> None:
        members = []
        for number in range(SIZE):
            item = self.rollout.finished[f"{group}.{number}"]
            score = math.nan if item.score is None else item.score
            members.append(Member(item.execution, item.end.status.value, score, tree(item.execution)))
        self.built[group] = members, build_group(group, step, members, self.config.loss, trainer_version=0)
        self.post(sched.GroupBatched(time.monotonic(), group, ()))
        if len(self.built) == GROUPS:
            self.over.set()

    def seal(self, step: int) -> None:
        """Steps are not taken here."""

    async def apply(self, step: int, groups: tuple[str, ...]) -> None:
        """Nor applied."""


@dataclass
class Result:
    """What a run with faults came to."""

    groups: dict[str, tuple[list[Member], BuiltGroup]]
    ended: list[ev.ExecutionEnded]
    faults: Faults


async def sample(folder: Path, faults: Faults, **rollout_options: Any) -> Result:
    config = small_config(folder, f"rollout.tasks_per_step={GROUPS}", "loss.estimator=leave_one_out", "loss.gate=off")
    config = replace(config, rollout=replace(config.rollout, group_size=SIZE, **rollout_options))
    played, probe = Played(faults), Probe()
    plugins: Any = SimpleNamespace(create=lambda *_: played)
    spec = ChildSpec("", "agents", 1, "", "token", str(folder))
    peers: Any = Peers(AgentsHost(spec, plugins, played, played, AgentsBody("played", "played")), faults)  # type: ignore[arg-type]
    bus = EventBus(folder / "events.jsonl", [probe])
    work: set[asyncio.Task[Any]] = set()

    def spawn(coroutine: Coroutine[Any, Any, Any]) -> None:
        work.add(asyncio.create_task(coroutine))

    rests = Rests(folder / "rests", "played")
    rollout = Rollout(
        config, peers, peers, rests, lambda event: runner.post_now(event), bus, on_over=lambda recorded: None
    )
    groups = Groups(rollout, config, rollout.post)
    driver = RunDriver(SimpleNamespace(), rollout, groups, bus, spawn)  # type: ignore[arg-type]
    runner = SchedulerRunner(make_scheduler(config, PluginManager.installed(), 0), driver)
    async with runner, asyncio.timeout(240):
        for number, role in enumerate((Role.TRAIN, Role.ROLLOUT)):
            now = time.monotonic()
            runner.post_now(sched.CellJoined(now, CellId(f"c{number}"), role, 64, 100_000, not number, 0))
        for number in range(GROUPS):
            name = f"g{number}"
            task = Task(f"t{number}", "choose", ScorerSpec("played"))
            rollout.plans[name] = GroupPlan(name, task, SIZE, Purpose.TRAIN, 1.0)
            runner.post_now(sched.GroupQueued(time.monotonic(), name, SIZE))
        await groups.over.wait()
        await rollout.stop()
    await asyncio.gather(*work)
    bus.close()
    return Result(groups.built, probe.of(ev.ExecutionEnded), faults)


def estimates(result: Result) -> np.ndarray:
    """One estimate of the gradient from each group: the mean of advantage times score function over its members."""
    found = []
    for members, built in result.groups.values():
        advantages = built.group.advantages
        slope = np.array([chosen(m.execution) - CHOICE for m in members])
        found.append(float((advantages.advantage * slope)[advantages.member].sum() / advantages.members))
    return np.array(found)


def check_no_zeros(result: Result) -> None:
    """A failed attempt has no score; a scored one has one of the policy's two."""
    assert all(e.score is None for e in result.ended if e.status == "failed")
    assert {e.score for e in result.ended if e.status != "failed"} == {POOR, 1.0}
    assert len(result.groups) == GROUPS


def check_unbiased(result: Result) -> None:
    found = estimates(result)
    error = found.std(ddof=1) / math.sqrt(len(found))
    assert abs(found.mean() - KNOWN) < 4 * error
    assert error < KNOWN / 10


async def test_with_retries_nothing_is_lost_and_nothing_moves(tmp_path):
    (tmp_path / "clean").mkdir()
    (tmp_path / "faulty").mkdir()
    clean = await sample(tmp_path / "clean", Faults(0.0))
    faulty = await sample(tmp_path / "faulty", Faults(SHARE), retries=6)
    failed = [e for e in faulty.ended if e.status == "failed"]
    attempts = GROUPS * SIZE + len(failed)
    assert abs(len(failed) / attempts - SHARE) < 4 * math.sqrt(SHARE * (1 - SHARE) / attempts)
    assert {faulty.faults.kind(e.execution) for e in failed} == set(KINDS)
    check_no_zeros(faulty)
    check_unbiased(clean)
    for name, (_, built) in clean.groups.items():
        other = faulty.groups[name][1]
        assert other.scores == built.scores
        np.testing.assert_array_equal(other.group.advantages.advantage, built.group.advantages.advantage)


async def test_without_retries_groups_go_on_with_those_that_ended(tmp_path):
    result = await sample(tmp_path, Faults(SHARE), retries=0)
    check_no_zeros(result)
    check_unbiased(result)
    smaller = 0
    for members, built in result.groups.values():
        advantages = built.group.advantages
        good = [m.status != "failed" for m in members]
        assert advantages.member.tolist() == good
        assert not advantages.advantage[~advantages.member].any()
        scores = np.array([m.score for m, is_good in zip(members, good, strict=True) if is_good])
        assert advantages.baseline == pytest.approx(scores.mean())
        others = [(scores.sum() - own) / (len(scores) - 1) for own in scores]  # leave one out, by hand
        np.testing.assert_allclose(advantages.advantage[advantages.member], scores - others, atol=1e-12)
        smaller += not all(good)
    assert smaller > GROUPS * 0.2


async def test_zeros_for_failures_would_show(tmp_path):
    """The same draws with failures scored as zeros: the estimate moves by its known bias, so the checks can fail."""
    result = await sample(tmp_path, Faults(0.2), retries=0)
    check_unbiased(result)
    wrong = []
    for members, _ in result.groups.values():
        scores = np.array([0.0 if math.isnan(m.score) else m.score for m in members])
        slopes = np.array([chosen(m.execution) - CHOICE for m in members])
        wrong.append(float(((scores - scores.mean()) * SIZE / (SIZE - 1) * slopes).mean()))
    error = np.std(wrong, ddof=1) / math.sqrt(len(wrong))
    assert np.mean(wrong) == pytest.approx(0.8 * KNOWN, abs=4 * error)
    assert abs(np.mean(wrong) - KNOWN) > 4 * error


async def test_an_execution_that_always_fails_is_left_out_and_its_group_stays(tmp_path):
    always = frozenset({"g3.0", "g3.5"})
    result = await sample(tmp_path, Faults(0.0, always))
    members, built = result.groups["g3"]
    assert [m.execution for m in members if m.status == "failed"] == sorted(always)
    assert built.group.advantages.members == SIZE - 2
    names = Counter(e.execution.partition(".r")[0] for e in result.ended if e.status == "failed")
    assert names == dict.fromkeys(always, 3)  # the first attempt and the two retries that are the default
    check_no_zeros(result)
