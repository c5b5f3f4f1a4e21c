"""Depth first, one path in memory: the method that reaches a million tokens.

Each piece of a path (a *chunk*) is computed forward on the way down, keeping its keys and values only. On the way
back it is computed again with a graph, and its backward starts from its own loss and from the gradients of its keys
and values that everything below it has accumulated. The invariants: at any moment there are keys, values and their
gradients for one path and activations for one chunk; gradients equal those of ``packed``. Chunks without anything
below are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout
from gyre_loss.logprob import Logprobs, accumulator, linear_logprob
from gyre_loss.metrics import LossMetrics
from gyre_loss.model import TreeModel
from gyre_loss.objective import Objective
from gyre_loss.path import Chunk, PathAttention, walk
from gyre_loss.terms import Targets, recorded_experts, weighted_loss


@dataclass(frozen=True, slots=True)
class DfsResult:
    """``loss``: float64 scalar; ``metrics``."""

    loss: Tensor
    metrics: LossMetrics


@dataclass(frozen=True, slots=True, eq=False)
class _Walker:
    """What one walk over a batch needs at every chunk."""

    model: TreeModel
    batch: TreeBatch
    ids: Tensor
    positions: Tensor
    targets: Targets
    by_row: NDArray[np.int64]
    sorted_row: NDArray[np.int64]
    attention: PathAttention
    experts: Tensor | None
    temperature: float

    @classmethod
    def of(cls, model: TreeModel, batch: TreeBatch, temperature: float) -> _Walker:
        place = Layout.of(batch)
        targets = Targets.of(batch, place)
        by_row = np.argsort(targets.row, kind="stable")
        return cls(
            model,
            batch,
            torch.from_numpy(batch.token_ids.astype(np.int64)).to(model.device),
            torch.from_numpy(place.position).to(model.device),
            targets,
            by_row,
            targets.row[by_row],
            PathAttention(model.layers, place.longest_path),
            recorded_experts(batch, model.device),
            temperature,
        )

    def mine(self, chunk: Chunk) -> NDArray[np.int64]:
        """Targets (indices into [U]) that a token of the chunk predicts."""
        first, last = np.searchsorted(self.sorted_row, [chunk.start, chunk.stop])
        return self.by_row[first:last]

    def forward(self, chunk: Chunk, descending: bool = False) -> Tensor:
        self.attention.enter(chunk, descending)
        span = slice(chunk.start, chunk.stop)
        experts = None if self.experts is None else self.experts[span]
        return self.model.hidden(self.ids[span], self.positions[span], self.attention, experts)

    def logprobs(self, hidden: Tensor, chunk: Chunk, mine: NDArray[np.int64], entropy: bool) -> Logprobs:
        rows = torch.from_numpy(self.targets.row[mine] - chunk.start).to(hidden.device)
        wanted = self.ids[torch.from_numpy(self.targets.token[mine]).to(self.ids.device)]
        head = self.model.head()
        return linear_logprob(
            hidden[rows],
            head.weight,
            wanted,
            bias=head.bias,
            temperature=self.temperature,
            entropy=entropy,
            group=head.group,
        )


@torch.no_grad()
def logprobs(model: TreeModel, batch: TreeBatch, temperature: float, chunk_tokens: int, entropy: bool) -> Logprobs:
    """Log-probabilities [U] (and entropies) of the batch's targets, without gradient, one path in memory."""
    walker = _Walker.of(model, batch, temperature)
    count = walker.targets.token.shape[0]
    logp: Tensor | None = None
    ent: Tensor | None = None
    for chunk, back in walk(batch, chunk_tokens):
        if back:
            continue
        hidden = walker.forward(chunk)
        mine = walker.mine(chunk)
        if logp is None:
            logp = torch.zeros(count, dtype=accumulator(hidden), device=hidden.device)
            ent = torch.zeros_like(logp)
        if mine.shape[0]:
            part = walker.logprobs(hidden, chunk, mine, entropy)
            at = torch.from_numpy(mine).to(logp.device)
            logp[at] = part.logp
            if part.entropy is not None and ent is not None:
                ent[at] = part.entropy
    assert logp is not None
    return Logprobs(logp, ent if entropy else None)


