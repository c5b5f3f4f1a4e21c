"""The trainer protocol: micro-batches in, gradient contributions out, one optimizer step on the core.

Invariants: a contribution is the summed gradient of the micro-batches it names, committed
once or not at all; sums are divided once, by the step's fixed divisor, on the core; a satellite never steps.
Gradients travel in Hugging Face names, so that a satellite need not share the core's backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from gyre_core.engine import WeightSource
from gyre_core.facts import ModelFacts


class TrainerCapability(StrEnum):
    """What a trainer may offer beyond the protocol's core."""

    OFFLOAD = "offload"
    RESIZE = "resize"
    ROUTER_REPLAY = "router_replay"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Work for one lease: `blob` is a serialised gyre-loss TreeBatch (format of gyre_loss.batch)."""

    id: str
    step: int
    tokens: int
    """Tree tokens in it, for planning."""
    blob: bytes


@dataclass(frozen=True, slots=True)
class BatchStats:
    """What `accumulate` saw; sums, so that they add over micro-batches."""

    loss_sum: float
    tokens: int
    """Tokens that went through the model."""
    trained_tokens: int
    """Sampled tokens with loss."""
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further sums. "x:count" is what the sum "x" is to be divided by, "x:max" a maximum; a sum without a count is a
    plain total."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """A committed sum of gradients, at rest at `location` (a safetensors file in Hugging Face names)."""

    id: str
    step: int
    version: int
    """Policy version whose weights computed it."""
    batch_ids: tuple[str, ...]
    location: str
    stats: BatchStats


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the optimizer step did. `skipped` gives the reason when it did not step (NaN gradient)."""

    version: int
    grad_norm: float
    learning_rate: float
    seconds: float
    skipped: str | None = None


class Trainer(Protocol):
    """A training replica on one cell; the same class serves core and satellite."""

    @property
    def capabilities(self) -> frozenset[TrainerCapability]:
        """What it offers; callers check before they ask."""

    @property
    def version(self) -> int:
        """Policy version of its weights; -1 before the first load."""

    @property
    def facts(self) -> ModelFacts | None:
        """What it made of the model; None before `start`. A run compares it with what the engine loads."""

    async def prepare(self, source: WeightSource) -> None:
        """Do what `start` can have done beforehand without accelerator memory (imports, compiling), so that the first
        switch to TRAIN is as short as the others. May be left out; called at most once, while the engine may run."""

    async def start(self, source: WeightSource, *, core: bool) -> None:
        """Load model and weights; with `core` also make the optimizer."""

    async def load_weights(self, source: WeightSource) -> None:
        """Take another version's weights (a satellite's snapshot). Discards gradients not exported. On an error it has
        the version it had, or none (-1) and computes nothing until one is loaded."""

    async def logprobs(self, batch: MicroBatch) -> Sequence[float]:
        """Log-probability of every sampled token of the batch in tree order, float32, under the present weights."""

    async def accumulate(self, batch: MicroBatch) -> BatchStats:
        """Add the batch's summed gradient to the open contribution."""

    async def export_contribution(self, contribution_id: str, step: int, folder: str) -> Contribution:
        """Close the open contribution and put it at rest in `folder`, atomically; then start an empty one."""

    async def discard_contribution(self) -> None:
        """Forget the open contribution: its lease went elsewhere."""

    async def add_contribution(self, contribution: Contribution) -> None:
        """Core: add to the step's sum. Raises ValueError on a batch id that was counted already or on another
        version."""

    async def step(self, divisor: float) -> StepResult:
        """Core: divide the sum by `divisor`, clip, step once. The version rises by one in any case, so that versions
        count steps; when the step was skipped the weights are the old ones and `skipped` says why."""

    async def publish(self, folder: str) -> WeightSource:
        """Core: put the present weights at rest under `folder`/v<version>, atomically, in Hugging Face names."""

    async def save(self, folder: str) -> None:
        """Core: weights, optimizer state and version, atomically."""

    async def restore(self, folder: str) -> None:
        """Core: what `save` wrote. Raises InfrastructureError on a checkpoint that is cut short."""

    async def offload(self) -> None:
        """Give accelerator memory back for a time as rollout cell."""

    async def onload(self) -> None:
        """Take it again."""

    async def close(self) -> None:
        """End for good."""
