"""Options of the `files` task set: how many tasks, how long, and how often a sub-agent is asked for."""

from __future__ import annotations

from dataclasses import dataclass

MOST_JOBS = 6
"""Each job of a task asks for another operation, and there are so many."""


@dataclass(frozen=True, slots=True)
class FilesOptions:
    """How the family is drawn. The same options give the same tasks on every machine."""

    seed: int = 0
    """Of the generator; other seeds give other tasks, and a task's split does not depend on the seed."""
    train: int = 1024
    """Tasks of the split "train"."""
    heldout: int = 64
    """Tasks of the split "heldout"."""
    min_jobs: int = 2
    """Fewest result files of a task."""
    max_jobs: int = 3
    """Most result files of a task. Each costs the agent one turn, besides two to look around and one to end."""
    helper_share: float = 0.2
    """Share of the tasks in which the brief asks for a helper (a sub-agent) for one job."""
    spare_files: int = 1
    """Data files that no job needs."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_jobs <= self.max_jobs <= MOST_JOBS:
            raise ValueError(
                f"options of the task set 'files': min_jobs {self.min_jobs}, max_jobs {self.max_jobs}; "
                f"expected 1 <= min_jobs <= max_jobs <= {MOST_JOBS}"
            )
        if not 0.0 <= self.helper_share <= 1.0:
            raise ValueError(
                f"options of the task set 'files': helper_share is {self.helper_share}, expected a share in [0, 1]"
            )
        for name, value in (("train", self.train), ("heldout", self.heldout), ("spare_files", self.spare_files)):
            if not 0 <= value <= (8 if name == "spare_files" else 1_000_000):
                raise ValueError(f"options of the task set 'files': {name} is {value}, out of range")
