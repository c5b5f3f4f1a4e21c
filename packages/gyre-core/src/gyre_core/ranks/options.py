"""Options that every trainer with ranks has; import-light.

Invariant: a value that cannot work is refused when the options are made, with the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DTYPES = ("float32", "bfloat16")
PUBLISH = ("disk", "shm", "delta")
OFFLOADS = ("auto", "keep", "rebuild")


def one_of(owner: object, name: str, allowed: tuple[Any, ...]) -> None:
    """ValueError unless the field has one of these values."""
    value = getattr(owner, name)
    if value not in allowed:
        told = ", ".join(map(str, allowed))
        raise ValueError(f"options of {type(owner).__name__}: {name} is {value!r}, expected one of {told}")


def at_least(owner: object, least: float, *names: str) -> None:
    """ValueError unless the fields are at least this."""
    for name in names:
        value = getattr(owner, name)
        if not value >= least:
            raise ValueError(f"options of {type(owner).__name__}: {name} is {value}, expected {least} or more")


@dataclass(frozen=True, slots=True)
class RankTrainerOptions:
    """How a trainer with rank processes computes and steps."""

    ranks: int = 0
    """Processes, one for each accelerator; 0: one for each accelerator of the cell, on CPU one."""
    python: str = ""
    """Interpreter of the environment that has the trainer's library; empty: the environment that was built for it, or
    this interpreter if it has the library."""
    dtype: str = "float32"
    """Of weights and activations: float32 or bfloat16. Gradients, master weights and moments are float32 always."""
    objective: str = "ppo"
    """Name of a per-token objective of gyre-loss."""
    objective_options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    """The sampling temperature of the run: logprobs are of the same tempered distribution as the engine's."""
    attention: str = "auto"
    """How tree attention is computed: auto, dense, blocked or flex (see gyre-loss)."""
    recompute: bool = False
    """Compute each layer's activations again during backward instead of keeping them."""
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Norms and biases are not decayed."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 means no clipping."""
    keep_versions: int = 3
    """Published versions kept."""
    publish: str = "disk"
    """How a version travels: disk (whole, forced to disk), shm (whole, in this machine's memory), delta (on disk, what
    changed since the version before)."""
    full_every: int = 16
    """With publish = "delta": at least every so many versions is a whole one."""
    shard_bytes: int = 4 << 30
    """Published weights are split into files of at most this size."""
    offload: str = "auto"
    """What offload does: keep (nothing moves), rebuild (weights and optimizer state to host memory, the model is taken
    down and built again at onload). auto: keep on CPU, rebuild elsewhere."""
    timeout_s: float = 1800.0
    """A command that takes longer than this counts as hung: the ranks are ended."""
    start_timeout_s: float = 600.0
    """The same for starting, which imports libraries."""

    def __post_init__(self) -> None:
        at_least(self, 0, "ranks", "warmup_steps", "weight_decay", "max_grad_norm", "beta1", "beta2")
        at_least(self, 1, "keep_versions", "shard_bytes", "full_every")
        one_of(self, "publish", PUBLISH)
        at_least(self, 1e-12, "temperature", "learning_rate", "eps", "timeout_s", "start_timeout_s")
        one_of(self, "dtype", DTYPES)
        one_of(self, "offload", OFFLOADS)
        if max(self.beta1, self.beta2) >= 1:
            raise ValueError(f"options of {type(self).__name__}: betas {self.beta1}, {self.beta2}; expected below 1")

    @property
    def router_replay(self) -> bool:
        """Whether experts that an engine recorded are used again with these options, known before anything starts."""
        return False
