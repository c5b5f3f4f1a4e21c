"""The task sets whose tasks are folders: `folder` (the user's own) and the sample sets that come with this package.

Invariant: a task's split is what its folder says, so the splits are disjoint; the order is that of the names.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from gyre_core import ComponentContext, ConfigError, Task

from gyre_tasks.folders.loader import DESCRIPTION, TaskFolder, read_tasks
from gyre_tasks.folders.options import FolderOptions
from gyre_tasks.splits import known_split


def samples_folder() -> Path:
    """The tasks that come with this package: inside it when installed, beside its sources in the repository."""
    here = Path(__file__).resolve()
    inside = here.parents[1] / "samples"
    return inside if inside.is_dir() else here.parents[3] / "samples"


class FolderTaskSet:
    """Tasks of the folder that the option `path` names."""

    family = "folder"

    def __init__(self, options: FolderOptions | None, context: ComponentContext) -> None:
        self._options = options or FolderOptions()
        self._base = Path(context.base_dir)

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split`; see `gyre_core.TaskSet`."""
        known_split(self.family, split)
        folders = [each for each in self._chosen() if each.split == split]
        repeat = self._options.repeat if split == "train" else 1
        return [each.task(self.family, number) for number in range(repeat) for each in folders]

    def where(self, task: Task) -> str:
        """The file that describes a task of this set."""
        return str(self._root() / task.id.rpartition("/")[2] / DESCRIPTION)

    def _root(self) -> Path:
        if self._options.path is None:
            raise ConfigError(
                f"listing tasks of {self.family!r}",
                got="no path",
                expected="a folder of task folders",
                fix='Set it: [tasks] path = "…".',
            )
        return self._base / self._options.path

    def _chosen(self) -> list[TaskFolder]:
        root = self._root()
        found = {each.name: each for each in read_tasks(root)}
        for name in self._options.only:
            if name not in found:
                near = difflib.get_close_matches(name, found, 1)
                raise ConfigError(
                    f"choosing tasks of {root}",
                    got=f"only = {name!r}, which is not there",
                    expected=f"names such as {near[0] if near else next(iter(found))}",
                )
        return [each for name, each in found.items() if not self._options.only or name in self._options.only]


class _SampleTaskSet(FolderTaskSet):
    """As above, with tasks of its own when no path is given."""

    def _root(self) -> Path:
        return samples_folder() / self.family if self._options.path is None else super()._root()


class TerminalTaskSet(_SampleTaskSet):
    """Operate and repair a broken service; milestones are probes of it."""

    family = "terminal"


class MigrateTaskSet(_SampleTaskSet):
    """Port a small library from one stack to another; a hidden suite decides."""

    family = "migrate"


class TeamTaskSet(_SampleTaskSet):
    """Work that falls into parts: a lead agent hands them to sub-agents and merges."""

    family = "team"
