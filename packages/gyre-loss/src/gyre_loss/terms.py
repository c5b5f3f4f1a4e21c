"""From a batch and its log-probabilities to one loss.

The unique trained tokens of a batch ("targets") get one log-probability each; entries look theirs up, so a token
shared by executions is computed once and counted with each one's weight and advantage. The invariant: the loss is the
plain sum over entries of weight times entry loss, added in float64. Knows nothing of how the log-probabilities came
about.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout
from gyre_loss.metrics import LossMetrics, gather
from gyre_loss.objective import Objective, TokenTerms


@dataclass(frozen=True, slots=True)
class Targets:
    """U unique trained tokens: ``token`` int64[U] ascending, ``row`` int64[U] (the token whose hidden state predicts
    it), ``of_entry`` int64[E] (which target an entry is of)."""

    token: NDArray[np.int64]
    row: NDArray[np.int64]
    of_entry: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TreeBatch, place: Layout) -> Targets:
        """The targets of a batch."""
        token, of_entry = np.unique(batch.entry_token, return_inverse=True)
        return cls(token, place.previous[token], of_entry.reshape(-1))


def recorded_experts(batch: TreeBatch, device: torch.device) -> Tensor | None:
    """int64[N, layers, k] of the batch's recorded experts, or None."""
    if batch.routed_experts is None:
        return None
    return torch.from_numpy(batch.routed_experts.astype(np.int64)).to(device)


@dataclass(frozen=True, slots=True)
class WeightedLoss:
    """``loss``, float64 scalar with gradient: the weighted sum; ``metrics`` of the entries."""

    loss: Tensor
    metrics: LossMetrics


def weighted_loss(
    batch: TreeBatch,
    objective: Objective,
    logp: Tensor,
    entropy: Tensor | None,
    entries: NDArray[np.int64] | None = None,
) -> WeightedLoss:
    """Loss of the batch's entries (or of those given by index) from their own log-probabilities [E] and entropies
    [E].
    """
    pick = slice(None) if entries is None else entries
    device, dtype = logp.device, logp.dtype

    def constant(values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[pick])).to(device, dtype)

    terms = TokenTerms(
        logp=logp,
        entropy=entropy if objective.needs_entropy else None,
        behaviour=constant(batch.entry_logprob),
        recorded_proximal=constant(batch.entry_proximal),
        reference=constant(batch.entry_reference),
        advantage=constant(batch.entry_advantage),
        execution=torch.from_numpy(batch.entry_execution[pick].astype(np.int64)).to(device),
        execution_tokens=torch.from_numpy(batch.execution_tokens.copy()).to(device),
        execution_ids=batch.execution_ids,
    )
    result = objective(terms)
    weight = torch.from_numpy(np.ascontiguousarray(batch.entry_weight[pick])).to(device)
    version = torch.from_numpy(batch.entry_version[pick].astype(np.int64))
    return WeightedLoss(
        (weight * result.loss.to(torch.float64)).sum(),
        gather(result.seen, logp, terms.behaviour, entropy, version),
    )
