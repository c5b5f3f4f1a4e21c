"""What a model folder's config.json says about the model, checked once.

Invariant: an `Architecture` describes a model the forward pass computes exactly; whatever it would compute
wrongly (sliding windows, unknown rope scaling, other activations) is refused here, by name.
Not here: weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gyre_core import ConfigError

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position settings. `kind` is "default", "linear" or "llama3"; the rest are that kind's numbers."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192

    def frequencies(self, head_size: int) -> torch.Tensor:
        """Inverse frequencies, float32 [head_size / 2] (RoFormer; llama3: the published wavelength bands)."""
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        base = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._banded(base)
        return base

    def _banded(self, base: torch.Tensor) -> torch.Tensor:
        """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
        wavelength = 2 * math.pi / base
        long_from = self.original_positions / self.low_freq_factor
        short_to = self.original_positions / self.high_freq_factor
        smooth = (self.original_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * base / self.factor + smooth * base
        return torch.where(
            wavelength > long_from, base / self.factor, torch.where(wavelength < short_to, base, between)
        )


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a decoder-only model. All counts are of elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    tied: bool
    rope: Rope

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def fingerprint(self) -> str:
        """Names everything that decides what a KV entry means, weights aside; 16 hex digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def read_architecture(folder: str | Path) -> Architecture:
    """Read `folder`/config.json; ConfigError when the file is missing or the model is one we cannot run."""
    path = Path(folder) / "config.json"
    doing = f"reading the model's {path}"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            doing, got=f"{type(error).__name__}: {error}", expected="a Hugging Face config.json",
            fix="Point the model at a folder with config.json and safetensors files.",
        ) from error  # fmt: skip
    if not isinstance(config, dict):
        raise ConfigError(doing, got=f"JSON of type {type(config).__name__}", expected="an object")
    return architecture_from(config, doing)


def architecture_from(config: Mapping[str, Any], doing: str = "reading a model's configuration") -> Architecture:
    """The architecture a parsed config.json describes; ConfigError when it is not supported."""
    name = (config.get("architectures") or ["missing"])[0]
    if name not in SUPPORTED:
        raise ConfigError(
            doing, got=f"architecture {name}", expected=f"one of {', '.join(SUPPORTED)}",
            fix="Use the vllm or sglang engine for other architectures.",
        )  # fmt: skip
    refusals = {
        "sliding window attention": bool(config.get("use_sliding_window")) or "sliding_attention" in (
            config.get("layer_types") or ()
        ),
        f"activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        "a quantized checkpoint": config.get("quantization_config") is not None,
    }  # fmt: skip
    refused = [what for what, present in refusals.items() if present]
    if refused:
        raise ConfigError(
            doing, got=f"{name} with {', '.join(refused)}", expected="full attention, silu, plain weights",
            fix="Use the vllm or sglang engine for this model.",
        )  # fmt: skip
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        return Architecture(
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            eps=float(config["rms_norm_eps"]),
            max_positions=int(config.get("max_position_embeddings", 2048)),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope=_rope(config, doing),
        )
    except KeyError as error:
        raise ConfigError(doing, got=f"no key {error}", expected="every size of the model") from error


def _rope(config: Mapping[str, Any], doing: str) -> Rope:
    """Both spellings: "rope_parameters" (transformers 5) and "rope_theta" with "rope_scaling" (before)."""
    found: dict[str, Any] = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = str(found.get("rope_type", found.get("type", "default")))
    theta = float(found.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            doing, got=f"rope scaling {kind!r}", expected="default, linear or llama3",
            fix="Use the vllm or sglang engine for this model.",
        )  # fmt: skip
    original = found.get("original_max_position_embeddings", config.get("max_position_embeddings", 8192))
    return Rope(
        theta,
        kind,
        factor=float(found.get("factor", 1.0)),
        low_freq_factor=float(found.get("low_freq_factor", 1.0)),
        high_freq_factor=float(found.get("high_freq_factor", 4.0)),
        original_positions=int(original),
    )
