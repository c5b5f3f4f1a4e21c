"""The memory estimate against published sizes and against figures worked out by hand."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from gyre_rl.cli.sizing import memory_line, memory_problems, size
from gyre_rl.config import PluginChoice, RunConfig
from gyre_rl.config.memory import GIB, RESERVED, Kept, ModelShape, estimate, kept_by_default, problems_of, shape_of
from gyre_rl.config.schema import CellsConfig, LossConfig, ModelConfig
from hypothesis import given
from hypothesis import strategies as st

QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_30B_A3B = {
    "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_31_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [
        (QWEN3_8B, 8.19, 8.19, 36 * 8 * 128 * 2 * 2),
        (QWEN3_30B_A3B, 30.53, 3.35, 48 * 4 * 128 * 2 * 2),
        (LLAMA_31_8B, 8.03, 8.03, 32 * 8 * 128 * 2 * 2),
    ],
)
def test_published_sizes(config: dict, billions: float, active: float, kv_bytes: int) -> None:
    shape = shape_of(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert shape.active / 1e9 == pytest.approx(active, abs=0.01)
    assert shape.kv_bytes_per_token == kv_bytes


def test_a_small_model_by_hand() -> None:
    shape = ModelShape(2, 4, 2, 1, 2, 8, 10, tied=True)
    # attention 4*2*2*(2+1) = 48, feed-forward 3*4*8 = 96, two layers 288; embeddings 40
    assert shape.parameters == 328
    found = estimate(shape, accelerators=2, accelerator_gib=80, micro_batch_tokens=5, context_tokens=7)
    logits = 2 * 4 * 2048 * 10
    activations = 2 * 7 * 2 * 4 + 2 * 7 * (8 * 4 + 4 * 8) + logits
    assert found.rollout_weights == 328
    assert found.satellite == 328 + 656 + activations + RESERVED
    assert found.core - found.satellite == 12 * 328 // 2
    assert found.full_contexts == found.kv_tokens // 7


def test_what_a_trainer_keeps_is_counted_kind_by_kind() -> None:
    def sized(satellite: Kept, core: Kept):
        return estimate(
            whole, accelerators=8, accelerator_gib=80, micro_batch_tokens=1, context_tokens=1000, kept=(satellite, core)
        )

    whole = shape_of(QWEN3_30B_A3B)
    plain, experts = whole.parameters - whole.of_experts, whole.of_experts
    nothing, usual = sized({}, {}), {"weights": (2, 8, 8)}
    assert nothing.core == nothing.satellite
    assert sized(usual, {}).satellite - nothing.satellite == 2 * plain // 8 + 2 * experts // 8
    assert sized(usual, {}).core == nothing.core
    whole_here = sized({}, {"weights": (2, 1, 4), "open sum": (4, 8, 8)})
    assert whole_here.core - nothing.core == 2 * plain + 2 * experts // 4 + 4 * plain // 8 + 4 * experts // 8
    assert whole_here.satellite == nothing.satellite
    assert whole_here.rollout_weights == nothing.rollout_weights
    assert shape_of(QWEN3_8B).of_experts == 0


def test_a_trainer_that_says_nothing_shards_all_over_all() -> None:
    def sized(kept: tuple[Kept, Kept] | None):
        return estimate(
            shape_of(QWEN3_8B), accelerators=4, accelerator_gib=80, micro_batch_tokens=1, context_tokens=1, kept=kept
        )

    satellite: Kept = {"weights": (2, 4, 4), "gradients": (4, 4, 4)}
    assert sized(None) == sized((satellite, satellite | {"optimizer": (12, 4, 4)}))
    assert kept_by_default(4, core=False) == satellite


@dataclass(frozen=True)
class Copies:
    """Options of a trainer every rank of which has all weights, and the core its optimizer shared out."""

    def kept(self, accelerators: int, *, core: bool) -> Kept:
        return {"weights": (2, 1, 1)} | ({"optimizer": (12, accelerators, accelerators)} if core else {})


def test_options_of_a_trainer_say_what_it_keeps(tmp_path: Path) -> None:
    shape, usual = shape_of(QWEN3_8B), config_for(tmp_path, 4)
    copies = replace(usual, trainer=PluginChoice("some", Copies()))
    assert size(copies, shape).satellite - size(usual, shape).satellite == (2 - 6 / 4) * shape.parameters
    assert size(copies, shape).core - size(copies, shape).satellite == 12 * shape.parameters // 4


@given(st.integers(1, 64), st.integers(1_000, 200_000))
def test_more_accelerators_never_need_more(accelerators: int, context: int) -> None:
    def sized(count: int):
        return estimate(
            shape_of(QWEN3_8B), accelerators=count, accelerator_gib=80, micro_batch_tokens=1, context_tokens=context
        )

    few, many = sized(accelerators), sized(accelerators + 1)
    assert many.core <= few.core
    assert many.satellite <= few.satellite
    assert many.kv_tokens >= few.kv_tokens


def config_for(folder: Path, accelerators: int) -> RunConfig:
    (folder / "shape.json").write_text(json.dumps(QWEN3_8B))
    return RunConfig(
        "big",
        ModelConfig("nowhere", shape="shape.json"),
        PluginChoice("files"),
        base_dir=str(folder),
        cells=CellsConfig(count=4, device="cuda", accelerators=accelerators),
        loss=LossConfig(micro_batch_tokens=32768),
    )


def test_what_does_not_fit_is_a_problem_that_says_what_to_change(tmp_path: Path) -> None:
    (problem,) = memory_problems(config_for(tmp_path, 1))
    assert "cells.accelerators: got 1: a core cell as TRAIN needs about" in str(problem)
    assert list(memory_problems(config_for(tmp_path, 4))) == []
    assert "8.2 billion weights" in memory_line(config_for(tmp_path, 4))
    assert memory_line(config_for(tmp_path, 0)) == ""


def test_a_rollout_cell_must_hold_one_full_context() -> None:
    found = estimate(
        shape_of(QWEN3_8B), accelerators=1, accelerator_gib=24, micro_batch_tokens=1, context_tokens=100_000
    )
    assert found.usable < 24 * GIB
    assert any("fewer than one full context" in text for text in problems_of(found))


def test_a_shape_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    config = config_for(tmp_path, 2)
    (tmp_path / "shape.json").write_text("{}")
    assert "KeyError('num_attention_heads')" in str(next(iter(memory_problems(config))))
    (tmp_path / "shape.json").unlink()
    assert "expected a config.json" in str(next(iter(memory_problems(config))))
