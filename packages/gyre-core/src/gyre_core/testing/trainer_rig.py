"""What the trainers' suite needs to know of a trainer, and what its checks have in common.

Invariant: nothing here looks inside a trainer; weights and gradients are read from what it publishes and exports.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gyre_core.engine import Engine, WeightSource
from gyre_core.trainer import Contribution, MicroBatch, Trainer

Gradient = Callable[[Any, Sequence[MicroBatch]], Mapping[str, Any]]
Logprobs = Callable[[Any, MicroBatch], Sequence[float]]


@dataclass(frozen=True, slots=True)
class TrainerRig:
    """What the suite needs to know of a trainer.

    `make` gives a new trainer, not started, that steps with AdamW at `learning_rate`, `betas`, `eps`, without weight
    decay and warm-up, and clips at `max_grad_norm` (0: not). `batches` are six or more micro-batches of step 1.
    `gradient(model, batches)` is the oracle: the summed gradient by Hugging Face parameter name of those batches on a
    plain transformers model, which it leaves without gradients; `logprobs(model, batch)` that of log-probabilities.
    """

    make: Callable[[], Trainer]
    source: WeightSource
    batches: Sequence[MicroBatch]
    gradient: Gradient
    logprobs: Logprobs
    learning_rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    dtype: str = "float32"
    """Of the oracle's model."""
    tolerance: float = 1e-4
    """Allowed relative difference of a gradient tensor from the oracle's, and absolute one of a log-probability."""
    trials: int = 8
    """Random schedules that are tried."""
    sum_tolerance: float = 1e-5
    """Allowed relative difference between two ways of splitting the same work (float64: 1e-10)."""

    kinds: Mapping[str, Callable[[], Trainer]] = field(default_factory=dict)
    """For `publishing`: as `make`, trainers that publish in a way (disk, shm, delta)."""
    engine: Callable[[], Engine] | None = None
    """For `publishing`: a new engine, not started, that takes what is published."""

    @asynccontextmanager
    async def started(self, *, core: bool = True, source: WeightSource | None = None) -> AsyncIterator[Trainer]:
        """A trainer with the rig's weights, closed afterwards."""
        trainer = self.make()
        await trainer.start(source or self.source, core=core)
        try:
            yield trainer
        finally:
            await trainer.close()

    def model(self, source: WeightSource | None = None) -> Any:
        """A plain transformers model with these weights; skips the test without transformers."""
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        location = (source or self.source).location
        return transformers.AutoModelForCausalLM.from_pretrained(location, dtype=getattr(torch, self.dtype)).eval()


async def contribute(trainer: Trainer, batches: Sequence[MicroBatch], name: str, folder: Path) -> Contribution:
    """Accumulate the batches and export them."""
    for batch in batches:
        await trainer.accumulate(batch)
    return await trainer.export_contribution(name, batches[0].step, str(folder))


async def step_once(core: Trainer, batches: Sequence[MicroBatch], name: str, folder: Path) -> None:
    """A step from one contribution."""
    await core.add_contribution(await contribute(core, batches, name, folder))
    assert (await core.step(1.0)).skipped is None


def at_rest(contribution: Contribution) -> dict[str, Any]:
    """A contribution's tensors, copied from its file."""
    files = pytest.importorskip("safetensors.torch")
    return {name: tensor.clone() for name, tensor in files.load_file(contribution.location).items()}


async def weights_of(trainer: Trainer, folder: Path) -> dict[str, Any]:
    """A core's present weights, by way of publishing them."""
    files = pytest.importorskip("safetensors.torch")
    source = await trainer.publish(str(folder))
    found: dict[str, Any] = {}
    for path in sorted(Path(source.location).glob("*.safetensors")):
        found |= {name: tensor.clone() for name, tensor in files.load_file(path).items()}
    return found


def gap(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Largest relative difference of a tensor (norm of the difference over the norm of all), names being equal."""
    assert set(left) == set(right), f"names differ: {sorted(set(left) ^ set(right))[:4]}"
    scale = sum(float(t.detach().double().norm()) ** 2 for t in right.values()) ** 0.5 or 1.0
    return max(float((left[name].detach().double() - right[name].detach().double()).norm()) for name in right) / scale


def summed(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum of gradients by name."""
    total = {name: tensor.double() for name, tensor in parts[0].items()}
    for part in parts[1:]:
        for name, tensor in part.items():
            total[name] = total[name] + tensor.double()
    return total
