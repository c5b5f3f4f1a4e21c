"""Model families: what of a Hugging Face configuration Megatron-Core has to be told, and by which names weights go.

A family is a row of `FAMILIES`; all of them share Llama's names and differ in norms, biases and experts. Invariant: a
configuration with anything that the row does not cover is refused by name, since computing it as if it were plain would
give fluent nonsense. To add a family: a row here, a tiny model in the tests, and the conformance suite. Needs nothing
but the configuration as a dict; torch is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre_core import ConfigError
from gyre_core.facts import experts_of

_DOING = "preparing a model for Megatron-Core"


@dataclass(frozen=True, slots=True)
class Family:
    """`qk_norm`: queries and keys are normalised per head; `qkv_bias`: their projections always have biases; `experts`:
    the layers' MLPs are mixtures of experts."""

    qk_norm: bool = False
    qkv_bias: bool = False
    experts: bool = False


FAMILIES: Mapping[str, Family] = {
    "Qwen3ForCausalLM": Family(qk_norm=True),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "LlamaForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, experts=True),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes, in Hugging Face's terms."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    positions: int
    norm_eps: float
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    rope: Mapping[str, Any]
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The sizes of a config.json; ConfigError for what no row covers."""
    names = config.get("architectures") or ["none"]
    family = FAMILIES.get(names[0])
    if family is None:
        raise ConfigError(
            _DOING, got=f"architecture {names[0]}", expected=f"one of {', '.join(FAMILIES)}",
            fix="Add a row to gyre_megatron.families and run its conformance tests, or use the trainer deepspeed.",
        )  # fmt: skip
    _refuse(config, family)
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    return Shape(
        architecture=names[0],
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        positions=int(config.get("max_position_embeddings", 0)),
        norm_eps=float(config["rms_norm_eps"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or bool(config.get("attention_bias", False)),
        rope=_rope(config),
        experts=experts_of(config) if family.experts else 0,
        experts_per_token=int(config.get("num_experts_per_tok", 0)) if family.experts else 0,
        expert_intermediate=int(config.get("moe_intermediate_size", 0)) if family.experts else 0,
    )


def _refuse(config: Mapping[str, Any], family: Family) -> None:
    wrong = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        "attention_bias": bool(config.get("attention_bias", False)) and not family.qkv_bias,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "decoder_sparse_step": family.experts and int(config.get("decoder_sparse_step", 1)) != 1,
        "norm_topk_prob": family.experts and not config.get("norm_topk_prob", False),
        "num_experts": family.experts and not experts_of(config),
        "shared_expert_intermediate_size": bool(config.get("shared_expert_intermediate_size")),
    }
    for name, bad in wrong.items():
        if bad:
            raise ConfigError(
                _DOING, got=f"{name} = {config.get(name)!r}", expected="a value that this adapter computes"
            )


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope's parameters, from transformers 5's place or the older ones."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.pop("type", "default"))
    if found["rope_type"] not in ("default", "linear", "llama3") or found.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(_DOING, got=f"rope {found}", expected="default, linear or llama3 over whole heads")
    return found


def frequencies(shape: Shape) -> list[float]:
    """Rope's inverse frequencies, head_dim / 2 of them. llama3: the formula of the Llama 3.1 release."""
    rope, half = shape.rope, shape.head_dim // 2
    found = [float(rope["rope_theta"]) ** (-2.0 * i / shape.head_dim) for i in range(half)]
    if rope["rope_type"] == "linear":
        return [value / float(rope["factor"]) for value in found]
    if rope["rope_type"] == "llama3":
        return [_llama3(value, rope) for value in found]
    return found


def _llama3(frequency: float, rope: Mapping[str, Any]) -> float:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    length = float(rope["original_max_position_embeddings"])
    low, high, factor = (float(rope[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    turns = length * frequency / (2 * math.pi)
    if turns <= low:
        return frequency / factor
    if turns >= high:
        return frequency
    smooth = (turns - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def check_split(shape: Shape, tensor: int, pipeline: int, expert: int = 1) -> None:
    """ConfigError when the model cannot be split so."""
    for name, value, kind, ranks in (
        ("num_key_value_heads", shape.kv_heads, "tensor_parallel", tensor),
        ("num_attention_heads", shape.heads, "tensor_parallel", tensor),
        ("intermediate_size", shape.intermediate, "tensor_parallel", tensor),
        ("num_hidden_layers", shape.layers, "pipeline_parallel", pipeline),
        ("num_experts", shape.experts, "expert_parallel", expert),
    ):
        if value % ranks or (ranks > 1 and not value):
            raise ConfigError(_DOING, got=f"{name} {value} over {kind} {ranks}", expected="a split without remainder")
    if shape.experts and tensor > 1:
        raise ConfigError(
            _DOING, got=f"experts over tensor_parallel {tensor}", expected="1 for mixtures of experts",
            fix="Split them by expert_parallel or pipeline_parallel, or use the trainer deepspeed with stage 3.",
        )  # fmt: skip
