"""Sampling a batch: one uniform number a token, the inverse of the cumulative distribution.

Invariants: the logprob returned is that of log-softmax(logits / temperature) over the full vocabulary, before
top-k and top-p (temperature 1 for greedy rows); a token's random number depends on its call's seed and its index in
the call alone, so a seeded call does not depend on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of a batch, one entry a row."""

    temperature: NDArray[np.float32]
    """0 is greedy."""
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """0 is off."""
    seed: NDArray[np.uint64]
    index: NDArray[np.uint64]
    """Sampled tokens of the call before this one."""


def uniforms(seed: NDArray[np.uint64], index: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform in [0, 1 - 2^-52] from (seed, index) by the splitmix64 mixer (Steele, Lea, Flood 2014): so far below 1
    that its product with a total stays below that total after rounding."""
    with np.errstate(over="ignore"):
        z = _mix(_mix(seed + _GOLDEN) + (index + np.uint64(1)) * _GOLDEN)
    return (z >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX1
    z = (z ^ (z >> np.uint64(27))) * _MIX2
    return z ^ (z >> np.uint64(31))


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[list[int], list[float]]:
    """Token ids and logprobs of one draw a row; `logits` float32 [rows, vocab]. A row with NaN gives a NaN logprob."""
    greedy = rows.temperature == 0
    if not np.all(rows.temperature == 1):
        scale = torch.from_numpy(np.where(greedy, np.float32(1), rows.temperature)).to(logits.device)
        logits = logits / scale[:, None]
    logprobs = torch.log_softmax(logits, -1)
    if greedy.all():
        ids = logprobs.argmax(-1)
    else:
        ids = _draw(logprobs, rows)
        if greedy.any():
            ids = torch.where(torch.from_numpy(greedy).to(ids.device), logprobs.argmax(-1), ids)
    chosen = logprobs.gather(1, ids[:, None])[:, 0]
    return ids.tolist(), chosen.tolist()


def _draw(logprobs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Inverse-CDF draw from the (filtered) distribution, summed in float64 where the device has it."""
    probs = logprobs.exp()
    filtered = (rows.top_p < 1) | (rows.top_k > 0)
    if filtered.any():
        which = torch.from_numpy(np.flatnonzero(filtered)).to(probs.device)
        kept = _keep(probs.index_select(0, which), rows.top_p[filtered], rows.top_k[filtered])
        probs = probs.index_copy(0, which, kept)
    cumulative = probs.double().cumsum(-1)
    draw = torch.from_numpy(uniforms(rows.seed, rows.index)).to(probs.device)
    target = draw[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return ids.clamp_(max=probs.shape[1] - 1)  # a row of NaN finds no place; its NaN logprob tells


def _keep(probs: torch.Tensor, top_p: NDArray[np.float32], top_k: NDArray[np.int64]) -> torch.Tensor:
    """Zero what top-k (first) and top-p (of the mass before each token, in falling order) cut away."""
    ordered, order = probs.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, probs.shape[1])).to(probs.device)
    ordered = ordered.masked_fill(rank[None] >= limit[:, None], 0.0)
    total = ordered.sum(-1, keepdim=True)
    before = (ordered.double().cumsum(-1) - ordered) / total
    bound = torch.from_numpy(top_p.astype(np.float64)).to(probs.device)
    ordered = ordered.masked_fill((before >= bound[:, None]) & (rank[None] > 0), 0.0)
    return torch.zeros_like(probs).scatter(1, order, ordered)
