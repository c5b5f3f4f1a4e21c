"""Task set and scorer `verifiers`: an environment's own tasks, and the rewards that its own functions gave.

Invariant: a task is its index in the environment, so all processes of a run must have the same version of it; a task is
held out by its content (the package's key). A reward comes from the harness's evidence, never from the agent's text.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gyre_core import (
    ComponentContext,
    ConfigError,
    InfrastructureError,
    Milestone,
    Score,
    ScorerSpec,
    ScoringJob,
    Task,
    Workspace,
)

from gyre_harnesses.options import VerifiersOptions, VerifiersScorerOptions
from gyre_harnesses.verifiers_env.process import ask, environment_config

SPLITS = ("train", "heldout")


class VerifiersTaskSet:
    """`Class(options, context)` as registrations require."""

    def __init__(self, options: VerifiersOptions | None, context: ComponentContext) -> None:
        self._options = options or VerifiersOptions()
        self._listed: list[dict[str, Any]] | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`; see `gyre_core.TaskSet`."""
        if split not in SPLITS:
            raise ValueError(f"listing tasks of 'verifiers': split is {split!r}, expected one of {', '.join(SPLITS)}")
        if not self._options.environment:
            raise ConfigError(
                "listing tasks of 'verifiers'",
                got="no environment",
                expected="the id of an environment that is installed",
                fix='Set it: [tasks] environment = "…".',
            )
        if self._listed is None:
            self._listed = self._list()
        return [self._task(each) for each in self._listed if self._split(each["key"]) == split]

    def _list(self) -> list[dict[str, Any]]:
        job = {"env": environment_config(self._options), "limit": self._options.most_tasks}
        # The caller may be inside an event loop, and this method is not a coroutine.
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(lambda: asyncio.run(ask(self._options, job, "none", 600.0))).result()
        found: list[dict[str, Any]] = answer["tasks"]
        return found

    def _split(self, key: str) -> str:
        number = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16)
        return SPLITS[number % self._options.heldout_one_in == 0]

    def _task(self, listed: Mapping[str, Any]) -> Task:
        index = listed["index"]
        return Task(
            id=f"verifiers/{self._options.environment}/{index:06d}",
            prompt=listed["prompt"],
            scorer=ScorerSpec("verifiers"),
            metadata={"family": "verifiers", "index": index, "name": listed["name"]},
        )


class VerifiersScorer:
    """The sum of the environment's weighted rewards over `best`, kept within 0 and 1; one milestone for each reward."""

    def __init__(self, options: VerifiersScorerOptions | None, context: ComponentContext) -> None:
        self._best = (options or VerifiersScorerOptions()).best

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """See `gyre_core.Scorer.score`; an execution without rewards that was not cut is a fault of ours."""
        rewards = job.end.evidence.get("rewards")
        partial = job.end.status.partial
        if not isinstance(rewards, Mapping) or (not rewards and not partial):
            raise InfrastructureError(
                f"judging {job.task.id!r}", got="no rewards", expected="an execution of the harness 'verifiers'"
            )
        total = sum(float(value) for value in rewards.values())
        milestones = tuple(
            Milestone(name, float(value) > 0.0, 1.0, f"{float(value):g}") for name, value in rewards.items()
        )
        value = min(1.0, max(0.0, total / self._best))
        return Score(value, milestones, not partial, job.end.reason if partial else "")
