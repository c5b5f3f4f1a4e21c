"""The oracle: every root-to-leaf path as a sequence of its own, through the model's own attention.

Shares no code with the tree methods but the border to the model: plain forward, plain log-softmax over full logits of
the rows that train. A target is read from the first path that holds it. The invariant: slow and obviously right. It
also serves models with recurrent layers.
"""

from __future__ import annotations

import numpy as np
import torch

from gyre_loss.batch import TreeBatch
from gyre_loss.layout import paths
from gyre_loss.logprob import Logprobs, accumulator, linear_logprob
from gyre_loss.model import TreeModel
from gyre_loss.terms import Targets, recorded_experts


def logprobs(model: TreeModel, batch: TreeBatch, targets: Targets, temperature: float, entropy: bool) -> Logprobs:
    """Log-probabilities [U] (and entropies) of the batch's targets, with gradient."""
    head = model.head()
    experts = recorded_experts(batch, model.device)
    done = np.zeros(batch.tokens, np.bool_)
    token_of, values, entropies = [], [], []
    is_target = np.zeros(batch.tokens, np.bool_)
    is_target[targets.token] = True
    for path in paths(batch):
        mine = np.flatnonzero(is_target[path] & ~done[path])
        if not mine.shape[0]:
            continue
        done[path[mine]] = True
        token_of.append(path[mine])
        ids = torch.from_numpy(batch.token_ids[path].astype(np.int64)).to(model.device)
        at = torch.from_numpy(mine).to(model.device)
        hidden = model.causal_hidden(ids, None if experts is None else experts[path])[at - 1]
        if head.group is not None:
            part = linear_logprob(
                hidden, head.weight, ids[at], temperature=temperature, entropy=entropy, group=head.group
            )
            values.append(part.logp)
            if part.entropy is not None:
                entropies.append(part.entropy)
            continue
        logits = torch.nn.functional.linear(hidden, head.weight, head.bias).to(accumulator(hidden)) / temperature
        log_p = torch.log_softmax(logits, -1)
        values.append(log_p.gather(1, ids[at][:, None]).squeeze(1))
        if entropy:
            entropies.append(-(log_p.exp() * log_p).sum(-1))
    order = torch.from_numpy(np.argsort(np.concatenate(token_of))).to(model.device)
    return Logprobs(torch.cat(values)[order], torch.cat(entropies)[order] if entropy else None)
