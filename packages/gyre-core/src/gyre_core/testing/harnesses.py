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
from pathlib import Path

import pytest

from gyre_core.agents import ExecutionJob, Harness, Sandbox, Workspace
from gyre_core.errors import InfrastructureError
from gyre_core.execution import ExecutionEnd, ExecutionStatus, Limits, ScorerSpec, Task
from gyre_core.testing.endpoint import Refuse, Say, Script, ScriptedEndpoint, SeenRequest

NAME = "idempotency-key"
"""Header by which an endpoint tells a call again that it has answered before."""
LIMITS = Limits(max_turns=8, wall_s=120.0, tool_s=60.0)


@dataclass(frozen=True, slots=True)
class Rest:
    """From where an execution could go on, after `turns` turns."""

    state: bytes
    snapshot: str
    turns: int


@dataclass
class RecordedEvents:
    """A `HarnessEvents` that keeps what it was told, and with a `workspace` its rests as snapshots under `folder`."""

    workspace: Workspace | None = None
    folder: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)

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

    async def resting(self, state: Callable[[], bytes]) -> None:
        """The execution could go on from here."""
        if self.workspace is None:
            return
        snapshot = f"{self.folder}/{len(self.rests)}.snapshot"
        await self.workspace.snapshot(snapshot)
        self.rests.append(Rest(state(), snapshot, sum(kind == "turn" for kind, _ in self.seen)))


@dataclass(frozen=True, slots=True)
class HarnessRig:
    """What the suite needs to know of a harness."""

    make_harness: Callable[[], Harness]
    make_sandbox: Callable[[], Sandbox]
    works: Sequence[Say]
    """Answers that make the agent create the file `out` and then end by itself. The one before last may not end it."""
    counts_turns: bool = True
    """Whether it sees each model call, so that `max_turns` and `ExecutionEnd.turns` are its own to keep."""

    async def run(
        self, answers: Sequence[Say | Refuse], limits: Limits = LIMITS, *, rests_in: str = "", rest: Rest | None = None
    ) -> Ran:
        """One execution against an endpoint that gives `answers`, the last one again and again. With `rests_in` its
        rests are kept in that folder; with `rest` it goes on from there."""
        harness, sandbox = self.make_harness(), self.make_sandbox()
        try:
            if rest is None:
                workspace = await sandbox.create("conformance", {"in.txt": b"1\n"})
            else:
                workspace = await sandbox.restore("conformance", rest.snapshot)
            events = RecordedEvents(workspace, rests_in) if rests_in else RecordedEvents()
            async with ScriptedEndpoint(_sequence(answers), before=rest.turns if rest else 0) as endpoint:
                task = Task("t", "Create the file out.", ScorerSpec("files"))
                state = b"" if rest is None else rest.state
                job = ExecutionJob("execution-1", task, endpoint.address, limits, state=state)
                end = await harness.run(job, workspace, events)
                files = tuple(await workspace.list())
                return Ran(end, files, tuple(endpoint.requests), tuple(events.seen), tuple(events.rests))
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
    rests: tuple[Rest, ...] = ()


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

    def test_an_execution_goes_on_from_where_it_rested(self, rig: HarnessRig, tmp_path: Path) -> None:
        """From each of its rests: the calls that are left are the same, and so is the end. Skips where it has none."""
        whole = asyncio.run(rig.run(rig.works, rests_in=str(tmp_path)))
        if not whole.rests:
            pytest.skip("this harness cannot go on: it never told that it rests")
        for rest in whole.rests:
            again = asyncio.run(rig.run(rig.works[rest.turns :], rest=rest))
            left = whole.requests[rest.turns :]
            assert [r.body for r in again.requests] == [r.body for r in left]
            assert [r.headers.get(NAME) for r in again.requests] == [r.headers.get(NAME) for r in left]
            assert (again.end.status, again.end.turns) == (whole.end.status, whole.end.turns)
            assert again.files == whole.files

    def test_limits_are_statuses(self, rig: HarnessRig) -> None:
        """Of turns and of time: timeout, and what was done stands in the workspace."""
        endless = [*rig.works[:-1], rig.works[0]]
        if rig.counts_turns:
            ran = asyncio.run(rig.run(endless, dataclasses.replace(LIMITS, max_turns=3)))
            assert (ran.end.status, ran.end.turns, len(ran.requests)) == (ExecutionStatus.TIMEOUT, 3, 3)
            assert "out" in ran.files
        slow = [*rig.works[:-1], Say("late", delay_s=600.0)]
        ran = asyncio.run(rig.run(slow, dataclasses.replace(LIMITS, wall_s=12.0)))
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
