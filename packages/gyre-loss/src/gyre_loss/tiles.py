"""Attention of one block of queries over one block of keys, with what is needed to join blocks.

``forward`` gives the block's output and log-sum-exp, ``join`` folds it into running ones, ``backward`` gives a
block's exact share of the gradients from the *joined* output and log-sum-exp. The invariant: memory is linear in
queries and keys. On CPU the blocks go through torch's own flash kernel; elsewhere, and where that kernel is missing,
through plain products cut into blocks. Shapes: query [H, n, D], key and value [Hkv, m, D], log-sum-exp [H, n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gyre_loss.logprob import accumulator

CHUNK = 2048
"""Queries and keys per block of the plain products."""


def _cpu_kernel(name: str) -> Callable[..., Any] | None:
    packet = getattr(torch.ops.aten, name, None)
    return None if packet is None else packet.default


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [H, n, D] and log-sum-exp [H, n] of a block.

    ``causal`` needs n = m; ``mask`` bool[n, m] (true: visible, at least one in each row) is for small blocks.
    """
    kernel = _cpu_kernel("_scaled_dot_product_flash_attention_for_cpu")
    if query.device.type != "cpu" or kernel is None:
        return _plain_forward(query, key, value, scale, causal, mask)
    bias = _bias(mask, query)
    out, lse = kernel(query[None], key[None], value[None], 0.0, causal, attn_mask=bias, scale=scale)
    return out[0], lse[0]


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's share of the gradients of query, key and value, given the joined ``out`` and ``lse``."""
    kernel = _cpu_kernel("_scaled_dot_product_flash_attention_for_cpu_backward")
    if query.device.type != "cpu" or kernel is None:
        return _plain_backward(grad, query, key, value, out, lse, scale, causal, mask)
    heads, kv_heads = query.shape[0], key.shape[0]
    many_key, many_value = _repeat(key, heads), _repeat(value, heads)
    rest = (query[None], many_key[None], many_value[None], out[None], lse[None], 0.0, causal)
    d_query, d_key, d_value = kernel(grad[None], *rest, attn_mask=_bias(mask, query), scale=scale)
    if heads != kv_heads:
        d_key = d_key.view(kv_heads, heads // kv_heads, *key.shape[1:]).sum(1)[None]
        d_value = d_value.view(kv_heads, heads // kv_heads, *value.shape[1:]).sum(1)[None]
    return d_query[0], d_key[0], d_value[0]


def join(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold a block's output and log-sum-exp into the running ones, in place."""
    both = torch.logaddexp(lse, block_lse)
    out.mul_(torch.exp(lse - both).nan_to_num_(0.0)[..., None])
    out.addcmul_(block_out.to(out.dtype), torch.exp(block_lse - both).nan_to_num_(0.0)[..., None])
    lse.copy_(both)


def _bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """0 where visible, -inf elsewhere, in the dtype of ``like``."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -torch.inf)


def _repeat(tensor: Tensor, heads: int) -> Tensor:
    kv_heads = tensor.shape[0]
    if kv_heads == heads:
        return tensor
    wide = tensor[:, None].expand(kv_heads, heads // kv_heads, *tensor.shape[1:])
    return wide.reshape(heads, *tensor.shape[1:])


def _blocks(rows: int, columns: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Pairs of row and column slices that cover what may be seen, row by row."""
    for top in range(0, rows, CHUNK):
        bottom = min(top + CHUNK, rows)
        for left in range(0, bottom if causal else columns, CHUNK):
            yield slice(top, bottom), slice(left, min(left + CHUNK, columns))


def _scores(
    query: Tensor, key: Tensor, scale: float, causal: bool, mask: Tensor | None, rows: slice, columns: slice
) -> Tensor:
    """Scores [H, r, c] of the block at these rows and columns, -inf where a key is not visible."""
    scores = (query @ key.transpose(-1, -2)).to(accumulator(query)) * scale
    at = (rows.start, columns.start)
    if mask is not None:
        scores = scores.masked_fill(~mask[rows, columns], -torch.inf)
    if causal and at[1] + key.shape[1] > at[0]:
        row = torch.arange(at[0], at[0] + query.shape[1], device=query.device)[:, None]
        column = torch.arange(at[1], at[1] + key.shape[1], device=query.device)[None]
        scores = scores.masked_fill(column > row, -torch.inf)
    return scores


def _plain_forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads, wide = query.shape[0], accumulator(query)
    out = torch.zeros(query.shape, dtype=wide, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=wide, device=query.device)
    for rows, columns in _blocks(query.shape[1], key.shape[1], causal):
        part_k = _repeat(key[:, columns], heads)
        scores = _scores(query[:, rows], part_k, scale, causal, mask, rows, columns)
        block_lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - block_lse[..., None]).nan_to_num_(0.0).to(value.dtype)
        join(out[:, rows], lse[:, rows], weights @ _repeat(value[:, columns], heads), block_lse)
    return out.to(query.dtype), lse


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, wide = query.shape[0], key.shape[0], accumulator(query)
    delta = (grad.to(wide) * out.to(wide)).sum(-1)
    d_query, d_key, d_value = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (query, key, value))
    for rows, columns in _blocks(query.shape[1], key.shape[1], causal):
        part_q, part_g = query[:, rows], grad[:, rows]
        part_k, part_v = _repeat(key[:, columns], heads), _repeat(value[:, columns], heads)
        scores = _scores(part_q, part_k, scale, causal, mask, rows, columns)
        p = torch.exp(scores - lse[:, rows, None])
        d_p = (part_g @ part_v.transpose(-1, -2)).to(wide)
        d_scores = (p * (d_p - delta[:, rows, None]) * scale).to(query.dtype)
        shape = (kv_heads, heads // kv_heads, *part_k.shape[1:])
        d_query[:, rows] += d_scores @ part_k
        d_key[:, columns] += (d_scores.transpose(-1, -2) @ part_q).view(shape).sum(1)
        d_value[:, columns] += (p.to(grad.dtype).transpose(-1, -2) @ part_g).view(shape).sum(1)
    return d_query.to(query.dtype), d_key, d_value
