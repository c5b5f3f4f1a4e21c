"""One path in memory: walking a forest depth first, and attention of a chunk over the path above it.

A *chunk* is a run of tokens of one segment. The invariant: the buffers hold the keys and values, and their gradients
so far, of the chunks on the current path and of nothing else. Knows no loss and no parameters; ``gyre_loss.dfs``
drives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gyre_loss import tiles
from gyre_loss._check import fail
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import segments
from gyre_loss.logprob import accumulator


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
