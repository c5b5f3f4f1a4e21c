"""Objectives: per-token losses composed of a surrogate, a proximal policy, a correction and penalties.

``PolicyLoss`` joins four parts, each a small object with one formula: *which ratio and which clip* (surrogate), *what
the ratio is taken against* (proximal rule), *how the gap between trainer and engine is corrected* (correction), *what
is added* (penalties). The invariant: an objective maps each loss entry to one number; weights and denominators are
applied outside and only once. It knows no model and no tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gyre_loss._check import fail
from gyre_loss.ratios import Correction, ProximalRule, behaviour_is_proximal
from gyre_loss.surrogates import Clip, Surrogate

_DOING = "computing an objective"


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """What an objective may look at: tensors over the E loss entries of a batch.

    ``logp`` [E], the trainer's log-probability, with gradient; ``entropy`` [E] of its distribution, with gradient, or
    None where the objective did not ask; ``behaviour``, ``recorded_proximal``, ``reference`` [E], constants (NaN
    where not known); ``advantage`` [E]; ``execution`` int64[E], the execution of each entry; ``execution_tokens``
    int64[K], the trained tokens that each execution has in the whole step; ``execution_ids``, K names for messages.
    """

    logp: Tensor
    entropy: Tensor | None
    behaviour: Tensor
    recorded_proximal: Tensor
    reference: Tensor
    advantage: Tensor
    execution: Tensor
    execution_tokens: Tensor
    execution_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EntryLoss:
    """``loss`` [E], unweighted, and named per-entry observations (detached, [E]) for the metrics."""

    loss: Tensor
    seen: Mapping[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Objective(Protocol):
    """Maps the terms of E entries to their losses.

    ``needs_entropy``: whether ``terms.entropy`` is used. ``whole_executions``: whether an entry's loss depends on
    other entries of its execution, so that a method working piece by piece needs a first pass.
    """

    @property
    def needs_entropy(self) -> bool:
        """Whether entropies are used."""

    @property
    def whole_executions(self) -> bool:
        """Whether entries of one execution are looked at together."""

    def __call__(self, terms: TokenTerms) -> EntryLoss:
        """Losses [E]."""


@dataclass(frozen=True, slots=True)
class KLPenalty:
    """coefficient * estimator(logp, reference), one of ``k1``, ``k2``, ``k3`` of ``gyre_loss.kl``."""

    estimator: Callable[[Tensor, Tensor], Tensor]
    coefficient: float


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """surrogate(ratio to the proximal policy) * correction(proximal / behaviour) + penalties.

    The default is PPO's clip against the behaviour policy (which is then also the proximal one). With a
    ``correction`` the proximal rule must name another policy than the behaviour one: between a policy and itself
    there is no gap, and a correction that can do nothing is refused rather than ignored.

    ``kl``: penalty to the reference policy; ``entropy_coefficient``: bonus, subtracted.
    """

    surrogate: Surrogate = field(default_factory=Clip)
    proximal: ProximalRule = behaviour_is_proximal
    correction: Correction | None = None
    kl: KLPenalty | None = None
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a correction that could never act; raises ValueError."""
        if self.correction is not None and self.proximal is behaviour_is_proximal:
            fail(
                "composing an objective",
                "a correction between engine and trainer while the behaviour policy is its own proximal policy",
                "a proximal rule whose policy differs from the behaviour policy",
                "Pass proximal=current_is_proximal (no second pass) or recorded_proximal.",
            )

    @property
    def needs_entropy(self) -> bool:
        """Whether entropies are computed with gradient."""
        return self.entropy_coefficient != 0.0

    @property
    def whole_executions(self) -> bool:
        """Whether the surrogate or the correction looks at whole executions."""
        return self.surrogate.whole_executions or (self.correction is not None and self.correction.whole_executions)

    def __call__(self, terms: TokenTerms) -> EntryLoss:
        """Losses [E] of the entries."""
        proximal = self.proximal(terms)
        result = self.surrogate(terms, proximal)
        loss, seen = result.loss, dict(result.seen)
        if self.correction is not None:
            weight = self.correction(terms, proximal - terms.behaviour)
            loss = loss * weight.weight
            seen |= {
                "correction_weight": weight.weight,
                "correction_cut": weight.cut.to(loss.dtype),
                "correction_masked": weight.masked.to(loss.dtype),
            }
        if self.kl is not None:
            if bool(torch.isnan(terms.reference).any()):
                bad = int(torch.isnan(terms.reference).nonzero()[0])
                fail(
                    _DOING,
                    f"entry_reference[{bad}] is NaN and the objective has a KL penalty",
                    "a reference log-probability at every entry",
                    "Fill them with batch.with_logprobs(reference=...).",
                )
            penalty = self.kl.estimator(terms.logp, terms.reference)
            loss = loss + self.kl.coefficient * penalty
            seen["kl_reference"] = penalty.detach()
        if self.needs_entropy:
            assert terms.entropy is not None
            loss = loss - self.entropy_coefficient * terms.entropy
        return EntryLoss(loss, seen)
