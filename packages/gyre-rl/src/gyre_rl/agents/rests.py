"""Executions at rest: what an unfinished one needs to go on in another life of the run.

A rest is a snapshot of the workspace and the state that the harness told with it. Invariant: a record that is there
names a whole snapshot: it is written after that, and the snapshot before is deleted last. A record that cannot be read
is none: its execution begins again. Not here: which executions go on (`gyre_rl.run.resume`), and what the state means
(the harness).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
from gyre_core import Workspace

SUFFIX = ".rest.json"


@dataclass(frozen=True, slots=True)
class Rest:
    """`harness`: whose `state` it is; `snapshot`: a file name beside the record, as `Workspace.snapshot` wrote it."""

    execution: str
    harness: str
    number: int
    snapshot: str
    state: bytes


@dataclass(frozen=True, slots=True)
class Rests:
    """The rests in `folder`, at most one an execution, of executions that `harness` runs."""

    folder: Path
    harness: str

    async def keep(self, execution: str, workspace: Workspace, state: bytes) -> None:
        """Put the execution at rest as it stands; the workspace must be still. Raises what `snapshot` raises."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self.find(execution)
        number = before.number + 1 if before else 0
        rest = Rest(execution, self.harness, number, f"{_stem(execution)}.{number}.snapshot", state)
        await workspace.snapshot(str(self.folder / rest.snapshot))
        draft = self._draft(execution)
        with draft.open("wb") as file:
            file.write(msgspec.json.encode(rest))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._record(execution))
        if before is not None:
            (self.folder / before.snapshot).unlink(missing_ok=True)

    def find(self, execution: str) -> Rest | None:
        """The rest of this execution, if there is one that its harness can use."""
        try:
            rest = msgspec.json.decode(self._record(execution).read_bytes(), type=Rest)
        except (OSError, msgspec.MsgspecError):
            return None
        return rest if rest.harness == self.harness and Path(self.snapshot(rest)).is_file() else None

    def snapshot(self, rest: Rest) -> str:
        """Where `Sandbox.restore` finds its workspace."""
        return str(self.folder / rest.snapshot)

    def forget(self, execution: str) -> None:
        """It has ended: delete its record and every snapshot of it, finished or not. Raises nothing."""
        self._delete(
            self._record(execution), self._draft(execution), *self.folder.glob(f"{_stem(execution)}.[0-9]*.snapshot*")
        )

    def keep_only(self, executions: Collection[str]) -> None:
        """Delete what an earlier life left of all others."""
        stems = tuple(f"{_stem(execution)}." for execution in executions)
        with contextlib.suppress(OSError):
            self._delete(*(path for path in self.folder.iterdir() if not path.name.startswith(stems)))

    def _delete(self, *paths: Path) -> None:
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink()

    def _draft(self, execution: str) -> Path:
        return self._record(execution).with_suffix(".tmp")

    def _record(self, execution: str) -> Path:
        return self.folder / f"{_stem(execution)}{SUFFIX}"


def _stem(execution: str) -> str:
    return execution.replace("/", "_")
