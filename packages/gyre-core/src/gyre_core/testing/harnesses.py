"""Conformance suite for harnesses: subclass `HarnessConformance` in a test file and give the fixture `rig`.

    class TestMine(HarnessConformance):
        @pytest.fixture
        def rig(self, tmp_path):
            return HarnessRig(lambda: MyHarness(MyOptions(), context), lambda: FolderSandbox(str(tmp_path)),
                              works=[Say(calls=[Call("bash", {"command": "echo 1 > out"})]), Say("done")])

Invariant: the checks hold for any agent, because the rig brings the answers that make this agent work, end and loop.
They ask for what the ring relies on: statuses from evidence, limits, our faults told as ours, prompt cancellation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from gyre_core.agents import ExecutionJob, Harness, Sandbox
from gyre_core.errors import InfrastructureError
from gyre_core.execution import ExecutionEnd, ExecutionStatus, Limits, ScorerSpec, Task
from gyre_core.testing.endpoint import Refuse, Say, Script, ScriptedEndpoint, SeenRequest

LIMITS = Limits(max_turns=8, wall_s=120.0, tool_s=60.0)


@dataclass
class RecordedEvents:
    """A `HarnessEvents` that keeps what it was told."""

    seen: list[tuple[str, str]] = field(default_factory=list)

    def turn(self, session: str, number: int) -> None:
        """A model call was answered."""
        self.seen.append(("turn", session))

    def tool_started(self, session: str, name: str) -> None:
        """A tool runs."""
        self.seen.append(("tool_started", session))

    def tool_ended(self, session: str, name: str, seconds: float) -> None:
        """A tool ended."""
        self.seen.append(("tool_ended", session))

    def compacted(self, session: str) -> None:
        """A history was rewritten."""
        self.seen.append(("compacted", session))


@dataclass(frozen=True, slots=True)
class HarnessRig:
    """What the suite needs to know of a harness."""

    make_harness: Callable[[], Harness]
    make_sandbox: Callable[[], Sandbox]
    works: Sequence[Say]
    """Answers that make the agent create the file `out` and then end by itself. The one before last may not end it."""
    counts_turns: bool = True
    """Whether it sees each model call, so that `max_turns` and `ExecutionEnd.turns` are its own to keep."""

    async def run(self, answers: Sequence[Say | Refuse], limits: Limits = LIMITS) -> Ran:
        """One execution against an endpoint that gives `answers`, the last one again and again."""
        harness, sandbox, events = self.make_harness(), self.make_sandbox(), RecordedEvents()
        try:
            workspace = await sandbox.create("conformance", {"in.txt": b"1\n"})
            async with ScriptedEndpoint(_sequence(answers)) as endpoint:
                task = Task("t", "Create the file out.", ScorerSpec("files"))
                job = ExecutionJob("execution-1", task, endpoint.address, limits)
                end = await harness.run(job, workspace, events)
                return Ran(end, tuple(await workspace.list()), tuple(endpoint.requests), tuple(events.seen))
        finally:
            close = getattr(harness, "aclose", None)
            if close is not None:
                await close()
            await sandbox.close()


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of an execution."""

    end: ExecutionEnd
    files: tuple[str, ...]
    requests: tuple[SeenRequest, ...]
    events: tuple[tuple[str, str], ...]


def _sequence(answers: Sequence[Say | Refuse]) -> Script:
    left = list(answers)

    def answer(_: SeenRequest) -> Say | Refuse:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


class HarnessConformance:
    """What every harness must do."""

    @pytest.fixture
    def rig(self) -> HarnessRig:
        """Give it in the subclass."""
        raise NotImplementedError("give the fixture rig")

    def test_an_agent_that_ends_by_itself_completed(self, rig: HarnessRig) -> None:
        """Its work is in the workspace; every call went to the endpoint with the execution's key and model."""
        ran = asyncio.run(rig.run(rig.works))
        assert ran.end.status is ExecutionStatus.COMPLETED, ran.end
        assert "out" in ran.files
        assert {r.headers.get("authorization") for r in ran.requests} == {"Bearer key-of-the-execution"}
        assert {r.body["model"] for r in ran.requests} == {"scripted"}
        assert "Create the file out." in str(ran.requests[0].body["messages"])
        if rig.counts_turns:
            assert ran.end.turns == len(ran.requests) == sum(kind == "turn" for kind, _ in ran.events)

    def test_history_grows_at_its_end(self, rig: HarnessRig) -> None:
        """Without compaction each call's messages begin with those of the call before: nothing is rewritten."""
        ran = asyncio.run(rig.run(rig.works))
        for before, after in itertools.pairwise(ran.requests):
            old, new = before.body["messages"], after.body["messages"]
            assert new[: len(old)] == old

    def test_limits_are_statuses(self, rig: HarnessRig) -> None:
        """Of turns and of time: timeout, and what was done stands in the workspace."""
        endless = [*rig.works[:-1], rig.works[0]]
        if rig.counts_turns:
            ran = asyncio.run(rig.run(endless, dataclasses.replace(LIMITS, max_turns=3)))
            assert (ran.end.status, ran.end.turns, len(ran.requests)) == (ExecutionStatus.TIMEOUT, 3, 3)
            assert "out" in ran.files
        slow = [*rig.works[:-1], Say("late", delay_s=600.0)]
        ran = asyncio.run(rig.run(slow, dataclasses.replace(LIMITS, wall_s=5.0)))
        assert ran.end.status is ExecutionStatus.TIMEOUT
        assert "out" in ran.files

    def test_a_full_context_truncates(self, rig: HarnessRig) -> None:
        """The endpoint's refusal of a prompt that is too long is the agent's limit, not our fault."""
        full = Refuse(400, '{"error": {"message": "maximum context length", "code": "context_length_exceeded"}}')
        ran = asyncio.run(rig.run([*rig.works[:-1], full]))
        assert ran.end.status is ExecutionStatus.TRUNCATED
        assert "out" in ran.files

    def test_a_broken_endpoint_is_our_fault(self, rig: HarnessRig) -> None:
        """It is raised, so that it never becomes a score."""
        with pytest.raises(InfrastructureError):
            asyncio.run(rig.run([Refuse(401)]))

    def test_cancelling_leaves_promptly(self, rig: HarnessRig) -> None:
        """A cut execution stops while the model is thinking."""

        async def check() -> None:
            task = asyncio.ensure_future(rig.run([Say("late", delay_s=600.0)]))
            await asyncio.sleep(1.0)
            task.cancel()
            done, _ = await asyncio.wait({task}, timeout=30.0)
            assert done
            assert task.cancelled()

        asyncio.run(check())

    def test_executions_run_side_by_side(self, rig: HarnessRig) -> None:
        """Many at once in one event loop, each with its own outcome."""

        async def check() -> list[Ran]:
            return await asyncio.gather(*(rig.run(rig.works) for _ in range(4)))

        assert all("out" in ran.files for ran in asyncio.run(check()))
