"""Tree computation against per-branch packing of the same data, for several degrees of sharing.

    python benchmarks/loss_tree.py [--json] [--tokens 32768] [--repeats 5] [--gpu]

Data: one prompt (``shared`` of a branch's length) and ``--branches`` branches below it, so that sharing, 1 - tree
tokens / branch tokens, is what is asked for. ``ideal`` is branch tokens / tree tokens. Measured, forward and backward
in one run, in turns, on the same model:

- ours: ``accumulate(method="packed")``;
- packing: each root-to-leaf path as a sequence, paths packed into rows of one batch and kept apart by variable-length
  attention (the library's own causal kernel per path; the usual way to train such data), each token's loss once;
- dense: one sequence with a dense tree mask given to the model's own masked attention (the tree-training approach of
  several public repositories);
- prefix grouping: the branches' common prompt once, everything below it as rows (one level of sharing), which for
  these two-level trees is given its best case; for the nested forest (``nested_*``) it shares only the first level.

``speedup_S`` = packing seconds / ours, the median over turns of the ratio within a turn, so that a machine that is
slow for a while is slow for both; ``spread_S`` its least and greatest. Attention sees (query, key) pairs, not tokens,
and a shared prompt is looked at by every tail: ``ideal_S`` = branch tokens / tree tokens is what the rest of the
model can gain, ``pairs_S`` what attention can. ``min_speedup_over_ideal`` = min over S of speedup / ideal;
``max_rel_grad_err`` of ours against packing; ``mem_ratio`` = peak extra memory of ours / of packing at the highest
sharing. One thread on CPU, where CPU seconds are counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gyre_loss as gl
import numpy as np
import torch
from gyre_loss.compute import Options
from gyre_loss.hf import HFTreeModel
from gyre_loss.layout import Layout, paths
from gyre_loss.logprob import linear_logprob
from gyre_loss.surrogates import Reinforce
from gyre_loss.terms import Targets, weighted_loss
from loss_support import in_child, peak_bytes, report, resident_bytes
from torch import Tensor, nn

SHARINGS = (35, 60, 80, 95)
OBJECTIVE = gl.PolicyLoss(Reinforce())


def build_model(gpu: bool) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    size = 1024 if gpu else 256
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=size,
        intermediate_size=3 * size,
        num_hidden_layers=8 if gpu else 2,
        num_attention_heads=size // 64,
        num_key_value_heads=size // 128,
        head_dim=64,
        max_position_embeddings=1 << 20,
    )
    model = Qwen3ForCausalLM(config)
    return model.to("cuda", torch.bfloat16) if gpu else model


def star(branch_tokens: int, branches: int, sharing: float) -> gl.TreeBatch:
    """One prompt and ``branches`` tails; ``branch_tokens`` over all paths; tails sample every other token."""
    path = branch_tokens // branches
    prompt = round(sharing * branches / (branches - 1) * path)
    tail = path - prompt
    return forest([-1, *[0] * branches], [prompt, *[tail] * branches])


def nested(branch_tokens: int) -> gl.TreeBatch:
    """A binary tree of depth 5 (16 leaves) with nodes of one length."""
    length = branch_tokens // (16 * 5)
    parents, stack = [], [(-1, 0)]
    while stack:
        above, level = stack.pop()
        parents.append(above)
        if level < 4:
            stack += [(len(parents) - 1, level + 1)] * 2
    return forest(parents, [length] * len(parents))


def forest(parents: Sequence[int], lengths: Sequence[int]) -> gl.TreeBatch:
    rng = np.random.default_rng(0)
    start = np.concatenate([[0], np.cumsum(lengths)])
    size = int(start[-1])
    sampled = np.arange(size) % 2 == 1
    for node, above in enumerate(parents):
        if above < 0:
            sampled[start[node] : start[node + 1]] = False
    return gl.TreeBatch.from_arrays(
        node_parent=list(parents),
        node_start=start,
        token_ids=rng.integers(0, 4096, size),
        sampled=sampled,
        logprobs=np.where(sampled, -8.0, np.nan),
        versions=np.where(sampled, 0, -1),
        advantage=1.0,
    )


@dataclass(frozen=True, slots=True)
class Packing:
    """Attention of sequences laid end to end: the library's causal kernel on each."""

    lengths: tuple[int, ...]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        outs = [
            nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True
            )
            for q, k, v in zip(*(t.split(self.lengths, 1) for t in (query, key, value)), strict=True)
        ]
        return torch.cat(outs, 2)[0]


def by_packing(model: nn.Module, batch: gl.TreeBatch) -> None:
    """Every path in full, each target read from the first path that holds it."""
    targets = Targets.of(batch, Layout.of(batch))
    found = paths(batch)
    rows = np.concatenate(found)
    lengths = tuple(len(path) for path in found)
    place = np.concatenate([np.arange(length) for length in lengths])
    _, first = np.unique(rows, return_index=True)
    adapter = HFTreeModel(model)
    ids = torch.from_numpy(batch.token_ids[rows].astype(np.int64)).to(adapter.device)
    hidden = adapter.hidden(ids, torch.from_numpy(place).to(adapter.device), Packing(lengths))
    at = torch.from_numpy(first[targets.token]).to(adapter.device)
    finish(adapter, batch, hidden[at - 1], ids[at])


def by_dense_mask(model: nn.Module, batch: gl.TreeBatch) -> None:
    gl.accumulate(model, batch, OBJECTIVE, options=Options(attention="dense", entropy=False))


