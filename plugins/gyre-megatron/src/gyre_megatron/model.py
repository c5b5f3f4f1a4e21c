# mypy: disable-error-code="import-not-found, misc"
"""A causal model of Megatron-Core's parts for trees: its embedding, its transformer block, an own core attention.

`GPTModel` ignores positions for rope and computes logits; here positions run along each path, attention is gyre-loss's
`TreeAttention`, and hidden states come out of the last stage, for `linear_logprob` over the ranks' shares of the
vocabulary. Invariant: a layer computes with the tree of the batch whose activations it has, also when several batches
are in the pipeline and when a layer is computed again during backward: what travels with the activations is the batch's
number, a tensor, and the trees are looked up by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from gyre_loss.pieces import TreeAttention
from megatron.core import parallel_state, tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gyre_megatron.families import Shape, frequencies

Trees = dict[int, TreeAttention]


class TreeCore(MegatronModule):
    """Core attention of one layer: query [s, 1, heads, size] to [s, 1, heads x size]."""

    def __init__(self, config: Any, layer_number: int, *ignored: Any, trees: Trees, **more: Any) -> None:
        super().__init__(config=config)
        self.layer_number, self.trees = layer_number, trees
        self.scale = more.get("softmax_scale")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **ignored: Any) -> Tensor:
        """`attention_mask` is the number of the batch's tree."""
        tree = self.trees[int(attention_mask)]
        out = tree(query, key, value, scale=self.scale, layer=self.layer_number - 1)
        return out.reshape(query.shape[0], query.shape[1], -1)


def complete_experts() -> None:
    """Without TransformerEngine, Megatron-Core 0.16.1 asks for its product by a name that is not defined then; None is
    what the code expects there."""
    library: Any = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(library, "te_general_gemm"):
        library.te_general_gemm = None


def config_of(shape: Shape, options: Any, *, dtype: torch.dtype, cpu: bool) -> Any:
    """Megatron's configuration. What needs apex, TransformerEngine or fused kernels is off."""
    tensor, pipeline, expert = options.tensor_parallel, options.pipeline_parallel, options.expert_parallel
    experts: dict[str, Any] = {}
    if shape.experts:
        experts = {
            "num_moe_experts": shape.experts, "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_intermediate, "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0, "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
            "moe_token_dispatcher_type": "alltoall" if expert > 1 else "allgather",  # ranks have unequal tokens
            "moe_grouped_gemm": False, "moe_router_dtype": "fp32", "expert_model_parallel_size": expert,
            "expert_tensor_parallel_size": 1,
        }  # fmt: skip
    if options.recompute:
        experts |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads, kv_channels=shape.head_dim, ffn_hidden_size=shape.intermediate,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline,
        pipeline_dtype=dtype if pipeline > 1 else None, params_dtype=dtype, bf16=dtype is torch.bfloat16,
        use_cpu_initialization=cpu, perform_initialization=False, normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps, qk_layernorm=shape.qk_norm, add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        batch_p2p_comm=not cpu, deallocate_pipeline_outputs=True, calculate_per_token_loss=True, **experts,
    )  # fmt: skip


class TreeModel(MegatronModule):
    """This pipeline stage's part of the model."""

    def __init__(self, config: Any, shape: Shape, vocabulary: int, trees: Trees) -> None:
        super().__init__(config=config)
        self.model_type = ModelType.encoder_or_decoder
        self.first = parallel_state.is_pipeline_first_stage()
        self.last = parallel_state.is_pipeline_last_stage()
        self.shared = shape.tied
        if shape.experts:
            complete_experts()
        spec = get_gpt_layer_local_spec(
            num_experts=shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
        )
        spec.submodules.self_attention.submodules.core_attention = partial(TreeCore, trees=trees)
        if self.first:
            self.embedding = LanguageModelEmbedding(
                config, vocabulary, max(1, shape.positions), position_embedding_type="rope"
            )
        self.decoder = TransformerBlock(config, spec, pre_process=self.first, post_process=self.last)
        if self.last and not (self.first and shape.tied):
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size, vocabulary, config=config, init_method=config.init_method, bias=False,
                gather_output=False,
            )  # fmt: skip
        self.register_buffer("frequencies", torch.tensor(frequencies(shape), dtype=torch.float32), persistent=False)

    def set_input_tensor(self, given: Sequence[Tensor] | Tensor | None) -> None:
        """What the stage before sent."""
        tensor = given[0] if isinstance(given, list | tuple) else given
        self.decoder.set_input_tensor(tensor)

    def forward(self, ids: Tensor, positions: Tensor, number: Tensor) -> Tensor:
        """Hidden states [s, 1, h]: to the next stage, or normalised ones. `ids` and `positions` int64[1, s]."""
        hidden = self.embedding(input_ids=ids, position_ids=positions) if self.first else None
        frequencies: Tensor = self.frequencies
        angles = positions[0].to(torch.float32)[:, None] * frequencies
        rope = torch.cat([angles, angles], -1)[:, None, None]
        found: Tensor = self.decoder(hidden_states=hidden, attention_mask=number, rotary_pos_emb=rope)
        return found

    def head(self) -> Tensor:
        """Last stage: this rank's share of the output matrix."""
        weight: Tensor = (
            self.embedding.word_embeddings.weight if self.first and self.shared else self.output_layer.weight
        )
        return weight
