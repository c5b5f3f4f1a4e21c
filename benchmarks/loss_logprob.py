"""Log-probabilities of chosen tokens without the logits: memory and time against the straightforward version.

    python benchmarks/loss_logprob.py [--json] [--rows 131072] [--vocab 151936]

``mem_ratio``: peak extra memory, forward and backward, of ``linear_logprob`` over the size of the full logits, which
the straightforward version cannot do without. ``time_ratio``: ours over straightforward (logits, log-softmax,
autograd) where that fits, the median over turns of the ratio within a turn, the worst over the hidden sizes measured.
``logit_rows``: rows of logits computed for a batch of which a tenth trains, over its trained rows (1.0: none for rows
that do not train).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from gyre_loss.logprob import linear_logprob
from loss_support import in_child, peak_bytes, report, resident_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FITS_ROWS = 1024


def inputs(rows: int, vocab: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    states = torch.randn(rows, hidden, requires_grad=True)
    weight = (0.1 * torch.randn(vocab, hidden)).requires_grad_()
    return states, weight, torch.randint(0, vocab, (rows,)), torch.randn(rows)


def ours(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return linear_logprob(states, weight, targets).logp


def plain(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(states @ weight.T, -1).gather(1, targets[:, None]).squeeze(1)


def memory(rows: int, vocab: int, hidden: int) -> dict[str, Any]:
    """Peak extra bytes of ours at full size, gradients of inputs included."""
    states, weight, targets, grad = inputs(rows, vocab, hidden)
    ours(states[:64], weight, targets[:64]).sum().backward()
    states.grad = weight.grad = None
    before = max(resident_bytes(), peak_bytes())
    started = time.perf_counter()
    (ours(states, weight, targets) * grad).sum().backward()
    return {"bytes": peak_bytes() - before, "seconds": time.perf_counter() - started}


def times(vocab: int, hidden: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of forward and backward, ours and the straightforward version in turns."""
    states, weight, targets, grad = inputs(FITS_ROWS, vocab, hidden)
    found: dict[str, list[float]] = {"ours": [], "plain": []}
    both: tuple[tuple[str, Callable[..., Tensor]], ...] = (("ours", ours), ("plain", plain))
    for _ in range(repeats + 1):
        for name, call in both:
            states.grad = weight.grad = None
            started = time.process_time()
            (call(states, weight, targets) * grad).sum().backward()
            found[name].append(time.process_time() - started)
    ratios = [mine / theirs for mine, theirs in zip(found["ours"][1:], found["plain"][1:], strict=True)]
    with torch.no_grad():
        error = float((ours(states, weight, targets) - plain(states, weight, targets)).abs().max())
    return {"ratio": median(ratios), "spread": [min(ratios), max(ratios)], "max_abs_error": error}


def logit_rows() -> float:
    """Rows of logits per trained row, forward only, of a model's batch of which a tenth trains."""
    import gyre_loss as gl
    from transformers import Qwen3Config, Qwen3ForCausalLM

    vocab, size = 1009, 400
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
        )
    )
    sampled = [index % 10 == 5 for index in range(size)]
    batch = gl.TreeBatch.from_arrays(
        node_parent=[-1],
        node_start=[0, size],
        token_ids=range(size),
        sampled=sampled,
        logprobs=[-1.0 if flag else float("nan") for flag in sampled],
        versions=[0 if flag else -1 for flag in sampled],
    )
    seen: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.ndim == 2 and out.shape[1] == vocab and "mm" in str(func):
                seen.append(out.shape[0])
            return out

    with Watch():
        gl.tree_loss(model, batch, gl.PolicyLoss())
    return sum(seen) / batch.entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=131_072)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=32, help="hidden size of the memory measurement")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows_ratio = logit_rows()
    timed = {size: in_child(lambda s=size: times(options.vocab, s, options.repeats)) for size in (64, 512)}
    used = in_child(lambda: memory(options.rows, options.vocab, options.hidden))
    full = options.rows * options.vocab * 4
    report(
        {
            "benchmark": "loss_logprob",
            "rows": options.rows,
            "vocab": options.vocab,
            "full_logits_gb": full / 1e9,
            "extra_gb": used["bytes"] / 1e9,
            "mem_ratio": used["bytes"] / full,
            "seconds_full": used["seconds"],
            "time_ratio": max(t["ratio"] for t in timed.values()),
            **{f"time_ratio_hidden_{size}": t["ratio"] for size, t in timed.items()},
            **{f"time_spread_hidden_{size}": t["spread"] for size, t in timed.items()},
            "max_abs_error": max(t["max_abs_error"] for t in timed.values()),
            "logit_rows": rows_ratio,
        },
        options.json,
    )


if __name__ == "__main__":
    main()
