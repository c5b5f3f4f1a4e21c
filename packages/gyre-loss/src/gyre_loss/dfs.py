"""Depth first, one path in memory: the method that reaches a million tokens.

Each piece of a path (a *chunk*) is computed forward on the way down, keeping its keys and values only. On the way
back it is computed again with a graph, and its backward starts from its own loss and from the gradients of its keys
and values that everything below it has accumulated. The invariants: at any moment there are keys, values and their
gradients for one path and activations for one chunk; gradients equal those of ``packed``. Chunks without anything
below are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gyre_loss import tiles
from gyre_loss._check import fail
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout, segments
from gyre_loss.logprob import Logprobs, accumulator, linear_logprob
from gyre_loss.metrics import LossMetrics
from gyre_loss.model import TreeModel
from gyre_loss.objective import Objective
from gyre_loss.terms import Targets, weighted_loss


@dataclass(frozen=True, slots=True)
class DfsResult:
    """``loss``: float64 scalar; ``metrics``."""

    loss: Tensor
    metrics: LossMetrics


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start:stop``, the first at position ``depth`` of its path; ``leaf``: nothing stands below."""

    start: int
    stop: int
    depth: int
    leaf: bool


def walk(batch: TreeBatch, chunk_tokens: int) -> Iterator[tuple[Chunk, bool]]:
    """Chunks depth first: each once going down (False) and once coming back (True)."""
    if chunk_tokens < 1:
        fail("walking a tree depth first", f"chunk_tokens = {chunk_tokens}", "one token or more")
    pending: list[tuple[Chunk, int]] = []
    for part in segments(batch):
        while pending and pending[-1][1] <= part.start:
            yield pending.pop()[0], True
        for start in range(part.start, part.stop, chunk_tokens):
            stop = min(start + chunk_tokens, part.stop)
            leaf = stop == part.end
            chunk = Chunk(start, stop, part.depth + start - part.start, leaf)
            yield chunk, False
            pending.append((chunk, part.end))
    while pending:
        yield pending.pop()[0], True


class PathAttention:
    """Attention of one chunk over its path; holds the path's keys and values and their gradients.

    Buffers per layer [Hkv, longest path, D], made on first use. ``enter`` sets the chunk; in a forward with gradients
    the chunk's own keys and values are remembered with their graph. ``descending``: only keys and values are wanted,
    so the last layer's attention, which no key depends on, is skipped.
    """

    def __init__(self, layers: int, length: int) -> None:
        """``length``: tokens on the longest path."""
        self._length = length
        self._cache: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._grads: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._depth = 0
        self._descending = False
        self.own: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(self, chunk: Chunk, descending: bool = False) -> None:
        """The next forward computes ``chunk``."""
        self._depth = chunk.depth
        self._descending = descending
        self.own = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention over the path so far and, causally, the chunk itself."""
        if window is not None:
            fail(
                f"computing tree attention in layer {layer}",
                f"a sliding window of {window} tokens",
                "full attention with method='dfs'",
                'Use method="packed" with attention="dense" or "flex", or method="branches".',
            )
        if torch.is_grad_enabled():
            self.own[layer] = (key, value)
        past = self._buffers(self._cache, layer, key, key.dtype)
        end = self._depth + key.shape[1]
        with torch.no_grad():
            past[0][:, self._depth : end] = key
            past[1][:, self._depth : end] = value
        if self._descending and layer == len(self._cache) - 1:
            return query
        ahead = (past[0][:, : self._depth], past[1][:, : self._depth])
        grads: tuple[Tensor, Tensor] | None = None
        if torch.is_grad_enabled():
            whole = self._buffers(self._grads, layer, key, accumulator(key))
            grads = (whole[0][:, : self._depth], whole[1][:, : self._depth])
        out: Tensor = _PathAttention.apply(query, key, value, ahead, grads, scale)
        return out

    def take_grads(self, chunk: Chunk) -> tuple[list[Tensor], list[Tensor]]:
        """The chunk's keys and values and the gradients that were accumulated for them; the buffers are cleared."""
        tensors: list[Tensor] = []
        grads: list[Tensor] = []
        span = slice(chunk.depth, chunk.depth + chunk.stop - chunk.start)
        for layer, pair in self.own.items():
            buffers = self._grads[layer]
            assert buffers is not None
            for tensor, buffer in zip(pair, buffers, strict=True):
                if not chunk.leaf and tensor.requires_grad:
                    tensors.append(tensor)
                    grads.append(buffer[:, span].to(tensor.dtype, copy=True))
                buffer[:, span].zero_()
        return tensors, grads

    def _buffers(
        self, store: list[tuple[Tensor, Tensor] | None], layer: int, like: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        found = store[layer]
        if found is None:
            shape = (like.shape[0], self._length, like.shape[2])
            found = (
                torch.zeros(shape, dtype=dtype, device=like.device),
                torch.zeros(shape, dtype=dtype, device=like.device),
            )
            store[layer] = found
        return found


class _PathAttention(torch.autograd.Function):
    """Own block causally, path block fully; backward adds the path's share to its buffers in place."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past: tuple[Tensor, Tensor],
        grads: tuple[Tensor, Tensor] | None,
        scale: float,
    ) -> Tensor:
        out, lse = tiles.forward(query, key, value, scale, True)
        if past[0].shape[1]:
            wide = out.to(accumulator(query), copy=True)
            tiles.join(wide, lse, *tiles.forward(query, past[0], past[1], scale, False))
            out = wide.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.rest = (past, grads, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        past, grads, scale = ctx.rest
        grad = grad_outputs[0]
        d_query, d_key, d_value = tiles.backward(grad, query, key, value, out, lse, scale, True)
        if past[0].shape[1]:
            share = tiles.backward(grad, query, past[0], past[1], out, lse, scale, False)
            d_query = d_query + share[0]
            grads[0].add_(share[1])
            grads[1].add_(share[2])
        return d_query, d_key, d_value, None, None, None


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
            temperature,
        )

    def mine(self, chunk: Chunk) -> NDArray[np.int64]:
        """Targets (indices into [U]) that a token of the chunk predicts."""
        first, last = np.searchsorted(self.sorted_row, [chunk.start, chunk.stop])
        return self.by_row[first:last]

    def forward(self, chunk: Chunk, descending: bool = False) -> Tensor:
        self.attention.enter(chunk, descending)
        span = slice(chunk.start, chunk.stop)
        return self.model.hidden(self.ids[span], self.positions[span], self.attention)

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
