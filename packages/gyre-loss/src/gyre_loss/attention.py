"""Tree attention over a packed forest: each token sees its own path and nothing else.

Three computations of one function. ``DenseAttention`` masks (small forests, sliding windows); ``BlockedAttention``
walks the segments: a segment attends to itself causally, and everything below it attends to all of it, so no mask
exists, every slice is a view and the work is the number of (query, key) pairs; ``gyre_loss.flex`` builds
FlexAttention's block masks for GPUs. The invariant: token k is visible to token q exactly if ``k <= q <
subtree_end[k]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from gyre_loss import tiles
from gyre_loss._check import fail
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout, Segment, segments
from gyre_loss.logprob import accumulator

DENSE_LIMIT = 512
"""Forests of up to this many tokens use the dense mask on CPU, where it is the faster one."""


class Attention(Protocol):
    """What a model calls in each layer: query [H, n, D], key and value [Hkv, n, D] to output [H, n, D].

    ``layer`` is the index of the layer, ``window`` the sliding window in tokens of the path, or None.
    """

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """The layer's attention output."""


@dataclass(frozen=True, slots=True, eq=False)
class DenseAttention:
    """``mask`` bool[N, N] (row: query), ``distance`` int64[N, N] along the path. O(N^2) memory: small forests."""

    mask: Tensor
    distance: Tensor

    @classmethod
    def of(cls, place: Layout, device: torch.device) -> DenseAttention:
        """The dense mask of a forest."""
        end = torch.from_numpy(place.subtree_end).to(device)
        position = torch.from_numpy(place.position).to(device)
        index = torch.arange(end.shape[0], device=device)
        mask = (index[None] <= index[:, None]) & (index[:, None] < end[None])
        return cls(mask, position[:, None] - position[None])

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Masked scaled dot-product attention."""
        mask = self.mask if window is None else self.mask & (self.distance < window)
        return torch.nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], mask[None, None], scale=scale, enable_gqa=True
        )[0]


@dataclass(frozen=True, slots=True)
class BlockedAttention:
    """Segment by segment, O(N) memory; full attention only."""

    segments: tuple[Segment, ...]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention over paths by segments; raises ValueError for a sliding window."""
        if window is not None:
            fail(
                f"computing tree attention in layer {layer}",
                f"a sliding window of {window} tokens",
                "full attention",
                'Use attention="dense" for small forests, "flex" on a GPU, or method="branches".',
            )
        out: Tensor = _BlockedAttention.apply(query, key, value, self.segments, scale)
        return out


class _BlockedAttention(torch.autograd.Function):
    """Blocks joined by log-sum-exp forward; each block's share added backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, parts: Sequence[Segment], scale: float) -> Tensor:
        out = torch.empty(query.shape, dtype=accumulator(query), device=query.device)
        lse = torch.empty(query.shape[:2], dtype=accumulator(query), device=query.device)
        for part in parts:
            own = slice(part.start, part.stop)
            out[:, own], lse[:, own] = tiles.forward(query[:, own], key[:, own], value[:, own], scale, True)
        for part in parts:
            if part.stop < part.end:
                own, below = slice(part.start, part.stop), slice(part.stop, part.end)
                block = tiles.forward(query[:, below], key[:, own], value[:, own], scale, False)
                tiles.join(out[:, below], lse[:, below], *block)
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.options = (parts, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        parts, scale = ctx.options
        grad = grads[0]
        d_query, d_key, d_value = (torch.empty_like(t, dtype=accumulator(t)) for t in (query, key, value))
        for part in parts:
            own = slice(part.start, part.stop)
            d_query[:, own], d_key[:, own], d_value[:, own] = _share(
                grad, query, key, value, out, lse, own, own, scale, True
            )
        for part in parts:
            if part.stop < part.end:
                own, below = slice(part.start, part.stop), slice(part.stop, part.end)
                share = _share(grad, query, key, value, out, lse, below, own, scale, False)
                d_query[:, below] += share[0]
                d_key[:, own] += share[1]
                d_value[:, own] += share[2]
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None


def _share(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: slice,
    columns: slice,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return tiles.backward(
        grad[:, rows],
        query[:, rows],
        key[:, columns],
        value[:, columns],
        out[:, rows],
        lse[:, rows],
        scale,
        causal,
    )


def choose(batch: TreeBatch, place: Layout, device: torch.device, kind: str = "auto") -> Attention:
    """The attention for a forest: ``"dense"``, ``"blocked"``, ``"flex"``, or ``"auto"``.

    Auto: dense up to ``DENSE_LIMIT`` tokens, above it flex on a GPU and blocked elsewhere.
    """
    if kind == "auto":
        large = "flex" if device.type == "cuda" else "blocked"
        kind = "dense" if batch.tokens <= DENSE_LIMIT else large
    if kind == "dense":
        return DenseAttention.of(place, device)
    if kind == "blocked":
        return BlockedAttention(segments(batch))
    if kind == "flex":
        from gyre_loss.flex import FlexAttention

        return FlexAttention.of(batch, device)
    return fail("choosing a tree attention", f"kind {kind!r}", "'auto', 'dense', 'blocked' or 'flex'")
