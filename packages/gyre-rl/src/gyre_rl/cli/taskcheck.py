"""The tasks of a run before it starts: both splits are listed, and each task's scorer reads what the task asks of it.

Invariant: runs nothing of a task and fetches nothing; a scorer that is wrong for many tasks in the same way is told
once. Not here: whether a task can be solved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gyre_core.agents import Scorer
from gyre_core.errors import GyreError
from gyre_core.execution import Task, TaskSet
from gyre_core.plugins import PluginManager
from gyre_core.registration import ComponentContext, Kind

from gyre_rl.config import PluginChoice, Problem, RunConfig

MOST = 20
"""Tasks whose problems are told; of the others, how many there are."""


def task_problems(config: RunConfig, run_dir: Path, plugins: PluginManager | None = None) -> Iterator[Problem]:
    """What is wrong with the tasks that `config` chooses, with the file that describes the task where one does."""
    plugins = plugins or PluginManager.installed()
    context = ComponentContext(str(run_dir), "check", config.seed, base_dir=config.base_dir)
    try:
        taskset: TaskSet = plugins.create(Kind.TASKSET, config.tasks.name, config.tasks.options, context)
    except (GyreError, ValueError) as error:
        yield Problem("tasks", str(error))
        return
    readers = Readers(plugins, config.scorers, context)
    found: list[Problem] = []
    for key, split in (("rollout.split", config.rollout.split), ("eval.split", config.eval.split)):
        try:
            tasks = listed(taskset, split)
        except ValueError as error:
            yield Problem(key, str(error))
            continue
        except Exception as error:  # noqa: BLE001 - boundary: whatever a foreign task set raises is told
            yield Problem("tasks", _told(error))
            return
        if not tasks and key == "rollout.split" and not hasattr(taskset, "check"):
            yield Problem(key, f"got {split!r}, which has no tasks; expected a split with at least one to train on")
        found += readers.problems(taskset, tasks)
    yield from found[:MOST]
    if len(found) > MOST:
        yield Problem("tasks", f"{len(found) - MOST} more tasks have problems with their scorers")


def listed(taskset: TaskSet, split: str) -> Sequence[Task]:
    """The tasks of a split that can be known without fetching any."""
    ahead = getattr(taskset, "check", None)
    tasks: Sequence[Task] = taskset.tasks(split) if ahead is None else ahead(split)
    return tasks


class Readers:
    """Scorers, asked to read what tasks say and to judge nothing."""

    def __init__(self, plugins: PluginManager, chosen: Sequence[PluginChoice], context: ComponentContext) -> None:
        self._plugins, self._context = plugins, context
        self._options = {choice.name: choice.options for choice in chosen}
        self._made: dict[str, Scorer] = {}

    def problems(self, taskset: TaskSet, tasks: Sequence[Task]) -> Iterator[Problem]:
        """One for each task whose scorer is not there or does not take its options."""
        where, seen = getattr(taskset, "where", None), set()
        for task in tasks:
            if id(task.scorer) in seen:  # one task listed several times
                continue
            seen.add(id(task.scorer))
            try:
                self.read(task)
            except Exception as error:  # noqa: BLE001 - boundary: whatever a foreign scorer raises is told
                yield Problem("tasks", _told(error), "" if where is None else str(where(task)))

    def read(self, task: Task) -> None:
        """Raise what is wrong with a task's scorer."""
        check = getattr(self._scorer(task.scorer.name), "check", None)
        if check is not None:
            check(task)

    def _scorer(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._plugins.create(Kind.SCORER, name, self._options.get(name), self._context)
        return self._made[name]


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, GyreError) else f"{type(error).__name__}: {error}"
