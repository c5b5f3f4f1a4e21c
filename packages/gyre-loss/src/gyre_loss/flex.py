"""Tree attention by FlexAttention: for GPUs, where its compiled kernel skips the blocks that no path crosses.

The block mask is built from subtree ends, not by evaluating the mask at every pair: block j of keys matters to a
later block i of queries exactly if some subtree that j begins reaches i's first token, and matters to all of it
exactly if all of them reach its end. The invariant: same function as the dense mask. Sliding windows keep the blocks
and mask inside them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from gyre_loss._check import fail
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout

BLOCK = 128
"""Tokens per block: what the GPU kernel of FlexAttention works in."""


@cache
def _kernel(compiled: bool) -> Callable[..., Any]:
    return cast(Callable[..., Any], torch.compile(flex_attention, dynamic=True) if compiled else flex_attention)


@dataclass(frozen=True, slots=True, eq=False)
class FlexAttention:
    """``end`` and ``position`` int64[N padded to whole blocks] on the device; ``block_mask`` without a window.

    ``compiled``: the fused kernel (GPU); without it scores are materialised, which is for tests.
    """

    end: Tensor
    position: Tensor
    tokens: int
    partial: NDArray[np.bool_]
    full: NDArray[np.bool_]
    compiled: bool
    masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: TreeBatch, device: torch.device) -> FlexAttention:
        """The block masks of a forest; O(N + (N / BLOCK)^2)."""
        place = Layout.of(batch)
        partial, full = block_pattern(place.subtree_end)
        padding = partial.shape[0] * BLOCK - batch.tokens
        end = torch.from_numpy(np.pad(place.subtree_end, (0, padding))).to(device)
        position = torch.from_numpy(np.pad(place.position, (0, padding))).to(device)
        return cls(end, position, batch.tokens, partial, full, device.type == "cuda")

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        """Attention over paths, by FlexAttention; raises ValueError where it has no backward (CPU)."""
        if query.device.type == "cpu" and torch.is_grad_enabled() and query.requires_grad:
            fail(
                f"computing tree attention in layer {layer}",
                "FlexAttention with gradients on CPU, which torch does not have",
                "a GPU, or no gradients",
                'Use attention="blocked" on CPU.',
            )
        mask = self.masks.get(window)
        if mask is None:
            mask = self.masks[window] = self._block_mask(window)
        out: Tensor = _kernel(self.compiled)(
            query[None], key[None], value[None], block_mask=mask, scale=scale, enable_gqa=query.shape[0] != key.shape[0]
        )
        return out[0]

    def _block_mask(self, window: int | None) -> BlockMask:
        end, position = self.end, self.position

        def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            inside = (k <= q) & (q < end[k])
            return inside if window is None else inside & (position[q] - position[k] < window)

        partial, full = self.partial, self.full
        if window is not None:
            partial, full = partial | full, np.zeros_like(full)
        some_count, some_index = _rows(partial, end.device)
        full_count, full_index = _rows(full, end.device)
        return BlockMask.from_kv_blocks(
            some_count,
            some_index,
            full_count,
            full_index,
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
            seq_lengths=(self.tokens, self.tokens),
        )


def block_pattern(subtree_end: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool[B, B] twice (row: block of queries): blocks seen in part, blocks seen in full.

    >>> partial, full = block_pattern(np.full(3 * BLOCK, 3 * BLOCK))
    >>> partial.astype(int).tolist(), full.astype(int).tolist()
    ([[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[0, 0, 0], [1, 0, 0], [1, 1, 0]])
    """
    tokens = subtree_end.shape[0]
    blocks = -(-tokens // BLOCK)
    edges = np.arange(blocks) * BLOCK
    furthest = np.maximum.reduceat(subtree_end, edges)
    nearest = np.minimum.reduceat(subtree_end, edges)
    first, last = edges, np.minimum(edges + BLOCK, tokens)
    later = np.tri(blocks, k=-1, dtype=np.bool_)
    seen = later & (furthest[None] > first[:, None])
    full = later & (nearest[None] >= last[:, None]) & (last - first == BLOCK)[:, None]
    return (seen & ~full) | np.eye(blocks, dtype=np.bool_), full


def _rows(pattern: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """Per row: how many blocks, and their indices first, int32[1, 1, B] and int32[1, 1, B, B]."""
    order = np.argsort(~pattern, axis=1, kind="stable").astype(np.int32)
    count = pattern.sum(1, dtype=np.int32)
    return torch.from_numpy(count).to(device)[None, None], torch.from_numpy(order).to(device)[None, None]
