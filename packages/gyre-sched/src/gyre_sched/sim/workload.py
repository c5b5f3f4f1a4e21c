"""What is to be done: groups of executions, each a chain of model calls and tool pauses.

Everything about a group follows from the workload's seed and the group's number, so all policies get the
same work. A ``turn`` may stand for several real ones (``fold``): the tokens and pauses of a folded turn are
the sums.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ExecutionPlan", "Shape", "TraceWorkload", "Turn", "Workload", "batches_of"]


def batches_of(tokens: int, limit: int) -> list[int]:
    """Token counts of the micro-batches that a tree of ``tokens`` is cut into."""
    count = max(1, -(-tokens // limit)) if limit else 1
    return [tokens // count + (1 if i < tokens % count else 0) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: ``fed`` new context tokens, ``sampled`` output tokens, then ``pause_s`` in a tool."""

    fed: int
    sampled: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """An execution: its turns, and the tokens its tree costs to train (shared prefixes once)."""

    turns: tuple[Turn, ...]
    train_tokens: int

    @property
    def tokens(self) -> int:
        """Context length at the end."""
        return sum(t.fed + t.sampled for t in self.turns)


class Workload(Protocol):
    """Steps of groups of executions. ``batch_tokens``: a tree larger than this is trained as several micro-batches
    (its branches are), 0 for one per execution.
    """

    @property
    def steps(self) -> int:
        """Optimizer steps."""

    @property
    def groups_per_step(self) -> int:
        """Groups that a step trains."""

    @property
    def group_size(self) -> int:
        """Executions of a group."""

    @property
    def max_staleness(self) -> int:
        """How old sampled tokens may be when they train, in versions."""

    @property
    def batch_tokens(self) -> int:
        """Largest micro-batch; 0: one per execution."""

    def group(self, number: int) -> Sequence[ExecutionPlan]:
        """The executions of group ``number`` (counted from 0 over the whole run)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A synthetic workload with log-normal lengths and pauses.

    ``turns``: mean number of (folded) turns; ``turns_sigma``: log-sigma of an execution's length;
    ``task_sigma``: the part that the members of a group share (a hard task is hard for all). ``max_turns``
    cuts. ``fed``/``sampled``: mean tokens per turn, with log-sigma ``token_sigma``; ``pause_s``: mean pause
    with ``pause_sigma``. ``first``: tokens of the first prompt. ``share``: part of the context that
    branches share when training (0: none). ``burst``: every so many groups, one is ``burst_factor`` times
    longer.
    """

    steps: int = 8
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 1
    turns: float = 12.0
    turns_sigma: float = 0.5
    task_sigma: float = 0.3
    max_turns: int = 60
    first: int = 2_000
    fed: float = 1_000.0
    sampled: float = 500.0
    token_sigma: float = 0.3
    pause_s: float = 2.0
    pause_sigma: float = 1.0
    train_share: float = 1.0
    burst: int = 0
    burst_factor: float = 3.0
    batch_tokens: int = 0
    seed: int = 0

    def group(self, number: int) -> Sequence[ExecutionPlan]:
        """The executions of group ``number``."""
        rng = random.Random(f"{self.seed}/{number}")
        task = _lognormal(rng, self.task_sigma)
        if self.burst and number % self.burst == 0:
            task *= self.burst_factor
        return [self._execution(rng, task) for _ in range(self.group_size)]

    def _execution(self, rng: random.Random, task: float) -> ExecutionPlan:
        wanted = self.turns * task * _lognormal(rng, self.turns_sigma)
        count = max(1, min(self.max_turns, round(wanted)))
        turns = []
        for i in range(count):
            fed = self.fed * _lognormal(rng, self.token_sigma) + (self.first if i == 0 else 0)
            sampled = max(1.0, self.sampled * _lognormal(rng, self.token_sigma))
            pause = self.pause_s * _lognormal(rng, self.pause_sigma) if i + 1 < count else 0.0
            turns.append(Turn(int(fed), int(sampled), pause))
        total = sum(t.fed + t.sampled for t in turns)
        return ExecutionPlan(tuple(turns), max(1, int(total * self.train_share)))


def _lognormal(rng: random.Random, sigma: float) -> float:
    """Log-normal with mean 1."""
    return math.exp(rng.gauss(0.0, sigma) - sigma * sigma / 2.0) if sigma else 1.0


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """Executions taken from a trace, in its order, again from the start when it is used up (closed loop)."""

    plans: tuple[ExecutionPlan, ...]
    steps: int = 8
    groups_per_step: int = 8
    group_size: int = 8
    max_staleness: int = 1
    batch_tokens: int = 0

    def group(self, number: int) -> Sequence[ExecutionPlan]:
        """The executions of group ``number``: ``group_size`` consecutive lines."""
        first = number * self.group_size
        return [self.plans[(first + i) % len(self.plans)] for i in range(self.group_size)]
