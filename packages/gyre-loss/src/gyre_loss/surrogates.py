"""Policy surrogates: the clipped and weighted policy-gradient losses of the literature, one small object each.

A surrogate takes the entries' terms and the proximal policy's log-probabilities [E] and gives a loss [E]. The
invariant: at ratio one the gradient of every one of them is -advantage * grad logp. Knows neither correction nor
penalty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from gyre_loss._check import fail
from gyre_loss.ratios import execution_mean

if TYPE_CHECKING:
    from gyre_loss.objective import TokenTerms


@dataclass(frozen=True, slots=True)
class SurrogateLoss:
    """``loss`` [E] and what was seen per entry (ratio, clipped_low, clipped_high), detached."""

    loss: Tensor
    seen: dict[str, Tensor] = field(default_factory=dict)


class Surrogate(Protocol):
    """A policy-gradient loss per entry. ``whole_executions``: it looks at an execution's entries together."""

    @property
    def whole_executions(self) -> bool:
        """Whether entries of one execution are looked at together."""

    def __call__(self, terms: TokenTerms, proximal: Tensor) -> SurrogateLoss:
        """Losses [E]."""


def clip_loss(ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None = None) -> Tensor:
    """-min(r A, clip(r, 1 - low, 1 + high) A), and at most -dual * A where A < 0.

    PPO (Schulman et al. 2017, arXiv:1707.06347); two bounds: DAPO's clip-higher (arXiv:2503.14476); ``dual``:
    dual-clip PPO (Ye et al. 2019, arXiv:1912.09729).

    >>> clip_loss(torch.tensor([0.5, 1.5, 1.5]), torch.tensor([1.0, 1.0, -1.0]), 0.2, 0.25).tolist()
    [-0.5, -1.25, 1.5]
    """
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    if dual is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual * advantage), loss)
    return loss


def _clip_seen(ratio: Tensor, advantage: Tensor, low: float, high: float) -> dict[str, Tensor]:
    ratio = ratio.detach()
    return {
        "ratio": ratio,
        "clipped_low": ((ratio < 1 - low) & (advantage < 0)).to(ratio.dtype),
        "clipped_high": ((ratio > 1 + high) & (advantage > 0)).to(ratio.dtype),
    }


def _check_bounds(low: float, high: float) -> None:
    if not (0 <= low <= 1 and high >= 0):
        fail("composing a surrogate", f"clip bounds {low} and {high}", "0 <= low <= 1 and high >= 0")


@dataclass(frozen=True, slots=True)
class Clip:
    """PPO's clip per token, with bounds 1 - low and 1 + high; ``Clip(0.2, 0.28)`` is DAPO's. See ``clip_loss``."""

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        """Check the bounds; raises ValueError."""
        _check_bounds(self.low, self.high)
        if self.dual is not None and self.dual <= 1:
            fail("composing a surrogate", f"dual = {self.dual}", "a bound above 1, or None")

    @property
    def whole_executions(self) -> bool:
        """Token by token."""
        return False

    def __call__(self, terms: TokenTerms, proximal: Tensor) -> SurrogateLoss:
        """Losses [E]."""
        ratio = torch.exp(terms.logp - proximal)
        loss = clip_loss(ratio, terms.advantage, self.low, self.high, self.dual)
        return SurrogateLoss(loss, _clip_seen(ratio, terms.advantage, self.low, self.high))


@dataclass(frozen=True, slots=True)
class SequenceClip:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per execution, its tokens' geometric mean, clipped.

    The gradient is written per token, s * grad(logp) / |T|, which is GSPO's own when an execution's tokens share one
    advantage (the paper's GSPO-token form), and lets the two-level weights 1/|T_k| stay outside. Needs all of an
    execution's tokens in one batch.
    """

    low: float = 3e-4
    high: float = 4e-4

    def __post_init__(self) -> None:
        """Check the bounds; raises ValueError."""
        _check_bounds(self.low, self.high)

    @property
    def whole_executions(self) -> bool:
        """The ratio is an execution's."""
        return True

    def __call__(self, terms: TokenTerms, proximal: Tensor) -> SurrogateLoss:
        """Losses [E]."""
        mean = execution_mean(terms, (terms.logp - proximal).detach())
        ratio = torch.exp(mean[terms.execution] + terms.logp - terms.logp.detach())
        loss = clip_loss(ratio, terms.advantage, self.low, self.high)
        return SurrogateLoss(loss, _clip_seen(ratio, terms.advantage, self.low, self.high))


@dataclass(frozen=True, slots=True)
class ClippedWeight:
    """CISPO (MiniMax-M1, arXiv:2506.13585): -sg[clip(r, 1 - low, 1 + high)] A logp; every token keeps a gradient.

    The paper sets no lower bound: ``low = 1`` does the same.
    """

    low: float = 1.0
    high: float = 0.28

    def __post_init__(self) -> None:
        """Check the bounds; raises ValueError."""
        _check_bounds(self.low, self.high)

    @property
    def whole_executions(self) -> bool:
        """Token by token."""
        return False

    def __call__(self, terms: TokenTerms, proximal: Tensor) -> SurrogateLoss:
        """Losses [E]."""
        ratio = torch.exp(terms.logp.detach() - proximal)
        loss = -ratio.clamp(1 - self.low, 1 + self.high) * terms.advantage * terms.logp
        one = torch.ones_like(ratio)
        seen = {
            "ratio": ratio,
            "clipped_low": one * (ratio < 1 - self.low),
            "clipped_high": one * (ratio > 1 + self.high),
        }
        return SurrogateLoss(loss, seen)


@dataclass(frozen=True, slots=True)
class Reinforce:
    """-A logp (Williams 1992): no ratio; on-policy, or with a correction."""

    @property
    def whole_executions(self) -> bool:
        """Token by token."""
        return False

    def __call__(self, terms: TokenTerms, proximal: Tensor) -> SurrogateLoss:
        """Losses [E]."""
        ratio = torch.exp(terms.logp.detach() - proximal)
        return SurrogateLoss(-terms.advantage * terms.logp, {"ratio": ratio})
