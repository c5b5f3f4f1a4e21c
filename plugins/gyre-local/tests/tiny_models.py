"""Makes tiny random models as Hugging Face folders: `python tiny_models.py qwen3 FOLDER [--seed N]`.

Weights are drawn large enough that logits differ clearly between tokens, so that greedy comparisons mean something.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def config_of(kind: str, **sizes: Any) -> Any:
    """A transformers config: qwen3 (tied), qwen3-untied, qwen3-moe, qwen2 (biases), llama, llama3 (scaled rope)."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    merged = SIZES | sizes
    if kind == "qwen3":
        return Qwen3Config(**merged, head_dim=24, tie_word_embeddings=True)
    if kind == "qwen3-untied":
        return Qwen3Config(**merged, head_dim=16, tie_word_embeddings=False)
    if kind == "qwen3-moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
        return Qwen3MoeConfig(**merged, **experts, head_dim=16, tie_word_embeddings=False)
    if kind == "qwen2":
        return Qwen2Config(**merged, tie_word_embeddings=False)
    if kind == "llama":
        return LlamaConfig(**merged, tie_word_embeddings=False)
    if kind == "llama3":
        rope = {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        }  # fmt: skip
        return LlamaConfig(**merged, tie_word_embeddings=True, rope_parameters=rope)
    raise ValueError(f"making a tiny model: got kind {kind!r}")


def build(kind: str, seed: int = 0, **sizes: Any) -> Any:
    """A random transformers model in float32; the same for the same seed."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind, **sizes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                scale = 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def save(kind: str, folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """Build and write config.json and model.safetensors."""
    build(kind, seed, **sizes).save_pretrained(folder)
    return folder


def per_expert(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' stacked experts under the names that files have."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        top, _, last = name.rpartition("experts.")
        if last == "gate_up_proj":
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found |= {f"{top}experts.{index}.gate_proj.weight": gate, f"{top}experts.{index}.up_proj.weight": up}
        elif last == "down_proj":
            found |= {f"{top}experts.{index}.down_proj.weight": down for index, down in enumerate(tensor)}
        else:
            found[name] = tensor
    return found


def poison(folder: Path, target: Path, token: int) -> Path:
    """A copy of a model whose embedding of one token is NaN; untied, or every logit would be."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(save(given.kind, given.folder, given.seed))
