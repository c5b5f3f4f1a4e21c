"""Fixtures of the scorer tests: a workspace that is a plain folder, and jobs."""

from __future__ import annotations

import pytest
from gyre_core import ComponentContext, ExecutionEnd, ExecutionStatus, ScorerSpec, ScoringJob, Task
from gyre_core.testing.folder import FolderWorkspace


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
