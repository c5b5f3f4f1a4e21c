"""Small models and forests that the tests of gyre-loss share."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class WideNorm(nn.Module):
    """RMSNorm in the dtype of its input (the library's own computes in float32, also for float64)."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def build_model(kind: str = "qwen3", dtype: torch.dtype = torch.float64, *, vocab: int = 11, layers: int = 2, **more):
    """A tiny randomly initialised causal model of transformers; norms are exact in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(7)
    common = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **common))
    else:
        model = LlamaForCausalLM(LlamaConfig(**common))
    model = model.to(dtype)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, name, WideNorm(child.weight, child.variance_epsilon))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model


@pytest.fixture(scope="module")
def model64():
    return build_model()
