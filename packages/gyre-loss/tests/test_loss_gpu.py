"""On a GPU: FlexAttention's compiled kernel, depth first, and log-probabilities, against the oracle.

Written for an H200 with Python 3.12 and torch 2.11; needs transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gyre_loss as gl
import numpy as np
import pytest
import torch
from gyre_loss.compute import Options
from gyre_loss.logprob import linear_logprob
from gyre_loss.surrogates import Reinforce

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_gpu", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(dtype):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    return Qwen3ForCausalLM(config).to("cuda", dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-3), (torch.bfloat16, 8e-2)])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("packed", Options(attention="flex")),
        ("packed", Options(attention="dense")),
        ("packed", Options(attention="blocked")),
        ("dfs", Options(chunk_tokens=64)),
    ],
)
def test_methods_agree_on_the_gpu(dtype, bound, method, options):
    model = build(dtype)
    batch = load("test_loss_data").random_forest(3, 8, 200, 500)
    assert batch.tokens > 500
    grads = []
    for way, chosen in (("branches", Options()), (method, options)):
        model.zero_grad()
        gl.accumulate(model, batch, gl.PolicyLoss(Reinforce()), method=way, options=chosen)
        grads.append(torch.cat([p.grad.float().flatten() for p in model.parameters()]))
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < bound


def test_flex_is_compiled_and_its_memory_is_linear():
    """A forest of 64 Ki tokens: a dense mask alone would take 4 GiB."""
    model = build(torch.bfloat16)
    size, branches = 1 << 16, 16
    start = [0, *np.linspace(size // 2, size, branches + 1).astype(int)]
    sampled = np.arange(size) % 4 == 3
    batch = gl.TreeBatch.from_arrays(
        node_parent=[-1, *[0] * branches],
        node_start=start,
        token_ids=np.arange(size) % 512,
        sampled=sampled,
        logprobs=np.where(sampled, -6.0, np.nan),
        versions=np.where(sampled, 0, -1),
        advantage=1.0,
    )
    gl.accumulate(model, batch, gl.PolicyLoss())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gl.accumulate(model, batch, gl.PolicyLoss())
    assert torch.cuda.max_memory_allocated() - before < 4 << 30


def test_logprob_memory_on_the_gpu():
    rows, vocab, hidden = 32_768, 151_936, 1024
    states = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprob(states, weight, targets).logp.sum().backward()
    extra = torch.cuda.max_memory_allocated() - before
    gradients = (rows + vocab) * hidden * (4 + 2)
    assert extra < 0.1 * rows * vocab * 4 + gradients
    with torch.no_grad():
        want = torch.log_softmax((states[:64] @ weight.T).float(), -1).gather(1, targets[:64, None]).squeeze(1)
        got = linear_logprob(states[:64], weight, targets[:64]).logp
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
