"""Fixtures of the scorer tests: a workspace that is a plain folder, and jobs."""

from __future__ import annotations

import sys

import pytest
from gyre_core import ComponentContext, ExecutionEnd, ExecutionStatus, ScorerSpec, ScoringJob, Task
from gyre_core.testing.folder import FolderWorkspace
from gyre_scorers.hidden.scorer import PytestScorer
from gyre_scorers.options import PytestOptions


@pytest.fixture
def workspace(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return FolderWorkspace(str(folder))


@pytest.fixture
def context(tmp_path):
    return ComponentContext(str(tmp_path), "test")


@pytest.fixture
def job():
    def make(options, status=ExecutionStatus.COMPLETED, name="x"):
        return ScoringJob(Task("t", "p", ScorerSpec(name, options)), ExecutionEnd(status, "the reason"))

    return make


@pytest.fixture
def score(request, workspace, context, job):
    """The scorer `pytest`'s score of a workspace with these files, by the module's SUITE if no other is given."""

    async def run(files, options=None):
        for path, text in files.items():
            await workspace.write(path, text.encode())
        scorer = PytestScorer(PytestOptions(python=sys.executable), context)
        return await scorer.score(job(options or request.module.SUITE), workspace)

    return run
