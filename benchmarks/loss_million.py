"""A tree of a million tokens, forward and backward, with one path in memory.

    python benchmarks/loss_million.py [--json] [--tokens 1000000] [--threads N]

40 branches, the longest path 70 % of the tokens; every other token below the first is sampled. A toy Qwen3 (one
layer, one head of 16) runs through ``accumulate(method="dfs")`` in a process of its own: ``peak_gb`` is the whole
process's high-water mark. Every branch ends in token ids that occur nowhere else, so the gradient of those ids'
embeddings comes from that branch's own loss alone, and a chunk of an oracle gives the same rows. The gradient is
checked three times:

- ``max_rel_grad_err_paths``, full size: some whole paths through the model's own causal attention and autograd;
- ``max_rel_grad_err_ends``, full size, every branch, the one of 70 % too: its last tokens by plain softmax attention
  over all of its path (in a model of one layer no other row matters to them);
- ``max_rel_grad_err_scaled``: the whole gradient, two layers, on the same tree scaled down.

``gpu_gb_8b_*`` estimate an 8B model by the same plan. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

import gyre_loss as gl
import numpy as np
import torch
from gyre_loss.compute import Options
from gyre_loss.hf import HFTreeModel
from gyre_loss.layout import Layout, paths
from gyre_loss.memory import ModelShape, dfs_memory
from gyre_loss.surrogates import Reinforce
from loss_support import in_child, peak_bytes, report
from torch import Tensor, nn

BRANCHES = 40
COMMON = 64
MARKED = 16
QWEN3_8B = ModelShape(8_190_735_360, 36, 4096, 12_288, 32, 8, 128)
OBJECTIVE = gl.PolicyLoss(Reinforce())


def tree(tokens: int) -> gl.TreeBatch:
    """A trunk of 70 % of the tokens and 39 branches off it at even distances; each branch ends in ids of its own."""
    path = tokens * 7 // 10
    side = (tokens - path) // (BRANCHES - 1)
    step = path // BRANCHES
    parents: list[int] = []
    lengths: list[int] = []
    trunk = -1
    for branch in range(BRANCHES - 1):
        parents.append(trunk)
        lengths.append(step)
        trunk = len(parents) - 1
        if branch == 0:
            parents.append(trunk)
            lengths.append(tokens - path - side * (BRANCHES - 2))
            continue
        parents.append(trunk)
        lengths.append(side)
    parents.append(trunk)
    lengths.append(path - step * (BRANCHES - 1))
    start = np.concatenate([[0], np.cumsum(lengths)])
    rng = np.random.default_rng(0)
    ids = rng.integers(0, COMMON, tokens)
    marks = COMMON
    for node in range(len(parents)):
        if node not in parents:
            ids[start[node + 1] - MARKED : start[node + 1]] = np.arange(marks, marks + MARKED)
            marks += MARKED
    sampled = np.arange(tokens) % 2 == 1
    batch = gl.TreeBatch.from_arrays(
        node_parent=parents,
        node_start=start,
        token_ids=ids,
        sampled=sampled,
        logprobs=np.where(sampled, -4.0, np.nan),
        versions=np.where(sampled, 0, -1),
        advantage=1.0,
        weight=1.0,
    )
    assert batch.tokens == tokens
    return batch


def build_model(layers: int) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=COMMON + BRANCHES * MARKED,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1 << 20,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return model


class Watched(HFTreeModel):
    """The same model, saying on stderr how far it is."""

    def __init__(self, model: nn.Module, total: int) -> None:
        super().__init__(model)
        self._total, self._done, self._next = total, 0, 0.0

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Any, experts: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled():
            self._done += token_ids.shape[0]
        if time.perf_counter() > self._next:
            self._next = time.perf_counter() + 30
            print(
                f"{time.process_time():.0f} CPU s: {self._done} of {self._total} tokens differentiated, at position "
                f"{int(positions[0])}, peak {peak_bytes() / 1e9:.2f} GB",
                file=sys.stderr,
                flush=True,
            )
        return super().hidden(token_ids, positions, attention, experts)


@dataclass(frozen=True, slots=True)
class LastRows:
    """Plain softmax attention of the last ``count`` tokens over all; the others' output is zero."""

    count: int

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        first = query.shape[1] - self.count
        scores = query[:, first:] @ key.transpose(-1, -2) * scale
        row = torch.arange(first, query.shape[1])[:, None]
        scores = scores.masked_fill(torch.arange(key.shape[1])[None] > row, -torch.inf)
        out = torch.softmax(scores, -1) @ value
        return torch.cat([torch.zeros_like(query[:, :first]), out], 1)


