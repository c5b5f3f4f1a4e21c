"""The forest as one sequence under a tree mask: every token computed once.

The invariant: positions run along each path, and only the rows that predict a trained token reach the output head.
"""

from __future__ import annotations

import torch

from gyre_loss.attention import choose
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout
from gyre_loss.logprob import Logprobs, linear_logprob
from gyre_loss.model import TreeModel
from gyre_loss.terms import Targets, recorded_experts


def logprobs(
    model: TreeModel,
    batch: TreeBatch,
    place: Layout,
    targets: Targets,
    temperature: float,
    entropy: bool,
    attention: str,
) -> Logprobs:
    """Log-probabilities [U] (and entropies) of the batch's targets, with gradient."""
    device = model.device
    ids = torch.from_numpy(batch.token_ids.astype("int64")).to(device)
    positions = torch.from_numpy(place.position).to(device)
    hidden = model.hidden(ids, positions, choose(batch, place, device, attention), recorded_experts(batch, device))
    rows = torch.from_numpy(targets.row).to(device)
    wanted = ids[torch.from_numpy(targets.token).to(device)]
    head = model.head()
    return linear_logprob(
        hidden[rows],
        head.weight,
        wanted,
        bias=head.bias,
        temperature=temperature,
        entropy=entropy,
        group=head.group,
    )
