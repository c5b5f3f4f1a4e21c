"""Options of the embedded engine and trainer; import-light.

Invariant: the defaults give a usable component on a laptop; a value that cannot work is refused when the options are
made, with the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINE_DTYPES = ("float32", "float64", "bfloat16", "float16")
TRAINER_DTYPES = ("float32", "float64", "bfloat16")
METHODS = ("packed", "dfs", "branches")
PUBLISH = ("disk", "shm", "delta")
HANDOVER = ("disk", "memory")


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not value > 0:
            raise ValueError(f"options of {type(owner).__name__}: {name} is {value}, expected more than 0")


def _one_of(owner: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(owner, name)
    if value not in allowed:
        raise ValueError(
            f"options of {type(owner).__name__}: {name} is {value!r}, expected one of {', '.join(allowed)}"
        )


@dataclass(frozen=True, slots=True)
class LocalEngineOptions:
    """How the embedded engine is sized. Counts are of tokens unless said otherwise."""

    dtype: str = "float32"
    kv_tokens: int = 32768
    """Size of the paged KV pool; rounded up to whole blocks."""
    block_tokens: int = 16
    max_running: int = 32
    """Calls in one batch."""
    max_context: int = 0
    """Prompt plus sampled tokens of one call; 0 means all the model allows. Never more than the pool."""
    prefill_tokens: int = 512
    """Prompt tokens computed in one forward pass, beside the decode rows."""
    chunk_tokens: int = 32
    """Sampled tokens gathered before a chunk is handed out; the end of a call hands out what there is."""
    chunk_seconds: float = 0.5
    """A chunk is handed out after this long even if it is small."""

    move_patience: float = 5.0
    """Seconds that `sleep` waits for moves to release the KV they pinned or reserved before it refuses."""

    def __post_init__(self) -> None:
        _positive(self, "kv_tokens", "block_tokens", "max_running", "prefill_tokens", "chunk_tokens")
        _one_of(self, "dtype", ENGINE_DTYPES)
        if min(self.max_context, self.chunk_seconds, self.move_patience) < 0:
            raise ValueError(
                "options of LocalEngineOptions: max_context, chunk_seconds and move_patience must not be negative"
            )


@dataclass(frozen=True, slots=True)
class LocalTrainerOptions:
    """How the embedded trainer computes and steps."""

    dtype: str = "float32"
    """Of weights, gradients and optimizer state. bfloat16 keeps float32 master weights on the core."""
    method: str = "packed"
    """How gyre-loss computes trees: packed, dfs or branches."""
    objective: str = "ppo"
    """Name of a per-token objective of gyre-loss."""
    objective_options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    """The sampling temperature of the run: logprobs are of the same tempered distribution as the engine's."""
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 means no clipping."""
    keep_versions: int = 3
    """Published versions kept."""
    publish: str = "disk"
    """How a version travels: disk (whole, forced to disk), shm (whole, in this machine's memory), delta (on disk, what
    changed since the version before)."""
    full_every: int = 16
    """With publish = "delta": at least every so many versions is a whole one."""
    handover: str = "disk"
    """How a satellite's gradient reaches the core: disk (a file in the run directory, which a resumed run counts
    again), memory (the core's memory; after a crash of the core the open step's micro-batches are computed again)."""
    handover_timeout_s: float = 60.0
    """With handover = "memory": longest silence of the other side before a handover ends and the lease goes back."""

    def __post_init__(self) -> None:
        _positive(self, "temperature", "learning_rate", "eps", "keep_versions", "full_every", "handover_timeout_s")
        _one_of(self, "publish", PUBLISH)
        _one_of(self, "handover", HANDOVER)
        _one_of(self, "dtype", TRAINER_DTYPES)
        _one_of(self, "method", METHODS)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(
                f"options of LocalTrainerOptions: betas {self.beta1}, {self.beta2}; expected 0 <= beta < 1"
            )
        if min(self.weight_decay, self.max_grad_norm, self.warmup_steps) < 0:
            raise ValueError(
                "options of LocalTrainerOptions: weight_decay, max_grad_norm and warmup_steps must not be negative"
            )

    def kept(self, accelerators: int, *, core: bool) -> Mapping[str, tuple[int, int, int]]:
        """For the memory estimate of `gyre check`: by kind, bytes for each weight, on this trainer's one accelerator
        (nothing is sharded, however many it is given). The sum of gradients is float32 or wider, beside those of the
        backward pass."""
        weight = {"bfloat16": 2, "float32": 4, "float64": 8}[self.dtype]
        wide = max(weight, 4)
        found = {"weights": weight, "gradients": weight, "open sum": wide}
        if core:
            found |= {"moments": 2 * wide} | ({"masters": wide} if wide > weight else {})
        return {kind: (size, 1, 1) for kind, size in found.items()}

    @property
    def router_replay(self) -> bool:
        """Whether recorded experts would be used again: never, since mixtures of experts are refused."""
        return False
