"""Routed experts of a real server are those that transformers' router chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gyre_core import ComponentContext, EngineCapability, GenerateRequest, SamplingParams, WeightSource
from gyre_core.testing.engine_rig import Called
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions

LAYERS, EXPERTS, TOP = 3, 8, 2
PROMPT = [(7 * i + 3) % 320 for i in range(40)]


def make_model(folder: Path) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, num_experts=EXPERTS,
        num_experts_per_tok=TOP, norm_topk_prob=True, decoder_sparse_step=1, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.engine
@pytest.mark.timeout(600)
async def test_routed_experts_are_those_of_transformers(python: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    options = SGLangOptions(python=python, dtype="float32", kv_tokens=4096, routed_experts=True, chunk_s=0.0)
    engine = SGLangEngine(options, ComponentContext(str(tmp_path), "cell-0"))
    await engine.start(WeightSource(0, str(tmp_path / "model")))
    try:
        assert EngineCapability.ROUTED_EXPERTS in engine.capabilities
        request = GenerateRequest("a", "s", PROMPT, SamplingParams(12, temperature=0.0), True)
        result = Called(tuple([chunk async for chunk in engine.generate(request)]))
    finally:
        await engine.close()
    (chunk,) = result.chunks
    ids = [*PROMPT, *result.ids]
    with torch.inference_mode():
        found = model(torch.tensor([ids]), output_router_logits=True)
    rows = torch.stack([layer.reshape(len(ids), EXPERTS).topk(TOP).indices for layer in found.router_logits], 1)
    expected = rows[len(PROMPT) - 1 : -1].sort(-1).values
    assert chunk.routed_experts is not None
    assert torch.equal(torch.tensor(chunk.routed_experts.copy()).long().sort(-1).values, expected)
    logprobs = found.logits[0].float().log_softmax(-1)[len(PROMPT) - 1 : -1]
    assert result.logprobs == pytest.approx([float(r[t]) for r, t in zip(logprobs, result.ids, strict=True)], abs=1e-3)
