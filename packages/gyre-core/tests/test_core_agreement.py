"""What a trainer says of its model is compared with the folder, fact by fact."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from gyre_core import InfrastructureError
from gyre_core.agreement import facts_at, require_facts
from gyre_core.facts import rope_of
from gyre_core.ranks import Entry
from gyre_core.ranks.tensorfile import create

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 31, "tie_word_embeddings": True, "num_experts": 4,
    "rope_theta": 1000000, "rope_scaling": {"type": "linear", "factor": 4},
}  # fmt: skip


def folder(path: Path, **changes: Any) -> Path:
    path.mkdir()
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (31, 4), "model.norm.weight": (4,), "lm_head.weight": (31, 4)}
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (2,)
    create(path / "model.safetensors", [Entry(name, "BF16", shape) for name, shape in shapes.items()])
    return path


def test_a_folder_tells_its_facts(tmp_path: Path) -> None:
    found = facts_at(folder(tmp_path / "tied"))
    assert (found.parameters, found.tied, found.vocabulary, found.experts) == (31 * 4 + 4, True, 31, 4)
    assert found.rope == {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
    assert facts_at(folder(tmp_path / "untied", tie_word_embeddings=False)).parameters == 2 * 31 * 4 + 4
    assert not facts_at(folder(tmp_path / "silent", tie_word_embeddings=None)).tied


def test_old_and_new_forms_of_rope_are_one() -> None:
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    assert rope_of(new) == rope_of({"rope_theta": 500000}) == {"rope_type": "default", "rope_theta": 5e5}
    assert rope_of({}) == {}
    assert rope_of({"rope_scaling": None, "rope_theta": 1e4})["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parameters": 127}, "parameters 127"),
        ({"tied": False}, "tied embeddings False"),
        ({"vocabulary": 32}, "vocabulary 32"),
        ({"padded_vocabulary": 30}, "padded vocabulary 30"),
        ({"rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, "rope .*10000.0"),
        ({"rope": {}}, "rope"),
        ({"experts": 0}, "experts 0"),
        ({"architecture": "Qwen3ForCausalLM"}, "architecture 'Qwen3ForCausalLM'"),
        ({"router_replay": False}, "router replay False"),
    ],
)
def test_a_difference_is_refused_by_its_name(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    place = folder(tmp_path / "model")
    same = dataclasses.replace(facts_at(place), router_replay=True, padded_vocabulary=32)
    require_facts(same, place, replay=True)
    with pytest.raises(InfrastructureError, match=named):
        require_facts(dataclasses.replace(same, **change), place, replay=True)


def test_replay_matters_to_mixtures_that_record_alone(tmp_path: Path) -> None:
    place = folder(tmp_path / "model")
    require_facts(facts_at(place), place, replay=False)
    dense = folder(tmp_path / "dense", num_experts=None)
    require_facts(facts_at(dense), dense, replay=True)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"config\.json"):
        facts_at(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InfrastructureError, match=r"config\.json"):
        facts_at(tmp_path)
