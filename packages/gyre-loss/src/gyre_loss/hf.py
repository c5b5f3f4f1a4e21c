"""Hugging Face causal language models as TreeModels, unmodified.

transformers lets a model's attention be replaced by name. ``register()`` adds the name ``gyre_tree`` to that table;
nothing is registered when this module is imported. ``HFTreeModel`` switches the model to that name for the time of
one forward and back, and hands the attention object down as a keyword argument. The invariant: outside of such a
forward the model is as it was. Models whose logits are not ``hidden @ head`` and layers whose attention takes extra
terms are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from gyre_loss._check import fail
from gyre_loss.attention import Attention
from gyre_loss.experts import replaying
from gyre_loss.model import Head, TreeModel

NAME = "gyre_tree"
_DOING = "adapting a Hugging Face model"
_LOGIT_TERMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "output_multiplier_scale")
_ATTENTION_LAYERS = ("full_attention", "sliding_attention", "attention")
_RECURRENT = re.compile("mamba|rwkv|recurrent|deltanet|ssm|lstm", re.IGNORECASE)
_EXTRA_TERMS = ("softcap", "s_aux", "position_bias")


def register() -> None:
    """Add ``gyre_tree`` to the attention functions of transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    gyre_attention: Attention | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: query [1, H, n, D] to output [1, n, H, D], by ``gyre_attention``."""
    layer = int(getattr(module, "layer_idx", 0) or 0)
    doing = f"computing tree attention in layer {layer}"
    if gyre_attention is None:
        fail(doing, "a model switched to 'gyre_tree' and called without a tree", "a call through gyre_loss")
    if dropout:
        fail(doing, f"attention dropout {dropout}", "none", "Set attention_dropout to 0, or call model.eval().")
    for name in _EXTRA_TERMS:
        if extra.get(name) is not None:
            fail(doing, f"attention with {name}", "plain softmax attention", 'Use method="branches".')
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = gyre_attention(layer, query[0], key[0], value[0], scale=scale, window=sliding_window)
    return out.transpose(0, 1)[None], None


class _Counted:
    """An attention that counts its calls: a layer that goes another way must not go unnoticed."""

    def __init__(self, attention: Attention) -> None:
        self._attention, self.calls = attention, 0

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None
    ) -> Tensor:
        self.calls += 1
        return self._attention(layer, query, key, value, scale=scale, window=window)


class HFTreeModel:
    """A transformers causal model (Qwen3, Llama and others whose attention can be named) as a TreeModel."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap ``model``; raises ValueError where its logits are not a plain linear head."""
        config: Any = getattr(model, "config", None)
        base: Any = getattr(model, getattr(model, "base_model_prefix", "") or "", None)
        find_head = getattr(model, "get_output_embeddings", None)
        head = None if find_head is None else find_head()
        if config is None or base is None or base is model or not hasattr(head, "weight"):
            fail(
                _DOING,
                f"{type(model).__name__} without a decoder and a linear output head",
                "a transformers causal language model",
                "Other models need an object with the methods of gyre_loss.model.TreeModel.",
            )
        for name in _LOGIT_TERMS:
            value = getattr(config, name, None)
            if value not in (None, 1, 1.0):
                fail(_DOING, f"config.{name} = {value}", "logits that are hidden @ head", "Write a TreeModel for it.")
        self._model, self._base, self._config = model, base, config
        self._head = cast(nn.Linear, head)

    @property
    def device(self) -> torch.device:
        """Where the token ids go."""
        return self._head.weight.device

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return int(self._config.num_hidden_layers)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that ``config.layer_types`` names as anything but full or sliding attention.

        Without ``layer_types``: all of them, if the model has a module of a kind known to be recurrent.
        """
        kinds = getattr(self._config, "layer_types", None)
        if kinds is None:
            recurrent = any(_RECURRENT.search(type(module).__name__) for module in self._base.modules())
            return tuple(range(self.layers)) if recurrent else ()
        return tuple(index for index, kind in enumerate(kinds) if kind not in _ATTENTION_LAYERS)

    def hidden(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, experts: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [n, h], each layer's attention computed by ``attention``."""
        if torch.is_grad_enabled() and self._config._attn_implementation != NAME and self._checkpoints():
            fail(
                _DOING,
                "a model with gradient checkpointing, whose layers run again during backward",
                "forward and backward inside one session",
                "Use accumulate(), or put tree_loss and backward in `with HFTreeModel(model).session():`.",
            )
        counted = _Counted(attention)
        with self.session(), self._routed(experts):
            output = self._base(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, gyre_attention=counted
            )
        if counted.calls != self.layers:
            fail(
                _DOING,
                f"{counted.calls} of {self.layers} layers that let their attention be given",
                "all of them",
                'The others would see across branches. Use method="branches".',
            )
        return cast(Tensor, output.last_hidden_state)[0]

    def causal_hidden(self, token_ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """Final hidden states [n, h] of one sequence, by the attention that the model came with."""
        with self._routed(experts):
            output = self._base(input_ids=token_ids[None], use_cache=False)
        return cast(Tensor, output.last_hidden_state)[0]

    def _routed(self, experts: Tensor | None) -> AbstractContextManager[None]:
        if experts is None:
            return nullcontext()
        if torch.is_grad_enabled() and self._checkpoints():
            fail(_DOING, "recorded experts and gradient checkpointing", "one of them", "Switch checkpointing off.")
        return replaying(self._base, experts)

    def head(self) -> Head:
        """The model's output embeddings."""
        return Head(self._head.weight, getattr(self._head, "bias", None))

    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters that take gradients, each once."""
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]

    def _checkpoints(self) -> bool:
        return any(getattr(m, "gradient_checkpointing", False) and m.training for m in self._base.modules())

    @contextmanager
    def session(self) -> Iterator[None]:
        """The time for which the model's attention is the tree's; may be nested."""
        register()
        before = self._config._attn_implementation
        self._config._attn_implementation = NAME
        try:
            yield
        finally:
            self._config._attn_implementation = before


def as_tree_model(model: object) -> TreeModel:
    """``model`` itself if it is a TreeModel, else its Hugging Face adapter; raises ValueError for anything else."""
    if isinstance(model, nn.Module):
        return HFTreeModel(model)
    if isinstance(model, TreeModel):
        return model
    return fail(_DOING, f"a {type(model).__name__}", "a transformers causal model or a gyre_loss.model.TreeModel")
