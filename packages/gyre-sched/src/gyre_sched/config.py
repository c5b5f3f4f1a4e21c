"""The scheduler's settings, checked as a whole when made.

One frozen record; nothing is read from the environment. Times are seconds, loads are shares of capacity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from .errors import ConfigError

__all__ = ["CostPriors", "SchedConfig"]


@dataclass(frozen=True, slots=True)
class CostPriors:
    """What is assumed until something was measured. Every figure is replaced by measurements as they come."""

    to_train_s: float = 5.0
    to_rollout_s: float = 5.0
    sync_s: float = 2.0
    kv_bytes_per_token: float = 100_000.0
    kv_bytes_per_s: float = 10e9
    kv_setup_s: float = 0.05
    prefill_tps: float = 8_000.0
    """Prefill speed of one cell in tokens per second, on short contexts."""
    prefill_quadratic: float = 0.0
    """Relative slow-down per token of context: prefilling n tokens takes n/tps · (1 + q·n/2)."""
    train_tps: float = 10_000.0
    step_s: float = 0.0
    """Expected seconds from one step to the next; 0: nothing is known, and until a step was measured no turn is held
    back because the step is too short for it.
    """


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """How the machine decides.

    Pacing: a step trains ``groups_per_step`` groups; sampled tokens are at most ``max_staleness`` versions old when
    they train. Watermarks: ``low`` and ``high`` bound the demand as a share of sampling capacity; a cell is released
    below ``low`` and claimed back above ``high``. ``dwell_s``: least time in a role. ``switch_margin``: a switch must
    bring this many times its measured cost. ``max_in_transit``: share of all cells that may change role at once
    (at least one always may).
    """

    first_version: int = 0
    """Policy version the run starts from: a resumed run goes on with the step of that number."""
    groups_per_step: int = 1
    max_staleness: int = 1
    low: float = 0.7
    high: float = 0.95
    dwell_s: float = 0.0
    switch_margin: float = 1.0
    max_in_transit: float = 0.05
    claim_idle: float | None = None
    """Demand above which a cell with nothing to train samples instead; ``None``: the low mark."""
    lend_core: bool = False
    """Whether a policy may let the core cell sample while there is nothing to train (small clusters)."""
    keep_rollout: int = 1
    """Rollout cells that are never released."""
    pause_weight: float = 1.0
    """How much of a slot a session in a tool pause is expected to need."""
    growth_horizon_s: float = 30.0
    """Contexts must still fit after growing at the measured rate for this long."""
    pause_wait_s: float = 2.0
    """A draining cell waits this long for a running call to reach its pause before interrupting it."""
    drain_moves: int = 8
    """Moves that may be under way from one cell at a time."""
    carry_kv: bool = True
    join_midway: bool = True
    """Micro-batches are leased, and cells join, while other groups of the step still sample; otherwise a step is
    computed only once it is sealed, as most trainers do.
    """
    overload: float = 1.0
    """Calls per slot up to which a cell is given calls; the others wait here, see ``oldest_first``."""
    oldest_first: bool = True
    """Whether calls of groups that were admitted earlier go before others; otherwise first come, first served."""
    balance: float = 0.25
    """How much of a call's time depends on the calls beside it (0: none of it, 1: all). A session leaves a home that is
    fuller than others for its next call if that saves more time than bringing its context there takes.
    """
    spread: float = 0.25
    """A prefix match may be this much fuller than the mean before load wins."""
    prefix_entries: int = 65_536
    admit_load: float | None = None
    """Admit a group only while demand is below this share of the whole cluster's capacity; ``None``: always."""
    max_retries: int = 2
    min_group: int = 2
    """A group trains with the members that are left if there are at least this many (or all of a smaller one)."""
    batch_order: bool = False
    """A step trains exactly the next ``groups_per_step`` groups in order of admission, as pipelines with fixed batches
    do; otherwise those that end first, as far as staleness allows.
    """
    cut_after_s: float | None = None
    """Executions are cut after this long."""
    cut_tail_share: float = 0.0
    """Cut the step's last executions once they are at most this share of it and training waits for them alone."""
    max_lease_batches: int = 4
    lease_retries: int = 3
    """How often a micro-batch's lease may fail before the machine refuses to hide it."""
    story_keep: int = 1_000
    """Ended sessions, executions, groups and leases whose stories are kept."""
    tick_s: float = 1.0
    """How often time alone is looked at."""
    priors: CostPriors = field(default_factory=CostPriors)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"SchedConfig.{f.name} is {value}; expected a finite number")
        least = {
            "first_version": 0,
            "groups_per_step": 1,
            "max_staleness": 0,
            "dwell_s": 0,
            "switch_margin": 0,
            "keep_rollout": 0,
            "pause_wait_s": 0,
            "drain_moves": 1,
            "max_retries": 0,
            "min_group": 1,
            "max_lease_batches": 1,
            "prefix_entries": 0,
            "story_keep": 0,
            "spread": 0,
            "balance": 0,
        }
        for name, low in least.items():
            if getattr(self, name) < low:
                raise ConfigError(f"SchedConfig.{name} is {getattr(self, name)}; expected at least {low}")
        if not 0 < self.low < self.high:
            raise ConfigError(
                f"watermarks are low={self.low}, high={self.high}; expected 0 < low < high, so that a cell "
                "released below low is not claimed back at once"
            )
        if not 0 <= self.max_in_transit <= 1 or not 0 <= self.cut_tail_share < 1:
            raise ConfigError("max_in_transit and cut_tail_share are shares; expected a value from 0 to 1")
        if self.tick_s <= 0 or self.growth_horizon_s < 0 or not 0 <= self.pause_weight <= 1:
            raise ConfigError("expected tick_s > 0, growth_horizon_s >= 0 and pause_weight from 0 to 1")
