"""The task set `files`: instances of the family as Gyre tasks with hidden checks.

Invariant: what the scorer compares with is in `Task.scorer.options` alone; the prompt and the workspace of a
task hold none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from gyre_core import ComponentContext, ScorerSpec, Task

from gyre_tasks.files.generator import SPLITS, Instance, instances
from gyre_tasks.files.options import FilesOptions

PROMPT = "Find the brief in this folder and do its jobs in order."
SCORER = "files"


def task_of(instance: Instance, split: str, number: int) -> Task:
    """The task that an instance is: one milestone for each job, all of equal weight; space at line ends is ignored."""
    return Task(
        id=f"files/{split}/{number:05d}-{instance.fingerprint[:8]}",
        prompt=PROMPT,
        scorer=ScorerSpec(SCORER, {"milestones": [_check(instance, i) for i in range(len(instance.jobs))]}),
        files={path: content.encode() for path, content in instance.workspace.items()},
        metadata={
            "family": "files",
            "jobs": len(instance.jobs),
            "helper": any(job.helper for job in instance.jobs),
        },
    )


def _check(instance: Instance, number: int) -> dict[str, object]:
    job = instance.jobs[number]
    return {
        "name": job.target,
        "path": job.target,
        "content": instance.expected(job),
        "strip": True,
        "weight": 1.0,
    }


class FilesTaskSet:
    """The family behind the `TaskSet` protocol."""

    def __init__(self, options: FilesOptions, context: ComponentContext | None = None) -> None:
        self._options = options

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`; see `gyre_core.TaskSet`."""
        if split not in SPLITS:
            raise ValueError(f"listing tasks of 'files': split is {split!r}, expected one of {', '.join(SPLITS)}")
        count = self._options.heldout if split == "heldout" else self._options.train
        drawn = islice(instances(self._options, split), count)
        return [task_of(instance, split, number) for number, instance in enumerate(drawn)]
