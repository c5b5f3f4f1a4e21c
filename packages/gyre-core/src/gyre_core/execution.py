"""Tasks, executions and how an execution can end (docs/glossary.md).

Invariant: every execution ends with exactly one `ExecutionStatus`, given from evidence; only `FAILED` is our
fault, is retried and enters no baseline. This module has no behaviour beyond those rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class ExecutionStatus(StrEnum):
    """How an execution ended, and so what the loss may do with it."""

    COMPLETED = "completed"
    """The agent said it was done. Trains."""
    TIMEOUT = "timeout"
    """Cut by a limit of time or turns, or when its step closed. Scored partially, trains."""
    TRUNCATED = "truncated"
    """Ran into the context or token limit. Scored partially, trains, marked."""
    FAILED = "failed"
    """Ours: sandbox, engine, network. Retried, in no baseline, never a zero."""
    STALE = "stale"
    """Too many policy versions old. Dropped and counted."""

    @property
    def trains(self) -> bool:
        """Whether its sampled tokens may carry loss."""
        return self in (ExecutionStatus.COMPLETED, ExecutionStatus.TIMEOUT, ExecutionStatus.TRUNCATED)

    @property
    def partial(self) -> bool:
        """Whether its score is credit for unfinished work."""
        return self in (ExecutionStatus.TIMEOUT, ExecutionStatus.TRUNCATED)


class Purpose(StrEnum):
    """What an execution is run for."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Limits:
    """Where an execution is cut. `None` means no limit of that kind."""

    max_turns: int | None = 32
    """Model calls of the main session."""
    max_context_tokens: int | None = None
    """Longest prompt plus answer of one call, tokens."""
    max_sampled_tokens: int | None = None
    """Sampled tokens over all sessions of the execution."""
    max_call_tokens: int = 1024
    """`max_tokens` of one call."""
    wall_s: float | None = 600.0
    """Seconds from the first call to the last."""
    tool_s: float = 30.0
    """Seconds that one tool call may take."""
    tool_output_bytes: int = 16_384
    """Bytes of a tool's output that reach the model."""


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """Which scorer judges a task and with what; `options` is hidden from the agent."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """A problem. `files` is the workspace at its start: relative POSIX path -> content."""

    id: str
    prompt: str
    scorer: ScorerSpec
    files: Mapping[str, bytes] = field(default_factory=dict)
    system: str | None = None
    """System message, when the task wants another than the recipe's."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    executable: Sequence[str] = ()
    """Those of `files` that can be executed."""


class TaskSet(Protocol):
    """A source of tasks, the same for the same options and split on every machine.

    It may also have `check(split: str) -> Sequence[Task]`: as `tasks`, without what must be fetched first; and
    `where(task: Task) -> str`: the file that describes a task. Both are asked before a run starts.
    """

    def tasks(self, split: str) -> Sequence[Task]:
        """All tasks of `split` ("train", "heldout", …), in a fixed order; splits are disjoint.

        Raises ValueError naming the splits it has when `split` is unknown.
        """


@dataclass(frozen=True, slots=True)
class ExecutionEnd:
    """How one execution ended: the status, one attributed cause, and the evidence for it."""

    status: ExecutionStatus
    reason: str
    turns: int = 0
    """Model calls made by the main session."""
    tool_calls: int = 0
    sub_agents: int = 0
    compactions: int = 0
    evidence: Mapping[str, Any] = field(default_factory=dict)
    answered_calls: int | None = None
    """Model calls of all sessions that the agent got an answer to; None where the harness cannot tell."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """One verifiable part of a task's result."""

    name: str
    passed: bool
    weight: float = 1.0
    """Share of the score before normalisation; non-negative."""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """What a workspace earned. `value` lies in [0, 1]."""

    value: float
    milestones: tuple[Milestone, ...] = ()
    complete: bool = True
    """False when the execution was cut and this is partial credit."""
    why: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"making a score: value is {self.value!r}, expected a number in [0, 1]")

    @classmethod
    def of_milestones(cls, milestones: Sequence[Milestone], *, complete: bool = True, why: str = "") -> Score:
        """Weighted share of the milestones that passed; 0.0 when there are none."""
        total = sum(m.weight for m in milestones)
        won = sum(m.weight for m in milestones if m.passed)
        return cls(won / total if total > 0 else 0.0, tuple(milestones), complete, why)
