"""Log-probability and entropy of chosen tokens without the logits: chunked over rows and vocabulary.

``linear_logprob(hidden [R, h], weight [V, h], targets [R])`` gives log softmax(hidden @ weight.T)[target] and, if
asked, the entropy of each row, with an online log-sum-exp over vocabulary chunks; backward computes the chunks again,
but for a bounded amount that is kept. The invariant: nothing larger than ``row_chunk x vocab_chunk`` exists, in
either direction, and rows whose gradient is zero cost nothing backward. The caller passes only rows that train. With
``group`` the vocabulary is split over the ranks of a tensor-parallel process group; the result is the same on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_loss._check import fail

_DOING = "computing log-probabilities"
TILE_BYTES = 8 << 20
"""Target size of one tile of logits on CPU: small enough for the last-level cache."""
GPU_TILE_BYTES = 256 << 20
KEEP_BYTES = 256 << 20
"""Logits kept from forward for backward, at most; what does not fit is computed again."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows and vocabulary entries per tile of logits; ``keep_bytes`` of tiles are kept for backward."""

    row_chunk: int
    vocab_chunk: int
    keep_bytes: int = KEEP_BYTES

    def __post_init__(self) -> None:
        """Check that both are positive; raises ValueError."""
        if self.row_chunk < 1 or self.vocab_chunk < 1 or self.keep_bytes < 0:
            fail(
                _DOING,
                f"chunks of {self.row_chunk} rows x {self.vocab_chunk} entries, {self.keep_bytes} bytes kept",
                "positive chunk sizes and zero bytes or more",
            )

    @classmethod
    def choose(cls, rows: int, vocab: int, hidden: Tensor) -> Tiling:
        """Tiles of ``TILE_BYTES`` on CPU, ``GPU_TILE_BYTES`` elsewhere."""
        budget = (TILE_BYTES if hidden.device.type == "cpu" else GPU_TILE_BYTES) // accumulator(hidden).itemsize
        vocab_chunk = min(vocab, 8192)
        return cls(max(1, min(rows, budget // vocab_chunk)), vocab_chunk)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """``logp`` [R] and ``entropy`` [R] (nats; None if not asked for), float32 or wider."""

    logp: Tensor
    entropy: Tensor | None


def accumulator(tensor: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    tiling: Tiling | None = None,
    group: dist.ProcessGroup | None = None,
    vocab: int | None = None,
) -> Logprobs:
    """Log-probabilities of ``targets`` int64[R] under softmax((hidden @ weight.T + bias) / temperature).

    ``hidden`` [R, h]; ``weight`` [V, h], or this rank's [V / ranks, h] with ``group`` (equal shares, in rank order);
    ``bias`` [V] or None. ``vocab``: how many tokens there are, where the head has more rows than that (padding, which
    the engine that sampled did not count); default all rows. Gradients go to hidden, weight and bias; with ``group``
    the gradient of hidden is already summed over the ranks. Raises ValueError for shapes that do not fit, targets out
    of range, a temperature not above 0.
    """
    shards, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    rows = weight.shape[0]
    known = rows * shards if vocab is None else vocab
    _check(hidden, weight, targets, bias, temperature, rows * shards, known)
    real = min(rows, max(0, known - rank * rows))
    if real < rows:
        weight, bias = weight[:real], None if bias is None else bias[:real]
    local = targets if group is None else targets - rank * rows
    chosen = tiling or Tiling.choose(hidden.shape[0], max(1, real), hidden)
    if not torch.is_grad_enabled():
        chosen = replace(chosen, keep_bytes=0)
    logp, ent = _LinearLogprob.apply(hidden, weight, bias, local, float(temperature), entropy, chosen, group)
    return Logprobs(logp, ent if entropy else None)


def _check(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    rows: int,
    vocab: int,
) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        fail(_DOING, f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}", "[R, h] and [V, h]")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        fail(_DOING, f"targets {targets.dtype}{tuple(targets.shape)}", f"int64[{hidden.shape[0]}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        fail(_DOING, f"bias {tuple(bias.shape)}", f"[{weight.shape[0]}]")
    if not temperature > 0:
        fail(_DOING, f"temperature = {temperature}", "a temperature above 0", "Greedy sampling has no gradient.")
    if not 0 < vocab <= rows:
        fail(_DOING, f"vocab = {vocab}", f"at least 1 and at most {rows}, the rows of the head")
    if targets.numel() and not bool(((targets >= 0) & (targets < vocab)).all()):
        bad = int(((targets < 0) | (targets >= vocab)).nonzero()[0])
        fail(_DOING, f"targets[{bad}] = {int(targets[bad])}", f"a token below the vocabulary of {vocab}")


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """One tile of logits in the accumulator's precision, [r, v]."""
    tile = (hidden @ weight.T).to(accumulator(hidden))
    if bias is not None:
        tile = tile.add_(bias)
    return tile if temperature == 1.0 else tile.div_(temperature)


class _LinearLogprob(torch.autograd.Function):
    """Forward keeps [R]-sized statistics; backward walks the tiles again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        local: Tensor,
        temperature: float,
        want_entropy: bool,
        tiling: Tiling,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        rows, dtype = hidden.shape[0], accumulator(hidden)
        top = torch.full((rows,), -torch.inf, dtype=dtype, device=hidden.device)
        total, moment, chosen = (torch.zeros_like(top) for _ in range(3))
        kept: dict[tuple[int, int], Tensor] = {}
        keep_rows = tiling.keep_bytes // max(1, weight.shape[0] * dtype.itemsize)
        for begin in range(0, rows, tiling.row_chunk):
            span = slice(begin, begin + tiling.row_chunk)
            state = (top[span], total[span], moment[span], chosen[span])
            for first in range(0, weight.shape[0], tiling.vocab_chunk):
                block = slice(first, first + tiling.vocab_chunk)
                shift = None if bias is None else bias[block]
                tile = _logits(hidden[span], weight[block], shift, temperature)
                keep = begin + tile.shape[0] <= keep_rows
                if keep:
                    kept[begin, first] = tile
                _fold(tile, local[span] - first, state, want_entropy, spare=keep)
        if group is not None:
            _combine(top, total, moment, chosen, group)
        lse = top + torch.log(total)
        entropy = lse - moment / total
        ctx.save_for_backward(hidden, weight, bias, local, lse, entropy)
        ctx.options = (temperature, want_entropy, tiling, group)
        ctx.kept = kept
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, local, lse, entropy = ctx.saved_tensors
        temperature, want_entropy, tiling, group = ctx.options
        grad_logp, grad_entropy = grads
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        live = grad_logp != 0
        if want_entropy:
            live |= grad_entropy != 0
        rows = live.nonzero().squeeze(1)
        dtype = accumulator(hidden)
        d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if need_hidden else None
        d_weight = torch.zeros(weight.shape, dtype=dtype, device=weight.device) if need_weight else None
        d_bias = torch.zeros(weight.shape[0], dtype=dtype, device=weight.device) if need_bias else None
        for pick, begin in _row_chunks(rows, tiling.row_chunk, ctx.kept):
            part = hidden[pick]
            d_part = torch.zeros(part.shape, dtype=dtype, device=part.device)
            for first in range(0, weight.shape[0], tiling.vocab_chunk):
                block = slice(first, first + tiling.vocab_chunk)
                tile = ctx.kept.get((begin, first))
                if tile is None:
                    shift = None if bias is None else bias[block]
                    tile = _logits(part, weight[block], shift, temperature)
                elif pick.shape[0] < tile.shape[0]:
                    tile = tile[pick - begin]
                tile = _tile_gradient(
                    tile - lse[pick, None],
                    grad_logp[pick],
                    grad_entropy[pick] if want_entropy else None,
                    entropy[pick],
                    local[pick] - first,
                )
                if temperature != 1.0:
                    tile.div_(temperature)
                narrow = tile.to(hidden.dtype)
                _add_product(d_part, narrow, weight[block])
                if d_weight is not None:
                    _add_product(d_weight[block], narrow.T, part)
                if d_bias is not None:
                    d_bias[block] += tile.sum(0)
            if d_hidden is not None:
                d_hidden[pick] = d_part
        if group is not None and d_hidden is not None:
            dist.all_reduce(d_hidden, group=group)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            *(None,) * 5,
        )


def _row_chunks(rows: Tensor, row_chunk: int, kept: dict[tuple[int, int], Tensor]) -> Iterator[tuple[Tensor, int]]:
    """Live rows (ascending) in chunks: with the forward's chunk they lie in where its tiles were kept, else -1."""
    done = 0
    for begin, first in kept:
        if first == 0:
            stop = begin + kept[begin, first].shape[0]
            end = int(torch.searchsorted(rows, stop))
            if end > done:
                yield rows[done:end], begin
            done = end
    for begin in range(done, rows.shape[0], row_chunk):
        yield rows[begin : begin + row_chunk], -1


def _add_product(into: Tensor, left: Tensor, right: Tensor) -> None:
    """into [a, c] += left [a, b] @ right [b, c]; in place where the dtypes allow."""
    if into.dtype == left.dtype:
        into.addmm_(left, right)
    else:
        into.add_(left @ right)


def _fold(
    tile: Tensor,
    index: Tensor,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    want_entropy: bool,
    spare: bool,
) -> None:
    """Fold a tile of logits [r, v] into the rows' (max, sum of exp, sum of exp * logit, target's logit), in place.

    ``index`` int64[r]: the target's column in this tile, if it lies there. ``spare``: leave the tile as it is.
    """
    top, total, moment, chosen = state
    inside = (index >= 0) & (index < tile.shape[1])
    index = index.clamp(0, tile.shape[1] - 1)
    chosen += torch.where(inside, tile.gather(1, index[:, None]).squeeze(1), 0.0)
    higher = torch.maximum(top, tile.amax(1))
    fade = torch.exp(top - higher)
    top.copy_(higher)
    mass = tile - higher[:, None] if spare or want_entropy else tile.sub_(higher[:, None])
    mass.exp_()
    total.mul_(fade).add_(mass.sum(1))
    if want_entropy:
        moment.mul_(fade).add_(mass.mul_(tile).sum(1))


def _tile_gradient(
    log_p: Tensor, grad_logp: Tensor, grad_entropy: Tensor | None, entropy: Tensor, index: Tensor
) -> Tensor:
    """d loss / d logits of one tile from log p [r, v]: g (onehot - p) - g_H p (log p + H)."""
    if grad_entropy is None:
        tile = log_p.exp_().mul_(-grad_logp[:, None])
    else:
        p = torch.exp(log_p)
        tile = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logp[:, None]).mul_(p)
    inside = ((index >= 0) & (index < tile.shape[1])).nonzero().squeeze(1)
    tile[inside, index[inside]] += grad_logp[inside]
    return tile


def _combine(top: Tensor, total: Tensor, moment: Tensor, chosen: Tensor, group: dist.ProcessGroup) -> None:
    """Join the shards' statistics, in place, over the ranks of ``group``."""
    own = top.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    fade = torch.exp(own - top)
    joined = torch.stack([total * fade, moment * fade, chosen])
    dist.all_reduce(joined, group=group)
    total.copy_(joined[0])
    moment.copy_(joined[1])
    chosen.copy_(joined[2])