def by_prefix_group(model: nn.Module, batch: gl.TreeBatch) -> None:
    """The root once, then every path below it in full: one level of sharing."""
    found = paths(batch)
    root = int(batch.node_start[1])
    tails = [path[root:] for path in found]
    rows = np.concatenate([np.arange(root), *tails])
    lengths = [root, *[len(tail) for tail in tails]]
    flat = forest([-1, *[0] * len(tails)], lengths)
    targets = Targets.of(batch, Layout.of(batch))
    _, first = np.unique(rows, return_index=True)
    from gyre_loss.attention import choose

    place = Layout.of(flat)
    adapter = HFTreeModel(model)
    ids = torch.from_numpy(batch.token_ids[rows].astype(np.int64)).to(adapter.device)
    positions = torch.from_numpy(place.position).to(adapter.device)
    hidden = adapter.hidden(ids, positions, choose(flat, place, adapter.device))
    at = first[targets.token]
    before = torch.from_numpy(place.previous[at]).to(adapter.device)
    finish(adapter, batch, hidden[before], ids[torch.from_numpy(at).to(adapter.device)])


def finish(adapter: HFTreeModel, batch: gl.TreeBatch, rows: Tensor, wanted: Tensor) -> None:
    logp = linear_logprob(rows, adapter.head().weight, wanted).logp
    weighted_loss(batch, OBJECTIVE, logp, None).loss.backward()


def by_tree(model: nn.Module, batch: gl.TreeBatch) -> None:
    gl.accumulate(model, batch, OBJECTIVE, options=Options(entropy=False))


def gradient(model: nn.Module, batch: gl.TreeBatch, way: Callable[..., None]) -> Tensor:
    model.zero_grad(set_to_none=True)
    way(model, batch)
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def seconds(model: nn.Module, batch: gl.TreeBatch, ways: Sequence[Callable[..., None]], repeats: int) -> np.ndarray:
    """CPU (or GPU wall) seconds [repeats, ways], one of each in every turn; the caller has warmed them up."""
    gpu = next(model.parameters()).is_cuda
    clock = time.perf_counter if gpu else time.process_time
    took = np.zeros((repeats, len(ways)))
    for turn in range(repeats):
        for index, way in enumerate(ways):
            model.zero_grad(set_to_none=True)
            if gpu:
                torch.cuda.synchronize()
            started = clock()
            way(model, batch)
            if gpu:
                torch.cuda.synchronize()
            took[turn, index] = clock() - started
    return took


def pairs(lengths: Sequence[int], above: Sequence[int]) -> int:
    """(query, key) pairs of runs of these lengths below that many tokens each."""
    return sum(length * (length + 1) // 2 + length * up for length, up in zip(lengths, above, strict=True))


def compare(model: nn.Module, batch: gl.TreeBatch, name: str, repeats: int) -> dict[str, Any]:
    """All ways on one batch: speedups over packing and peers, what tokens and pairs allow, the gradient's error."""
    ours = gradient(model, batch, by_tree)
    error = float((ours - gradient(model, batch, by_packing)).norm() / ours.norm())
    peers: list[Callable[..., None]] = [by_prefix_group]
    if batch.tokens <= 16_384:
        peers.append(by_dense_mask)
    for way in peers:
        gradient(model, batch, way)
    took = seconds(model, batch, [by_packing, by_tree], repeats)
    beside = seconds(model, batch, [by_tree, *peers], max(1, repeats // 2))
    lengths = [len(path) for path in paths(batch)]
    place = Layout.of(batch)
    starts = batch.node_start[:-1]
    ratios = took[:, 0] / took[:, 1]
    result = {
        f"speedup_{name}": float(np.median(ratios)),
        f"spread_{name}": [float(ratios.min()), float(ratios.max())],
        f"ideal_{name}": sum(lengths) / batch.tokens,
        f"pairs_{name}": pairs(lengths, [0] * len(lengths))
        / pairs(np.diff(batch.node_start).tolist(), place.position[starts].tolist()),
        f"seconds_{name}": float(np.median(took[:, 1])),
        f"error_{name}": error,
    }
    for index, way in enumerate(peers):
        result[f"over{way.__name__[2:]}_{name}"] = float(np.median(beside[:, 1 + index] / beside[:, 0]))
    return result


def memory(batch: gl.TreeBatch, way: Callable[..., None], gpu: bool) -> float:
    """Peak bytes above the model's of one forward and backward."""

    def measure() -> dict[str, Any]:
        model = build_model(gpu)
        gradient(model, star(256, 4, 0.5), way)
        if gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            way(model, batch)
            return {"bytes": torch.cuda.max_memory_allocated() - before}
        before = max(resident_bytes(), peak_bytes())
        way(model, batch)
        return {"bytes": peak_bytes() - before}

    return float((measure() if gpu else in_child(measure))["bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=0, help="branch tokens (default 32768; 262144 on a GPU)")
    parser.add_argument("--branches", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    if not options.gpu:
        torch.set_num_threads(1)
    tokens = options.tokens or (262_144 if options.gpu else 32_768)
    last = star(tokens, options.branches, SHARINGS[-1] / 100)
    used = {way.__name__: memory(last, way, options.gpu) for way in (by_tree, by_packing)}
    model = build_model(options.gpu)
    result: dict[str, Any] = {"benchmark": "loss_tree", "branch_tokens": tokens, "branches": options.branches}
    for sharing in SHARINGS:
        batch = star(tokens, options.branches, sharing / 100)
        result |= compare(model, batch, str(sharing), options.repeats)
    result |= compare(model, nested(tokens), "nested", max(1, options.repeats // 2))
    names = [str(sharing) for sharing in SHARINGS]
    report(
        {
            **result,
            "min_speedup_over_ideal": min(result[f"speedup_{name}"] / result[f"ideal_{name}"] for name in names),
            "max_rel_grad_err": max(result[f"error_{name}"] for name in (*names, "nested")),
            "mem_ratio": used["by_tree"] / used["by_packing"],
        },
        options.json,
    )


if __name__ == "__main__":
    main()
