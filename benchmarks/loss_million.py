"""A tree of a million tokens, forward and backward, with one path in memory.

    python benchmarks/loss_million.py [--json] [--tokens 1000000] [--threads N]

40 branches, the longest path 70 % of the tokens; every other token below the first is sampled. A toy Qwen3 (one
layer, one head of 16) runs through ``accumulate(method="dfs")`` in a process of its own: ``peak_gb`` is the whole
process's high-water mark. The gradient is checked against the oracle twice. At full size on chunks: some branches end
in token ids that occur nowhere else, so the gradient of those ids' embeddings comes from that branch's own loss
alone, and the oracle (plain causal attention, autograd, one path) gives the same rows: ``max_rel_grad_err_chunks``.
And as a whole, on the same tree scaled down: ``max_rel_grad_err_scaled``. ``gpu_gb_8b_*`` estimate an 8B model by the
same plan.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import gyre_loss as gl
import numpy as np
import torch
from gyre_loss.compute import Options
from gyre_loss.layout import Layout, paths
from gyre_loss.memory import ModelShape, dfs_memory
from gyre_loss.surrogates import Reinforce
from loss_support import in_child, peak_bytes, report
from torch import nn

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


def by_oracle(model: nn.Module, batch: gl.TreeBatch, leaf: int) -> torch.Tensor:
    """Embedding gradient [MARKED, h] of a leaf's own ids, from its path alone."""
    path = paths(batch)[leaf]
    ids = torch.from_numpy(batch.token_ids[path].astype(np.int64))
    size = path.shape[0]
    trained = np.flatnonzero(np.isin(path[size - MARKED :], batch.entry_token)) + size - MARKED
    model.zero_grad(set_to_none=True)
    hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    at = torch.from_numpy(trained)
    log_p = torch.log_softmax(model.lm_head(hidden[at - 1]), -1)
    (-log_p.gather(1, ids[at][:, None])).sum().backward()
    return model.model.embed_tokens.weight.grad[ids[size - MARKED :]].clone()


def full(tokens: int, chunk: int, layers: int, threads: int, leaves: int) -> dict[str, Any]:
    """Time and peak memory at full size, and the error of some leaves' embedding gradients."""
    torch.set_num_threads(threads)
    batch, model = tree(tokens), build_model(layers)
    options = Options(chunk_tokens=chunk, entropy=False)
    started = time.perf_counter()
    result = gl.accumulate(model, batch, OBJECTIVE, method="dfs", options=options)
    seconds, peak = time.perf_counter() - started, peak_bytes()
    grad = model.model.embed_tokens.weight.grad.clone()
    errors = []
    for leaf in range(leaves):
        want = by_oracle(model, batch, leaf)
        got = grad[COMMON + leaf * MARKED : COMMON + (leaf + 1) * MARKED]
        errors.append(float((got - want).norm() / want.norm()))
    return {"seconds": seconds, "peak_gb": peak / 1e9, "error": max(errors), "loss": float(result.loss)}


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
    parser.add_argument("--leaves", type=int, default=3, help="leaves checked at full size, nearest the root first")
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
            "tokens_per_second": options.tokens / got["seconds"],
            "loss": got["loss"],
            "max_rel_grad_err_chunks": got["error"],
            "max_rel_grad_err_scaled": scaled(4000, 2),
            **estimates,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
