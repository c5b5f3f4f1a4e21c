"""One forward pass over a mixed batch: decode rows and prefill chunks, flattened to [tokens].

Invariant: pure but for what `kv` writes; a row's result depends on its own sequence only. Follows the Llama and
Qwen3 definitions (RMSNorm, rotary halves, grouped queries, SwiGLU); equal to transformers' to rounding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from gyre_local.model.weights import Weights


class Attention(Protocol):
    """The batch's view of the KV: written and read once a layer."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store k, v [tokens, K, D] of the batch's tokens, then attend with q [tokens, H, D] → [tokens, H, D]."""


def forward(
    weights: Weights, ids: torch.Tensor, positions: torch.Tensor, kv: Attention, rows: torch.Tensor | None
) -> torch.Tensor:
    """Logits, float32 [len(rows), vocab], of the tokens `ids` int64 [tokens] at `positions` int64 [tokens].

    `rows` int64 names the tokens whose logits are wanted; None means all.
    """
    arch = weights.arch
    tokens, size = ids.shape[0], arch.head_size
    queries, mixed = arch.heads, arch.heads + arch.kv_heads
    cos, sin = weights.rope.cos.index_select(0, positions), weights.rope.sin.index_select(0, positions)
    x = F.embedding(ids, weights.embed)
    for index, layer in enumerate(weights.layers):
        h = F.rms_norm(x, (arch.hidden,), layer.input_norm, arch.eps)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(tokens, mixed + arch.kv_heads, size)
        qk = qkv[:, :mixed]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (size,), None, arch.eps) * layer.qk_norm
        qk = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        mixed_values = kv.attend(index, qk[:, :queries], qk[:, queries:], qkv[:, mixed:])
        x = x + F.linear(mixed_values.reshape(tokens, queries * size), layer.out, layer.out_bias)
        h = F.rms_norm(x, (arch.hidden,), layer.post_norm, arch.eps)
        gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    if rows is not None:
        x = x.index_select(0, rows)
    return F.linear(F.rms_norm(x, (arch.hidden,), weights.norm, arch.eps), weights.head).float()
