"""A transformers model as the module that DeepSpeed drives: tree tokens in, log-probabilities out.

ZeRO 3 fetches a weight when a module that owns it is called, so everything that uses weights happens inside calls of
modules: the output head is one of its own here, which shares the model's weight. Invariant: the forward is gyre-loss's
(`HFTreeModel`, `linear_logprob`); logits of the whole vocabulary never exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gyre_core import InfrastructureError
from gyre_loss.attention import Attention
from gyre_loss.hf import HFTreeModel
from gyre_loss.logprob import Logprobs, linear_logprob
from torch import Tensor, nn

_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop", "embd_pdrop")


class LogprobHead(nn.Module):
    """The output head as a module: log-probabilities of given tokens from hidden states [R, h]."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight
        self.bias = head.bias

    def forward(
        self, hidden: Tensor, wanted: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """logp [R] and entropy [R] or None."""
        found: Logprobs = linear_logprob(
            hidden, self.weight, wanted, bias=self.bias, temperature=temperature, entropy=entropy
        )
        return found.logp, found.entropy


class TreeModule(nn.Module):
    """The model and its head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.tree = HFTreeModel(model)
        finder: Any = model
        self.head = LogprobHead(finder.get_output_embeddings())

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        wanted: Tensor,
        attention: Attention,
        experts: Tensor | None,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probability [R] of `wanted` after the tokens at `rows`, and entropies if asked for."""
        hidden = self.tree.hidden(ids, positions, attention, experts)
        found: tuple[Tensor, Tensor | None] = self.head(hidden[rows], wanted, temperature, entropy)
        return found


def make_model(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The transformers model of a folder without its weights (random ones): no dropout, no KV cache."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        for name in _DROPOUTS:
            if getattr(config, name, 0.0):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError) as error:
        raise InfrastructureError(
            f"making the model under {folder}", got=f"{type(error).__name__}: {error}",
            expected="a Hugging Face folder with a config.json that transformers knows",
        ) from error  # fmt: skip
    model.config.use_cache = False
    found: nn.Module = model
    return found
