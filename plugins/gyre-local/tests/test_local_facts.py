"""Facts of real models are those of the folders they were saved to, whatever a family saves beside its parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import InfrastructureError
from gyre_core.agreement import require_facts
from gyre_core.facts import facts_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MIXTURE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
GROUPS = {"n_group": 1, "topk_group": 1, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": MIXTURE,
    "deepseek_v3": MIXTURE | LATENT | GROUPS,
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3": {},
}


def saved(family: str, folder: Path) -> PreTrainedModel:
    """A tiny model of the family as it is loaded from the folder that it was saved to."""
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL | FAMILIES[family])).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_agrees_with_the_folder_it_was_loaded_from(tmp_path: Path, family: str) -> None:
    facts = facts_of(saved(family, tmp_path), router_replay=True)
    require_facts(facts, tmp_path, replay=True)


@pytest.mark.parametrize("name", ["mtp.fc.weight", "model.mtp.0.fc.weight", "model.layers.2.eh_proj.weight"])
def test_heads_that_a_causal_model_leaves_unread_are_not_counted(tmp_path: Path, name: str) -> None:
    saved("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(5, 7)}, file, metadata={"format": "pt"})
    facts = facts_of(AutoModelForCausalLM.from_pretrained(tmp_path), router_replay=True)
    require_facts(facts, tmp_path, replay=True)


def test_a_weight_that_is_left_unread_below_the_last_layer_is_found(tmp_path: Path) -> None:
    saved("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.1.extra.weight": torch.zeros(5, 7)}, file, metadata={"format": "pt"})
    facts = facts_of(AutoModelForCausalLM.from_pretrained(tmp_path), router_replay=True)
    with pytest.raises(InfrastructureError, match="parameters"):
        require_facts(facts, tmp_path, replay=True)


def test_rope_of_kinds_of_layers_is_not_held_against_a_folder_of_the_older_form(tmp_path: Path) -> None:
    facts = facts_of(saved("gemma3_text", tmp_path), router_replay=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_facts(facts, tmp_path, replay=True)
