"""Harnesses, sandboxes and scorers: the side where the agent works and is judged.

Invariants: an agent reaches models through its `ModelEndpoint` only; a sandbox outlives every model call of
its execution and its scoring; a scorer reads evidence in the workspace and never what the agent claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gyre_core.execution import ExecutionEnd, Limits, Purpose, Score, Task


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """Where the agent's model is: an OpenAI-compatible base URL (ends in /v1) and the execution's own key.

    Sessions: a sub-agent or another conversation of the same execution sends the header named by
    `session_header` with a name of its choice ("main" when absent), its parent's in `parent_header`.
    """

    base_url: str
    api_key: str
    model: str
    session_header: str = "x-gyre-session"
    parent_header: str = "x-gyre-parent"


@dataclass(frozen=True, slots=True)
class ExecutionJob:
    """One attempt at a task, handed to a harness."""

    execution: str
    task: Task
    endpoint: ModelEndpoint
    limits: Limits
    purpose: Purpose = Purpose.TRAIN
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    state: bytes = b""
    """What its harness told `HarnessEvents.resting` last, when the execution goes on in another life of the run; its
    workspace is then as it was at that moment. Empty for an execution that begins."""


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """A command to run in a sandbox. `argv` is never passed through a shell."""

    argv: Sequence[str]
    timeout_s: float
    output_bytes: int
    """Of stdout plus stderr that is kept; the rest is dropped, and counted in `dropped_bytes`."""
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    cwd: str = "."
    """Relative to the workspace."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a command did. `exit_code` is None when it was killed at a limit (`limit` says which)."""

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    limit: str | None = None
    dropped_bytes: int = 0


class Workspace(Protocol):
    """An execution's folder and processes, isolated from other executions and the host."""

    @property
    def path(self) -> str | None:
        """Its folder on this host; None when it is elsewhere."""

    async def run(self, request: ExecRequest) -> ExecResult:
        """Run a command to its end or limit; no process of it outlives the call. InfrastructureError if *we* fail."""

    async def read(self, path: str, *, limit: int = 1 << 20) -> bytes:
        """At most `limit` bytes of a regular file inside.

        Raises FileNotFoundError, and PermissionError for paths that lead out.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a file inside, with its parents; PermissionError for paths that lead out."""

    async def list(self, path: str = ".") -> Sequence[str]:
        """Relative paths of all regular files below `path`, sorted; links are not followed."""

    async def snapshot(self, location: str) -> None:
        """Put a copy of the folder at rest at `location` (a file that `Sandbox.restore` reads), atomically."""

    async def close(self) -> None:
        """End every process and delete the folder. Idempotent."""


class Sandbox(Protocol):
    """Makes workspaces."""

    async def create(self, name: str, files: Mapping[str, bytes]) -> Workspace:
        """A fresh workspace with these files."""

    async def restore(self, name: str, location: str) -> Workspace:
        """A workspace as `Workspace.snapshot` left it."""

    async def close(self) -> None:
        """End all workspaces."""


class HarnessEvents(Protocol):
    """What a harness tells while it runs; no call raises, and all but `resting` return at once."""

    def turn(self, session: str, number: int) -> None:
        """A model call was answered."""

    def tool_started(self, session: str, name: str) -> None:
        """The session waits for a tool: a good moment to move its KV."""

    def tool_ended(self, session: str, name: str, seconds: float) -> None:
        """The next model call of the session is near."""

    def compacted(self, session: str) -> None:
        """The harness rewrote the session's history."""

    async def resting(self, state: Callable[[], bytes]) -> None:
        """The execution could go on from here: nothing of it runs, and what `state` gives (it comes back as
        `ExecutionJob.state`) with the workspace as it stands is all that the harness needs. It is asked only when it is
        kept, which may take as long as a snapshot. A harness that cannot go on never tells this; its executions are
        begun again."""


class Harness(Protocol):
    """Runs an agent. Stateless between executions; many run concurrently in one event loop."""

    async def run(self, job: ExecutionJob, workspace: Workspace, events: HarnessEvents) -> ExecutionEnd:
        """Run to an end. Agent mistakes and limits are statuses; only InfrastructureError is raised.

        When cancelled, it stops within a second and leaves the workspace as it stands.
        """


@dataclass(frozen=True, slots=True)
class ScoringJob:
    """What a scorer gets: the task, how its execution ended, and the workspace as it stands."""

    task: Task
    end: ExecutionEnd


class Scorer(Protocol):
    """Judges a workspace.

    A scorer may also have `check(task: Task) -> None`: read what the task's options say and raise ConfigError, naming
    the task, as `score` would. It is asked before a run starts, so it runs nothing and reaches nobody.
    """

    async def score(self, job: ScoringJob, workspace: Workspace) -> Score:
        """Partial credit per milestone. Raises InfrastructureError when judging itself failed: that is no zero."""
