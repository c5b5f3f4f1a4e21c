"""Launchers and event sinks: where processes run and where events go.

Invariants: a process a launcher started does not outlive its handle's owner; a sink never slows or stops the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start. `accelerators` says how many devices it owns (0: CPU only); `cell` which cell of the run it
    hosts, from 0, the same in each of its lives (None: a process that belongs beside the run itself)."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: str = ""
    accelerators: int = 0
    cell: int | None = None


class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int | None:
        """Process id on its host; None when the launcher has none."""

    async def wait(self) -> int:
        """Exit status; negative for a signal. Many may wait."""

    async def terminate(self, grace_s: float = 5.0) -> int:
        """Ask it to end, then kill it with all its children; returns the exit status."""


class Launcher(Protocol):
    """Starts the processes of a run on a machine or a cluster."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Start it; InfrastructureError with the reason if it cannot be started."""

    async def probe(self, cells: int, run_dir: str) -> Sequence[str]:
        """What keeps it from starting so many cells of a run whose directory is `run_dir`; nothing is left behind. May
        be left out; asked before a run."""

    async def close(self) -> None:
        """End everything this launcher started."""


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Something that happened in a run: `data` is JSON-able."""

    time: float
    """Seconds since the epoch."""
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class EventSink(Protocol):
    """Receives every event of a run."""

    def emit(self, event: RunEvent) -> None:
        """Take it; must not block or raise."""

    def close(self) -> None:
        """Flush."""
