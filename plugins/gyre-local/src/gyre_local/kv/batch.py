"""The KV side of one forward pass: where new keys and values go and what each row may see.

Invariant: the index tensors are made once a pass and shared by all layers; decode rows attend in one batched
product over the slots, prefill chunks one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from gyre_local.kv.pool import BlockPool
from gyre_local.kv.slots import SlotCache


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, stop) of one call, computed in this pass; `stop - start` is 1 for a decode row."""

    slot: int
    start: int
    stop: int


class BatchKV:
    """Attention over slots for `decode` spans (first rows of the batch, one each) and `chunks` (after them)."""

    def __init__(
        self, cache: SlotCache, pool: BlockPool, decode: Sequence[Span], chunks: Sequence[Span], pool_rows: torch.Tensor
    ) -> None:
        arch, device = cache.arch, cache.data.device
        self._cache, self._pool, self._pool_rows = cache, pool, pool_rows
        self._arch, self._chunks, self._decode = arch, chunks, len(decode)
        self._scale = arch.head_size**-0.5
        slots, capacity, heads = cache.slots, cache.capacity, arch.kv_heads
        spans = [*decode, *chunks]
        slot = np.repeat([s.slot for s in spans], [s.stop - s.start for s in spans])
        self.positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.stop) for s in spans])).to(device)
        part = np.arange(2)[:, None] * slots * heads + np.arange(heads)[None]
        base = torch.from_numpy((part.reshape(1, -1) + slot[:, None] * heads) * capacity).to(device)
        self._write = (base + self.positions[:, None]).flatten()
        self._masks = [self._chunk_mask(span) for span in chunks]
        self._staged: list[torch.Tensor] = []
        if decode:
            self._prepare_decode(decode)

    def _prepare_decode(self, decode: Sequence[Span]) -> None:
        """Slots up to the highest in use form the batch; a hole among them computes nothing anyone reads."""
        device, dtype = self._cache.data.device, self._cache.data.dtype
        used = [span.slot for span in decode]
        self._low, self._high = min(used), max(used) + 1
        width = self._high - self._low
        self._length = max(span.stop for span in decode)
        rows = np.zeros(width, np.int64)
        lengths = np.ones(width, np.int64)
        for row, span in enumerate(decode):
            rows[span.slot - self._low] = row
            lengths[span.slot - self._low] = span.stop
        in_order = width == len(decode) and used == sorted(used)
        self._spread = None if in_order else torch.from_numpy(rows).to(device)
        self._pick = None if in_order else torch.tensor([s - self._low for s in used], device=device)
        mask = torch.zeros((width, self._length), dtype=dtype, device=device)
        beyond = torch.arange(self._length, device=device) >= torch.from_numpy(lengths).to(device)[:, None]
        mask.masked_fill_(beyond, float("-inf"))
        self._mask = mask[:, None, None].expand(width, 1, self._arch.group, self._length)

    def _chunk_mask(self, span: Span) -> torch.Tensor | None:
        """bool [tokens, stop]: True where a query may look; None for a chunk that starts at 0 (plainly causal)."""
        if span.start == 0:
            return None
        device = self._cache.data.device
        queries = torch.arange(span.start, span.stop, device=device)
        return torch.arange(span.stop, device=device)[None] <= queries[:, None]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `model.forward.Attention`."""
        arch, data = self._arch, self._cache.data[layer]
        new = torch.cat([k, v], 1)
        data.view(-1, arch.head_size).index_copy_(0, self._write, new.view(-1, arch.head_size))
        self._staged.append(new)
        decoded = self._attend_decode(data, q[: self._decode]) if self._decode else None
        if not self._chunks:
            assert decoded is not None
            return decoded
        parts = [] if decoded is None else [decoded]
        row = self._decode
        for span, mask in zip(self._chunks, self._masks, strict=True):
            tokens = span.stop - span.start
            query = q[row : row + tokens].transpose(0, 1)[None]
            keys, values = data[:, span.slot, :, : span.stop].unsqueeze(1)
            found = F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=self._scale
            )
            parts.append(found[0].transpose(0, 1))
            row += tokens
        return torch.cat(parts)

    def _attend_decode(self, data: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """One query token a row, the queries of a group as the rows of a small product: [rows, K, H/K, D]."""
        arch = self._arch
        spread = q if self._spread is None else q.index_select(0, self._spread)
        query = spread.reshape(-1, arch.kv_heads, arch.group, arch.head_size)
        keys, values = data[:, self._low : self._high, :, : self._length]
        found = F.scaled_dot_product_attention(query, keys, values, attn_mask=self._mask, scale=self._scale)
        found = found.reshape(-1, arch.heads, arch.head_size)
        return found if self._pick is None else found.index_select(0, self._pick)

    def finite(self) -> list[bool]:
        """Of each chunk, whether its last layer's KV is finite. A token that went wrong in any layer shows there."""
        last, row, found = self._staged[-1], self._decode, []
        for span in self._chunks:
            tokens = span.stop - span.start
            found.append(bool(torch.isfinite(last[row : row + tokens]).all()))
            row += tokens
        return found

    def commit(self) -> None:
        """Write the pass's new KV to the pool, all layers at once."""
        arch = self._arch
        staged = torch.stack(self._staged)
        tokens = staged.shape[1]
        staged = staged.view(arch.layers, tokens, 2, arch.kv_heads, arch.head_size).permute(2, 0, 1, 3, 4)
        self._pool.data.index_copy_(2, self._pool_rows, staged)
