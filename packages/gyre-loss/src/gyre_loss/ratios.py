"""Proximal policies and importance corrections.

Three policies meet in a loss entry: the *behaviour* policy that the engine sampled from (its log-probability is
recorded), the *proximal* one that the update must stay near, and the *trainer's* current one. The surrogate's ratio
is trainer over proximal; the correction's weight is proximal over behaviour, a constant. The invariant: a correction
says what it cut and what it masked, and a missing log-probability is an error, never a ratio of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gyre_loss._check import fail

if TYPE_CHECKING:
    from gyre_loss.objective import TokenTerms

ProximalRule = Callable[["TokenTerms"], Tensor]
"""Terms to the proximal policy's log-probabilities [E], detached."""


def behaviour_is_proximal(terms: TokenTerms) -> Tensor:
    """The engine's recorded log-probabilities: classic PPO with old = behaviour."""
    return terms.behaviour


def recorded_proximal(terms: TokenTerms) -> Tensor:
    """Log-probabilities that the batch brings (decoupled PPO, Hilton et al. 2021, arXiv:2110.00641)."""
    if bool(torch.isnan(terms.recorded_proximal).any()):
        bad = int(torch.isnan(terms.recorded_proximal).nonzero()[0])
        fail(
            "taking the recorded proximal policy",
            f"entry_proximal[{bad}] is NaN",
            "a log-probability at every entry",
            "Fill them with batch.with_logprobs(proximal=...), or use current_is_proximal.",
        )
    return terms.recorded_proximal


def current_is_proximal(terms: TokenTerms) -> Tensor:
    """The trainer's own log-probabilities at this step, as constants: ratio one, no second pass."""
    return terms.logp.detach()


@dataclass(frozen=True, slots=True)
class CorrectionWeight:
    """``weight`` [E], a constant; ``cut`` bool[E]: truncated; ``masked`` bool[E]: set to zero."""

    weight: Tensor
    cut: Tensor
    masked: Tensor


class Correction(Protocol):
    """Weights [E] from log(proximal / behaviour) [E]."""

    @property
    def whole_executions(self) -> bool:
        """Whether entries of one execution are looked at together."""

    def __call__(self, terms: TokenTerms, log_weight: Tensor) -> CorrectionWeight:
        """Weights [E]."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """min(w, cap) per token: truncated importance sampling (Ionides 2008; Espeholt et al. 2018, arXiv:1802.01561)."""

    cap: float = 2.0

    @property
    def whole_executions(self) -> bool:
        """Token by token."""
        return False

    def __call__(self, terms: TokenTerms, log_weight: Tensor) -> CorrectionWeight:
        """Weights [E], none above the cap."""
        weight = torch.exp(log_weight.detach())
        cut = weight > self.cap
        return CorrectionWeight(weight.clamp(max=self.cap), cut, torch.zeros_like(cut))


@dataclass(frozen=True, slots=True)
class Masked:
    """w where low <= w <= high, else 0, per token: masked importance sampling (IcePop, Ling team 2025)."""

    low: float = 0.5
    high: float = 5.0

    @property
    def whole_executions(self) -> bool:
        """Token by token."""
        return False

    def __call__(self, terms: TokenTerms, log_weight: Tensor) -> CorrectionWeight:
        """Weights [E], zero outside the bounds."""
        weight = torch.exp(log_weight.detach())
        masked = (weight < self.low) | (weight > self.high)
        return CorrectionWeight(weight.masked_fill(masked, 0.0), torch.zeros_like(masked), masked)


@dataclass(frozen=True, slots=True)
class ExecutionMasked:
    """1 where an execution's geometric mean weight is inside [low, high], else 0 for all of its tokens.

    Geometric sequence masking: a whole execution that engine and trainer disagree on is left out; inside the bounds
    the tokens are not reweighted. Needs all of an execution's tokens in one batch.
    """

    low: float = 0.99
    high: float = 1.01

    @property
    def whole_executions(self) -> bool:
        """The mean is an execution's."""
        return True

    def __call__(self, terms: TokenTerms, log_weight: Tensor) -> CorrectionWeight:
        """Weights [E], one or zero, the same within an execution."""
        mean = torch.exp(execution_mean(terms, log_weight.detach()))[terms.execution]
        masked = (mean < self.low) | (mean > self.high)
        return CorrectionWeight((~masked).to(log_weight.dtype), torch.zeros_like(masked), masked)


def execution_mean(terms: TokenTerms, values: Tensor) -> Tensor:
    """Mean of ``values`` [E] per execution, [K]; raises ValueError if an execution is not whole in this batch."""
    count = len(terms.execution_ids)
    held = torch.bincount(terms.execution, minlength=count)
    parted = (held != terms.execution_tokens) & (held > 0)
    if bool(parted.any()):
        bad = int(parted.nonzero()[0])
        fail(
            "averaging over an execution",
            f"{int(held[bad])} of the {int(terms.execution_tokens[bad])} trained tokens of "
            f"{terms.execution_ids[bad]!r}",
            "all of them in one batch, as a ratio of whole executions needs",
            "Raise the token budget of the partition so that each execution stays in one micro-batch.",
        )
    sums = torch.zeros(count, dtype=values.dtype, device=values.device).index_add_(0, terms.execution, values)
    return sums / held.clamp(min=1)