def accumulate(
    model: TreeModel,
    batch: TreeBatch,
    objective: Objective,
    temperature: float,
    chunk_tokens: int,
    entropy: bool,
) -> DfsResult:
    """Add the batch's gradient to the parameters' ``.grad``; returns the detached loss.

    Objectives that look at whole executions take a first pass for their log-probabilities.
    """
    walker = _Walker.of(model, batch, temperature)
    want_entropy = entropy or objective.needs_entropy
    given = _first_pass(walker, objective, chunk_tokens, want_entropy) if objective.whole_executions else None
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    metrics = LossMetrics()
    for chunk, back in walk(batch, chunk_tokens):
        if not back:
            if not chunk.leaf:
                with torch.no_grad():
                    walker.forward(chunk, descending=True)
            continue
        with torch.enable_grad():
            hidden = walker.forward(chunk)
            mine = walker.mine(chunk)
            pieces: list[Tensor] = []
            seeds: list[Tensor | None] = []
            if mine.shape[0]:
                part = walker.logprobs(hidden, chunk, mine, want_entropy)
                if given is None:
                    result = _chunk_loss(walker, objective, part, mine)
                    total += result.loss.detach()
                    metrics = metrics + result.metrics
                    pieces, seeds = [result.loss], [None]
                else:
                    pieces, seeds = _seeded(part, given, mine)
        tensors, grads = walker.attention.take_grads(chunk)
        _backward([*pieces, *tensors], [*seeds, *grads])
    if given is not None:
        return DfsResult(given.loss, given.metrics)
    return DfsResult(total, metrics)


def loss(
    model: TreeModel,
    batch: TreeBatch,
    objective: Objective,
    temperature: float,
    chunk_tokens: int,
    entropy: bool,
) -> DfsResult:
    """The loss with a ``backward`` that adds gradients computed here already; they are held until then."""
    parameters = list(model.parameters())
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        done = accumulate(model, batch, objective, temperature, chunk_tokens, entropy)
        grads = [parameter.grad for parameter in parameters]
    finally:
        for parameter, grad in zip(parameters, kept, strict=True):
            parameter.grad = grad
    value: Tensor = _Held.apply(done.loss, grads, *parameters)
    return DfsResult(value, done.metrics)


class _Held(torch.autograd.Function):
    """A scalar whose gradients by the parameters are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, grads: Sequence[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.grads = grads
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        scale = grad_outputs[0]
        scaled = (None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.grads)
        return None, None, *scaled


@dataclass(frozen=True, slots=True)
class _Given:
    """Loss of the whole batch and its gradients by each target's log-probability [U] and entropy [U]."""

    loss: Tensor
    metrics: LossMetrics
    d_logp: Tensor
    d_entropy: Tensor | None


def _first_pass(walker: _Walker, objective: Objective, chunk_tokens: int, entropy: bool) -> _Given:
    found = logprobs(walker.model, walker.batch, walker.temperature, chunk_tokens, entropy)
    with torch.enable_grad():
        logp = found.logp.requires_grad_()
        ent = None if found.entropy is None else found.entropy.requires_grad_()
        at = torch.from_numpy(walker.targets.of_entry).to(logp.device)
        result = weighted_loss(walker.batch, objective, logp[at], None if ent is None else ent[at])
        wanted = [logp] if ent is None else [logp, ent]
        grads = torch.autograd.grad(result.loss, wanted, allow_unused=True)
    d_entropy = grads[1] if len(grads) > 1 else None
    d_logp = torch.zeros_like(logp) if grads[0] is None else grads[0]
    return _Given(result.loss.detach(), result.metrics, d_logp, d_entropy)


def _seeded(part: Logprobs, given: _Given, mine: NDArray[np.int64]) -> tuple[list[Tensor], list[Tensor | None]]:
    at = torch.from_numpy(mine).to(part.logp.device)
    pieces, seeds = [part.logp], [given.d_logp[at]]
    if part.entropy is not None and given.d_entropy is not None:
        pieces.append(part.entropy)
        seeds.append(given.d_entropy[at])
    return pieces, list(seeds)


def _chunk_loss(walker: _Walker, objective: Objective, part: Logprobs, mine: NDArray[np.int64]) -> DfsResult:
    first = np.searchsorted(walker.targets.of_entry, mine)
    count = np.searchsorted(walker.targets.of_entry, mine, side="right") - first
    of_part = np.repeat(np.arange(mine.shape[0]), count)
    entries = np.repeat(first - np.concatenate([[0], np.cumsum(count)[:-1]]), count) + np.arange(of_part.shape[0])
    at = torch.from_numpy(of_part).to(part.logp.device)
    entropy = None if part.entropy is None else part.entropy[at]
    result = weighted_loss(walker.batch, objective, part.logp[at], entropy, entries)
    return DfsResult(result.loss, result.metrics)


def _backward(tensors: Sequence[Tensor], seeds: Sequence[Tensor | None]) -> None:
    live = [(t, s) for t, s in zip(tensors, seeds, strict=True) if t.requires_grad]
    if live:
        torch.autograd.backward([t for t, _ in live], [s for _, s in live])
