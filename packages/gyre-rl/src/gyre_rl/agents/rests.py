"""Executions at rest: what an unfinished one needs to go on in another life of the run.

A rest is a snapshot of the workspace and the state that the harness told with it. Invariant: a record that is there
names a whole snapshot: it is written after that, and the snapshot before is deleted last. Not here: which executions go
on (`gyre_rl.run.resume`), and what the state means (the harness).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
from gyre_core import Workspace

SUFFIX = ".rest.json"


@dataclass(frozen=True, slots=True)
class Rest:
    """`snapshot`: a file name beside the record, as `Workspace.snapshot` wrote it; `state`: the harness's own."""

    execution: str
    number: int
    snapshot: str
    state: bytes


@dataclass(frozen=True, slots=True)
class Rests:
    """The rests in `folder`, at most one an execution."""

    folder: Path

    async def keep(self, execution: str, workspace: Workspace, state: bytes) -> None:
        """Put the execution at rest as it stands; the workspace must be still. Raises what `snapshot` raises."""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self.find(execution)
        number = before.number + 1 if before else 0
        rest = Rest(execution, number, f"{_stem(execution)}.{number}.snapshot", state)
        await workspace.snapshot(str(self.folder / rest.snapshot))
        draft = self._record(execution).with_suffix(".tmp")
        draft.write_bytes(msgspec.json.encode(rest))
        draft.replace(self._record(execution))
        if before is not None:
            (self.folder / before.snapshot).unlink(missing_ok=True)

    def find(self, execution: str) -> Rest | None:
        """The rest of this execution, if there is one."""
        try:
            return msgspec.json.decode(self._record(execution).read_bytes(), type=Rest)
        except FileNotFoundError:
            return None

    def snapshot(self, rest: Rest) -> str:
        """Where `Sandbox.restore` finds its workspace."""
        return str(self.folder / rest.snapshot)

    def forget(self, execution: str) -> None:
        """It has ended."""
        rest = self.find(execution)
        if rest is not None:
            self._record(execution).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (self.folder / rest.snapshot).unlink(missing_ok=True)

    def _record(self, execution: str) -> Path:
        return self.folder / f"{_stem(execution)}{SUFFIX}"


def _stem(execution: str) -> str:
    return execution.replace("/", "_")
