"""What things cost in the simulated cluster.

All cells are alike. Seconds, tokens, bytes. The formulas are the usual first-order ones: a decoding step reads the
weights once, and each running sequence's cache; prefilling and training have a part that grows with the square of the
length. Holds no state.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_sched.config import CostPriors
from gyre_sched.errors import ConfigError

__all__ = ["Hardware"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster of ``cells`` equal cells.

    ``slots``: calls that one cell decodes at a time; ``kv_tokens``: its cache. A decoding step takes
    ``step_s + seq_s · running + ctx_s · context tokens of the running``. Prefilling ``n`` tokens behind a cached
    context ``c`` takes ``n / prefill_tps · (1 + prefill_q · (c + n / 2))``; training ``n`` tokens takes
    ``n / train_tps · (1 + train_q · n / 2)``.
    """

    cells: int
    slots: int
    kv_tokens: int
    step_s: float = 0.02
    seq_s: float = 0.0005
    ctx_s: float = 0.0
    prefill_tps: float = 20_000.0
    prefill_q: float = 0.0
    train_tps: float = 10_000.0
    train_q: float = 0.0
    kv_bytes_per_token: float = 98_304.0
    link_bytes_per_s: float = 40e9
    link_setup_s: float = 0.05
    to_train_s: float = 10.0
    to_rollout_s: float = 10.0
    sync_s: float = 10.0
    apply_s: float = 5.0
    switch_spread: float = 0.2
    """Switches take up to this share longer or shorter (uniform)."""
    sync_pause: float = 0.0
    """Share of ``sync_s`` during which the cell's engine stands still; the rest of a load goes on beside sampling."""
    mtbf_s: float = 0.0
    """Mean time between losses of one cell (exponential); 0: cells do not die."""
    repair_s: float = 60.0
    """Until a lost cell's next life joins."""

    def __post_init__(self) -> None:
        if self.cells < 2:
            raise ConfigError(f"Hardware.cells is {self.cells}; expected at least 2 (one core, one to sample)")
        for name in ("slots", "kv_tokens", "step_s", "prefill_tps", "train_tps", "link_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"Hardware.{name} is {getattr(self, name)}; expected a positive number")
        if not 0 <= self.sync_pause <= 1 or self.mtbf_s < 0 or self.repair_s < 0:
            raise ConfigError(
                f"Hardware has sync_pause={self.sync_pause}, mtbf_s={self.mtbf_s}, repair_s={self.repair_s}; expected "
                "a share from 0 to 1 and seconds that are not negative"
            )

    def decode_step_s(self, running: int, context: int) -> float:
        """Seconds of one decoding step for ``running`` sequences with ``context`` tokens in all."""
        return self.step_s + self.seq_s * running + self.ctx_s * context

    def prefill_s(self, new: int, cached: int) -> float:
        """Seconds to prefill ``new`` tokens behind ``cached`` ones."""
        return new / self.prefill_tps * (1.0 + self.prefill_q * (cached + new / 2.0))

    def train_s(self, tokens: int) -> float:
        """Seconds of one cell for forward and backward over a tree of ``tokens`` computed tokens."""
        return tokens / self.train_tps * (1.0 + self.train_q * tokens / 2.0)

    def move_s(self, tokens: int) -> float:
        """Seconds to move the KV of ``tokens``."""
        return self.link_setup_s + tokens * self.kv_bytes_per_token / self.link_bytes_per_s

    def priors(self, tokens: int = 0, step_s: float = 0.0) -> CostPriors:
        """What a scheduler would assume here before measuring; ``tokens``: a typical training sequence; ``step_s``: how
        long a step is expected to take.
        """
        typical = max(1, tokens)
        return CostPriors(
            to_train_s=self.to_train_s,
            to_rollout_s=self.to_rollout_s,
            sync_s=self.sync_s,
            kv_bytes_per_token=self.kv_bytes_per_token,
            kv_bytes_per_s=self.link_bytes_per_s,
            kv_setup_s=self.link_setup_s,
            prefill_tps=self.prefill_tps,
            prefill_quadratic=self.prefill_q,
            train_tps=typical / self.train_s(typical),
            step_s=step_s,
        )
