"""Tree attention over a packed forest: each token sees its own path and nothing else.

Three computations of one function. ``DenseAttention`` masks (small forests, sliding windows).
``BlockedAttention`` walks the segments: a segment attends to itself causally, and everything below it attends
to all of it, so there is no mask, every slice is a view and the work is the number of (query, key) pairs;
small subtrees are done several at a time under a small mask. ``gyre_loss.flex`` builds FlexAttention's block
masks for GPUs. The invariant: token k is visible to token q exactly if ``k <= q < subtree_end[k]``.
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


CLUSTER_LIMIT = 256
"""Subtrees of up to this many tokens together are one masked block of ``BlockedAttention``."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Queries ``rows`` over keys ``columns``: all of them, causally, or as ``mask`` bool[n, n] says."""

    rows: slice
    columns: slice
    causal: bool = False
    mask: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockedAttention:
    """Block by block, O(N) memory; full attention only.

    ``own`` tile the tokens: each is a segment over itself, or a cluster of small subtrees under a mask. ``above``: what
    stands below a segment, over that segment.
    """

    own: tuple[Block, ...]
    above: tuple[Block, ...]

    @classmethod
    def of(cls, batch: TreeBatch, place: Layout, device: torch.device) -> BlockedAttention:
        """The blocks of a forest."""
        own: list[Block] = []
        above: list[Block] = []
        parts, clusters = cluster(segments(batch))
        for part in parts:
            inside, below = slice(part.start, part.stop), slice(part.stop, part.end)
            own.append(Block(inside, inside, causal=True))
            if part.stop < part.end:
                above.append(Block(below, inside))
        end = torch.from_numpy(place.subtree_end).to(device)
        for start, stop in clusters:
            index = torch.arange(start, stop, device=device)
            mask = (index[None] <= index[:, None]) & (index[:, None] < end[None, start:stop])
            own.append(Block(slice(start, stop), slice(start, stop), mask=mask))
        return cls(tuple(own), tuple(above))

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention over paths by blocks; raises ValueError for a sliding window."""
        if window is not None:
            fail(
                f"computing tree attention in layer {layer}",
                f"a sliding window of {window} tokens",
                "full attention",
                'Use attention="dense" for small forests, "flex" on a GPU, or method="branches".',
            )
        out: Tensor = _BlockedAttention.apply(query, key, value, self.own, self.above, scale)
        return out


def cluster(parts: Sequence[Segment]) -> tuple[list[Segment], list[tuple[int, int]]]:
    """Segments that stand alone, and ranges ``start, stop`` of whole subtrees that are small together.

    A range holds every token that sees a token of it, so one masked block serves for it, instead of a call per segment.
    """
    alone: list[Segment] = []
    found: list[tuple[int, int]] = []
    done = 0
    for part in parts:
        if part.start < done:
            continue
        if part.end - part.start > CLUSTER_LIMIT:
            alone.append(part)
            continue
        if found and found[-1][1] == part.start and part.end - found[-1][0] <= CLUSTER_LIMIT:
            found[-1] = (found[-1][0], part.end)
        else:
            found.append((part.start, part.end))
        done = part.end
    return alone, found


class _BlockedAttention(torch.autograd.Function):
    """Blocks joined by log-sum-exp forward; each block's share added backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        own: Sequence[Block],
        above: Sequence[Block],
        scale: float,
    ) -> Tensor:
        out = torch.empty(query.shape, dtype=accumulator(query), device=query.device)
        lse = torch.empty(query.shape[:2], dtype=accumulator(query), device=query.device)
        for block in own:
            out[:, block.rows], lse[:, block.rows] = _output(query, key, value, block, scale)
        for block in above:
            tiles.join(out[:, block.rows], lse[:, block.rows], *_output(query, key, value, block, scale))
        result = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.options = (own, above, scale)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        own, above, scale = ctx.options
        d_query, d_key, d_value = (torch.empty_like(t, dtype=accumulator(t)) for t in (query, key, value))
        for block in (*own, *above):
            share = tiles.backward(
                grads[0][:, block.rows],
                query[:, block.rows],
                key[:, block.columns],
                value[:, block.columns],
                out[:, block.rows],
                lse[:, block.rows],
                scale,
                block.causal,
                block.mask,
            )
            places = (block.rows, block.columns, block.columns)
            for total, place, part in zip((d_query, d_key, d_value), places, share, strict=True):
                if block.rows == block.columns:
                    total[:, place] = part
                else:
                    total[:, place] += part
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _output(query: Tensor, key: Tensor, value: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    rows, columns = block.rows, block.columns
    return tiles.forward(query[:, rows], key[:, columns], value[:, columns], scale, block.causal, block.mask)


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
        return BlockedAttention.of(batch, place, device)
    if kind == "flex":
        from gyre_loss.flex import FlexAttention

        return FlexAttention.of(batch, device)
    return fail("choosing a tree attention", f"kind {kind!r}", "'auto', 'dense', 'blocked' or 'flex'")
