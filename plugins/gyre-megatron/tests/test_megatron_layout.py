"""How Megatron's parameters lie in the named ones, without Megatron: the parts of all ranks tile every tensor once."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, ConfigError
from gyre_megatron.cpu_shim import RULES
from gyre_megatron.families import check_split, frequencies, shape_of
from gyre_megatron.layout import Layout
from gyre_megatron.options import MegatronTrainerOptions
from gyre_megatron.trainer import plan_of, world

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 6, "intermediate_size": 20, "vocab_size": 31, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
}  # fmt: skip
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
CONFIGS = {
    "qwen3": {"tie_word_embeddings": True},
    "qwen3-untied": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 8},
    "qwen3-moe": {"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS},
}


def local_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Megatron's parameters on one rank of a tensor-parallel group, as its modules make them."""
    s, ranks = layout.shape, layout.ranks
    rows = layout.padded_vocabulary // ranks
    qkv = (s.heads + 2 * s.kv_heads) * s.head_dim // ranks
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (rows, s.hidden)}
    for layer in range(s.layers):
        top = f"decoder.layers.{layer}."
        found |= {
            f"{top}input_layernorm.weight": (s.hidden,), f"{top}pre_mlp_layernorm.weight": (s.hidden,),
            f"{top}self_attention.linear_qkv.weight": (qkv, s.hidden),
            f"{top}self_attention.linear_proj.weight": (s.hidden, s.heads * s.head_dim // ranks),
        }  # fmt: skip
        if s.qkv_bias:
            found[f"{top}self_attention.linear_qkv.bias"] = (qkv,)
        if s.qk_norm:
            found |= {f"{top}self_attention.{name}_layernorm.weight": (s.head_dim,) for name in "qk"}
        tops = [(f"{top}mlp.", s.intermediate)]
        if s.experts:
            found[f"{top}mlp.router.weight"] = (s.experts, s.hidden)
            tops = [(f"{top}mlp.experts.local_experts.{e}.", s.expert_intermediate) for e in range(s.experts)]
        for mine, width in tops:
            found[f"{mine}linear_fc1.weight"] = (2 * width // ranks, s.hidden)
            found[f"{mine}linear_fc2.weight"] = (s.hidden, width // ranks)
    found["decoder.final_layernorm.weight"] = (s.hidden,)
    if not s.tied:
        found["output_layer.weight"] = (rows, s.hidden)
    return found


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_parts_of_all_ranks_tile_every_tensor_once(kind: str, ranks: int) -> None:
    shape = shape_of(BASE | CONFIGS[kind])
    full = {name: torch.zeros(size) for name, size in Layout(shape, 0, ranks).full_shapes()}
    values = {name: torch.randn(size) for name, size in Layout(shape, 0, ranks).full_shapes()}
    for rank in range(ranks):
        layout = Layout(shape, rank, ranks)
        for name, size in local_shapes(layout).items():
            local = torch.full(size, float("nan"))
            for part in layout.parts(name):
                assert part.pick(local).shape == part.take(full[part.name]).shape, (name, part.name)
                part.pick(local).copy_(part.take(values[part.name]))
                if rank == 0 or not part.replicated:
                    part.take(full[part.name]).add_(part.pick(torch.ones(size)))
            if "embedd" not in name and "output" not in name:
                assert not local.isnan().any(), name
    assert all(bool((tensor == 1).all()) for tensor in full.values())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_expert_is_on_one_expert_parallel_rank(ranks: int) -> None:
    shape = shape_of(BASE | CONFIGS["qwen3-moe"] | {"num_experts": 4})
    name = "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight"
    found = []
    for rank in range(ranks):
        layout = Layout(shape, 0, 1, rank, ranks)
        for local in range(4 // ranks):
            parts = layout.parts(name.replace("experts.0", f"experts.{local}"))
            assert all(part.expert and not part.replicated for part in parts)
            found += [part.name for part in parts]
    assert found == [f"model.layers.1.mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("gate", "up")]
    assert not any(part.expert for part in layout.parts("decoder.layers.1.mlp.router.weight"))
    assert len(layout.full_shapes()) == len(Layout(shape, 0, 1).full_shapes())


def test_heads_of_a_group_lie_together() -> None:
    """Megatron reads each group of heads as its queries, then its key, then its value."""
    shape = shape_of(BASE)
    layout = Layout(shape, 1, 2)
    parts = {
        part.name.split(".")[-2]: part for part in layout.parts("decoder.layers.0.self_attention.linear_qkv.weight")
    }
    local = torch.zeros(48, 16)
    query = torch.arange(48.0)[:, None].expand(48, 16).contiguous()
    parts["q_proj"].pick(local).copy_(parts["q_proj"].take(query))
    assert local[:, 0].view(2, 4, 6)[:, :2].reshape(-1).tolist() == list(range(24, 48))
    assert local[:, 0].view(2, 4, 6)[:, 2:].abs().sum() == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"attention_bias": True}, "attention_bias"),
        ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "norm_topk_prob": False}, "norm_topk_prob"),
        ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "num_experts": 0}, "num_experts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], **EXPERTS, "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_what_would_be_computed_wrong_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of(BASE | change)


