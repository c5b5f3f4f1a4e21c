"""Options of the task sets whose tasks are folders."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Task sets `folder`, `terminal`, `migrate` and `team`."""

    path: str | None = None
    """Folder of task folders, relative to the run's configuration; None: the tasks that come with the task set."""
    only: tuple[str, ...] = ()
    """Names of tasks; empty: all."""
    repeat: int = 1
    """How often the train split is listed, under other ids: few tasks for many steps."""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise ValueError(f"options of a task set of folders: repeat is {self.repeat}, expected at least 1")
