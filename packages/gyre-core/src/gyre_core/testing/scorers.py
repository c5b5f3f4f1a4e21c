"""Conformance suite for scorers: subclass `ScorerConformance` in a test file and give the fixture `case`.

    class TestMine(ScorerConformance):
        @pytest.fixture
        def case(self, tmp_path):
            return ScorerCase(lambda: MyScorer(MyOptions(), context), lambda: FolderSandbox(str(tmp_path)), options,
                              full={"out": b"1"}, half={"out": b"0"})

Invariant: the checks hold for any scorer, because the case brings a task's options and workspaces that earn all, a part
and nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from gyre_core.agents import ExecResult, Sandbox, Scorer, ScoringJob, Workspace
from gyre_core.errors import GyreError, InfrastructureError
from gyre_core.execution import ExecutionEnd, ExecutionStatus, Score, ScorerSpec, Task


@dataclass(frozen=True, slots=True)
class ScorerCase:
    """What the suite needs to know of a scorer."""

    make_scorer: Callable[[], Scorer]
    make_sandbox: Callable[[], Sandbox]
    options: Mapping[str, Any]
    """Of a task's `ScorerSpec`."""
    full: Mapping[str, bytes]
    """A workspace that earns everything."""
    half: Mapping[str, bytes]
    """A workspace that earns a part."""

    async def score(
        self,
        files: Mapping[str, bytes],
        status: ExecutionStatus = ExecutionStatus.COMPLETED,
        options: Mapping[str, Any] | None = None,
        change: Callable[[Workspace], Workspace] = lambda workspace: workspace,
    ) -> Score:
        """Score a workspace with these files."""
        sandbox = self.make_sandbox()
        try:
            workspace = change(await sandbox.create("conformance", files))
            spec = ScorerSpec("scorer-under-test", self.options if options is None else options)
            job = ScoringJob(Task("t", "p", spec), ExecutionEnd(status, "a limit"))
            return await self.make_scorer().score(job, workspace)
        finally:
            await sandbox.close()


class _BrokenWorkspace:
    """A workspace whose sandbox is gone."""

    path = None

    async def run(self, request: object) -> ExecResult:
        raise InfrastructureError("running a command in a workspace that is gone")

    async def read(self, path: str, *, limit: int = 0) -> bytes:
        raise InfrastructureError("reading from a workspace that is gone")

    write = read
    list = read
    snapshot = read

    async def close(self) -> None:
        return None


class ScorerConformance:
    """What every scorer must do."""

    @pytest.fixture
    def case(self) -> ScorerCase:
        """Give it in the subclass."""
        raise NotImplementedError("give the fixture case")

    def test_all_part_and_nothing(self, case: ScorerCase) -> None:
        """1, strictly between, and 0; the same again when scored again."""
        assert asyncio.run(case.score(case.full)).value == 1.0
        half = asyncio.run(case.score(case.half))
        assert 0.0 < half.value < 1.0
        assert asyncio.run(case.score({})).value == 0.0
        assert asyncio.run(case.score(case.half)).value == half.value

    def test_milestones_explain_the_value(self, case: ScorerCase) -> None:
        """Their weights are not negative, their share is the value, and what did not pass says why."""
        for files in (case.full, case.half, {}):
            score = asyncio.run(case.score(files))
            assert score.milestones
            assert all(m.weight >= 0 for m in score.milestones)
            total = sum(m.weight for m in score.milestones)
            won = sum(m.weight for m in score.milestones if m.passed)
            assert score.value == pytest.approx(won / total)
            assert all(m.evidence for m in score.milestones if not m.passed)

    def test_a_cut_execution_keeps_what_it_earned(self, case: ScorerCase) -> None:
        """The same value, marked as partial credit."""
        for status in (ExecutionStatus.TIMEOUT, ExecutionStatus.TRUNCATED):
            score = asyncio.run(case.score(case.half, status))
            assert score.value == asyncio.run(case.score(case.half)).value
            assert not score.complete
            assert score.why

    def test_a_broken_sandbox_is_no_zero(self, case: ScorerCase) -> None:
        """Judging that fails is raised."""
        with pytest.raises(InfrastructureError):
            asyncio.run(case.score(case.full, change=lambda _: _BrokenWorkspace()))  # type: ignore[arg-type, return-value]

    def test_wrong_options_are_an_error(self, case: ScorerCase) -> None:
        """That names the task."""
        with pytest.raises(GyreError, match="'t'"):
            asyncio.run(case.score(case.full, options={**case.options, "no such key": 1}))