def test_experts_are_counted_under_either_name() -> None:
    """transformers 5 writes num_local_experts where Qwen's own files have num_experts."""
    told = BASE | CONFIGS["qwen3-moe"]
    renamed = {key: value for key, value in told.items() if key != "num_experts"} | {"num_local_experts": 3}
    assert shape_of(renamed) == shape_of(told)
    assert shape_of(renamed).experts == 3


def test_splits_that_leave_a_remainder_are_refused() -> None:
    shape = shape_of(BASE)
    check_split(shape, 4, 2)
    for tensor, pipeline, named in ((8, 1, "num_key_value_heads"), (1, 3, "num_hidden_layers")):
        with pytest.raises(ConfigError, match=named):
            check_split(shape, tensor, pipeline)
    with pytest.raises(ConfigError, match="experts"):
        check_split(shape_of(BASE | CONFIGS["qwen3-moe"]), 2, 1)
    check_split(shape_of(BASE | CONFIGS["qwen3-moe"]), 1, 2, 3)
    for kind in ("qwen3-moe", "qwen3"):  # three experts, and none
        with pytest.raises(ConfigError, match="num_experts"):
            check_split(shape_of(BASE | CONFIGS[kind]), 1, 1, 2)


@pytest.mark.parametrize(
    "told",
    [
        {"sequence_parallel": True},
        {"context_parallel": 2},
        {"expert_parallel": 2, "tensor_parallel": 2},
        {"ranks": 2, "pipeline_parallel": 2, "expert_parallel": 2},
        {"tensor_parallel": 2, "ranks": 3},
        {"tensor_parallel": 0},
    ],
)
def test_options_that_cannot_work_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(told))):
        MegatronTrainerOptions(**told)


def test_ranks_follow_from_the_split_or_from_the_cell(tmp_path: Path) -> None:
    context = ComponentContext(str(tmp_path), "cell")
    assert world(MegatronTrainerOptions(tensor_parallel=2, pipeline_parallel=2), context) == 4
    spread = MegatronTrainerOptions(expert_parallel=4, pipeline_parallel=2)
    assert world(spread, context) == 8
    cell = ComponentContext(str(tmp_path), "cell", device="cuda:0", accelerators=8)
    assert world(MegatronTrainerOptions(tensor_parallel=2), cell) == 8
    with pytest.raises(ConfigError, match="multiple"):
        world(MegatronTrainerOptions(tensor_parallel=3), cell)
    with pytest.raises(ConfigError, match="cpu_shim"):
        plan_of(MegatronTrainerOptions(python=sys.executable), context)
    plan = plan_of(MegatronTrainerOptions(python=sys.executable, cpu_shim=True), context)
    assert json.loads(json.dumps(plan.body))["options"]["cpu_shim"] is True


def test_the_memory_estimate_is_told_what_ranks_keep() -> None:
    """Megatron's float32 gradient buffers and the adapter's sum of them, at a satellite too."""
    spread = MegatronTrainerOptions(dtype="bfloat16", expert_parallel=4, pipeline_parallel=2)
    satellite = {"weights": (2, 2, 8), "gradients": (4, 2, 8), "open sum": (4, 2, 8)}
    assert spread.kept(8, core=False) == satellite
    assert spread.kept(8, core=True) == satellite | {"moments": (8, 2, 8), "masters": (4, 2, 8)}
    copies = MegatronTrainerOptions(tensor_parallel=2)
    assert copies.kept(8, core=True) == {
        "weights": (4, 2, 2), "gradients": (4, 2, 2), "open sum": (4, 2, 2), "moments": (8, 2, 2),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["default", "llama3", "linear"])
def test_rope_is_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": kind, "rope_theta": 5e5}
    if kind == "linear":
        rope["factor"] = 4.0
    if kind == "llama3":
        rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 64
    config = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=4, num_key_value_heads=4, rope_parameters=rope, vocab_size=16
    )
    wanted = LlamaRotaryEmbedding(config).inv_freq
    shape = shape_of({**config.to_dict(), "architectures": ["LlamaForCausalLM"]})
    assert torch.allclose(torch.tensor(frequencies(shape)), wanted.float(), rtol=1e-5)


def test_the_shim_rewrites_places_and_nothing_else() -> None:
    def rewritten(text: str) -> str:
        for pattern, replacement in RULES:
            text = re.sub(pattern, replacement, text)
        return text

    assert rewritten("torch.zeros(3, device='cuda')") == 'torch.zeros(3, device="cpu")'
    assert rewritten("x.cuda(torch.cuda.current_device())") == "x.cpu()"
    assert rewritten("'torch.cuda.HalfTensor'") == "'torch.HalfTensor'"
    assert rewritten("torch.cuda.synchronize()") == "None"
    assert "NO_STREAM" in rewritten("side = torch.cuda.Stream()")
    assert rewritten("with torch.cuda.stream(side):") == 'with __import__("contextlib").nullcontext(side):'
    plain = "loss = (a @ b).sum() / torch.distributed.get_world_size()"
    assert rewritten(plain) == plain
