"""A run is a directory: where each thing of it lies, and that one process at a time works in it.

Invariant: paths are derived here and nowhere else; a directory is locked while a run works in it. Holds no contents.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gyre_core import InfrastructureError


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The layout of `root`."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved configuration (TOML)."""
        return self.root / "config.toml"

    @property
    def events(self) -> Path:
        """Event log, JSON lines, append-only."""
        return self.root / "events.jsonl"

    @property
    def scheduler_log(self) -> Path:
        """The scheduler's write-ahead log of this life of the run; earlier lives have numbers."""
        return self.root / "scheduler.jsonl"

    @property
    def store(self) -> Path:
        """Trajectory store (SQLite)."""
        return self.root / "trajectories.db"

    @property
    def weights(self) -> Path:
        """Published policy versions, v<N> each."""
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        """The core's state after a step, v<N> each."""
        return self.root / "checkpoints"

    @property
    def rests(self) -> Path:
        """Unfinished executions at rest: workspaces and their harness's state."""
        return self.root / "rests"

    @property
    def report(self) -> Path:
        """HTML report."""
        return self.root / "report.html"

    @property
    def summary(self) -> Path:
        """What `gyre run --json` prints."""
        return self.root / "summary.json"

    def contributions(self, step: int) -> Path:
        """Gradients at rest, until their step is applied."""
        return self.root / "contributions" / f"{step:06d}"

    def checkpoint(self, version: int) -> Path:
        """The checkpoint that holds `version`."""
        return self.checkpoints / f"v{version:06d}"

    def versions_saved(self) -> list[int]:
        """Versions of whole checkpoints, ascending."""
        if not self.checkpoints.is_dir():
            return []
        names = (path.name for path in self.checkpoints.iterdir() if path.is_dir())
        return sorted(int(name[1:]) for name in names if name.startswith("v") and name[1:].isdigit())

    def lock(self) -> IO[bytes]:
        """Lock the directory until the returned file is closed; raises InfrastructureError if another run has it."""
        self.root.mkdir(parents=True, exist_ok=True)
        held = (self.root / "lock").open("ab")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            held.close()
            raise InfrastructureError(
                f"opening the run directory {self.root}",
                got="a directory in which another run is working",
                expected="one that is free",
                fix="Wait for that run, stop it, or choose another directory with `--set dir=...`.",
            ) from error
        held.truncate(0)
        held.write(f"{os.getpid()}\n".encode())
        held.flush()
        return held


def create(path: Path) -> RunDirectory:
    """A new run directory at `path`, or at `path`-2, -3, … when that is taken."""
    candidate, number = path, 1
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    candidate.mkdir(parents=True, exist_ok=True)
    return RunDirectory(candidate.absolute())
