"""A causal language model in a few numbers, and what a config.json says of them, old and new forms alike. Plain data.

Not here: comparing them (`gyre_core.agreement`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

_BUFFERS = (".inv_freq", ".masked_bias", ".e_score_correction_bias")
_PREDICTOR = re.compile(r"(^|\.)mtp\.")
_LAYER = re.compile(r"^(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A causal language model in a few numbers."""

    architecture: str
    """As in config.json, e.g. Qwen3ForCausalLM."""
    parameters: int
    """Elements of all weights that `counted` names, tied ones once, padding left out."""
    tied: bool
    """Whether input and output embeddings are one weight."""
    vocabulary: int
    """Tokens that have a logit."""
    padded_vocabulary: int
    """Rows of the embeddings over all ranks; those beyond `vocabulary` must not count in any softmax."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """As `rope_of` gives it; empty for a model without. A mapping of mappings: rope differs between kinds of layers."""
    experts: int = 0
    """Of a layer; 0 for a dense model."""
    router_replay: bool = False
    """Whether experts that the engine recorded are used again instead of being chosen anew."""


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope's settings of a config.json, from transformers 5's place or from the older ones, without what is default."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in found.values()):
        return found
    found["rope_type"] = found.pop("type", None) or found.get("rope_type") or "default"
    theta = found.get("rope_theta") or config.get("rope_theta")
    if theta is None and found["rope_type"] == "default":
        return {}
    found["rope_theta"] = 10000.0 if theta is None else theta
    return {key: float(v) if isinstance(v, int | float) else v for key, v in found.items() if v is not None}


def counted(name: str, config: Mapping[str, Any]) -> bool:
    """Whether this tensor is among the parameters that two sides can agree on. Not buffers that some models save and
    that some make parameters, and not heads that predict several tokens ahead: files have them under `mtp` or as layers
    beyond the last, and a causal language model may leave them unread."""
    layer, layers = _LAYER.match(name), config.get("num_hidden_layers")
    beyond = layer is not None and layers is not None and int(layer[1]) >= int(layers)
    return not (beyond or name.endswith(_BUFFERS) or _PREDICTOR.search(name))


def experts_of(config: Mapping[str, Any]) -> int:
    """Experts of a layer, by the names that configurations have for them."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def facts_of(model: Any, *, router_replay: bool) -> ModelFacts:
    """Of a transformers model, whole or partitioned by ZeRO: what its modules are, not what its configuration says of
    them (but for rope, which modules do not tell)."""
    config = model.config.to_dict()
    inner, outer = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    shapes = [tuple(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters() if counted(name, config)]
    return ModelFacts(
        architecture=type(model).__name__, parameters=sum(map(prod, shapes)), tied=inner is outer,
        vocabulary=int(config["vocab_size"]), padded_vocabulary=int(getattr(outer, "ds_shape", outer.shape)[0]),
        rope=rope_of(config), experts=experts_of(config), router_replay=router_replay,
    )  # fmt: skip
