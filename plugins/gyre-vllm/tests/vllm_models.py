"""Makes tiny random Qwen3 models as Hugging Face folders: `python vllm_models.py FOLDER [--seed N]`.

Head size 32, because vLLM's attention on a CPU has no kernel for the smaller odd ones. Weights are drawn large enough
that logits differ clearly between tokens, so that greedy comparisons mean something, and small enough that sampling
still chooses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

VOCAB = 320


def save(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    """Write config.json and model.safetensors; the same for the same seed."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(Qwen3Config(**(shape | sizes)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            else:
                parameter.copy_(0.5 * noise if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5 * noise)
    model.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(save(given.folder, given.seed))