def by_oracle(model: nn.Module, batch: gl.TreeBatch, path: np.ndarray, ends_only: bool) -> Tensor:
    """Embedding gradient [MARKED, h] of the ids that end a path, from that path alone."""
    ids = torch.from_numpy(batch.token_ids[path].astype(np.int64))
    size = path.shape[0]
    trained = np.flatnonzero(np.isin(path[size - MARKED :], batch.entry_token)) + size - MARKED
    model.zero_grad(set_to_none=True)
    if ends_only:
        hidden = HFTreeModel(model).hidden(ids, torch.arange(size), LastRows(MARKED + 1))
    else:
        hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    at = torch.from_numpy(trained)
    log_p = torch.log_softmax(model.lm_head(hidden[at - 1]), -1)
    (-log_p.gather(1, ids[at][:, None])).sum().backward()
    return model.model.embed_tokens.weight.grad[ids[size - MARKED :]].clone()


def full(tokens: int, chunk: int, layers: int, threads: int, leaves: int) -> dict[str, Any]:
    """Time and peak memory at full size, and the error of the branches' embedding gradients."""
    torch.set_num_threads(threads)
    batch, model = tree(tokens), build_model(layers)
    options = Options(chunk_tokens=chunk, entropy=False)
    started, began = time.perf_counter(), time.process_time()
    result = gl.accumulate(Watched(model, tokens), batch, OBJECTIVE, method="dfs", options=options)
    seconds, cpu, peak = time.perf_counter() - started, time.process_time() - began, peak_bytes()
    print(f"done in {cpu:.0f} CPU s, peak {peak / 1e9:.2f} GB; checking", file=sys.stderr, flush=True)
    grad = model.model.embed_tokens.weight.grad.clone()
    errors: dict[bool, list[float]] = {False: [], True: []}
    for leaf, path in enumerate(paths(batch)):
        got = grad[COMMON + leaf * MARKED : COMMON + (leaf + 1) * MARKED]
        for ends_only in [False] * (leaf < leaves) + [True] * (layers == 1):
            want = by_oracle(model, batch, path, ends_only)
            errors[ends_only].append(float((got - want).norm() / want.norm()))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_gb": peak / 1e9,
        "paths": max(errors[False]),
        "ends": max(errors[True], default=None),
        "loss": float(result.loss),
    }


def scaled(tokens: int, layers: int) -> float:
    """Relative error of the whole gradient against the oracle on the same tree, smaller."""
    batch, model = tree(tokens), build_model(layers)
    grads = []
    for method in ("branches", "dfs"):
        model.zero_grad(set_to_none=True)
        gl.accumulate(model, batch, OBJECTIVE, method=method, options=Options(chunk_tokens=100, entropy=False))
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return float((grads[1] - grads[0]).norm() / grads[0].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--leaves", type=int, default=3, help="whole paths checked, those that end nearest the root first"
    )
    options = parser.parse_args()
    place = Layout.of(tree(options.tokens))
    got = in_child(lambda: full(options.tokens, options.chunk, options.layers, options.threads, options.leaves))
    estimates = {
        f"gpu_gb_8b_tp{ranks}": dfs_memory(QWEN3_8B, 700_000, 8192, ranks=ranks).total / 1e9 for ranks in (1, 4, 8)
    }
    report(
        {
            "benchmark": "loss_million",
            "tokens": options.tokens,
            "branches": BRANCHES,
            "longest_path": place.longest_path,
            "layers": options.layers,
            "peak_gb": got["peak_gb"],
            "seconds": got["seconds"],
            "cpu_seconds": got["cpu_seconds"],
            "tokens_per_cpu_second": options.tokens / got["cpu_seconds"],
            "loss": got["loss"],
            "max_rel_grad_err_paths": got["paths"],
            "max_rel_grad_err_ends": got["ends"],
            "max_rel_grad_err_scaled": scaled(4000, 2),
            **estimates,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
