"""The border between a loss and a model.

A ``TreeModel`` gives hidden states for tokens at stated positions, calling the attention it is handed in each layer,
and names its output head. ``gyre_loss.hf`` adapts Hugging Face causal models; adapters for other trainers live with
them. The invariant: a model sees no tree. All that it may know of one is in the attention object and the positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from gyre_loss.attention import Attention


class RecurrentLayersError(ValueError):
    """The model has layers that carry state along the sequence other than by attention over its tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """Output head: ``weight`` [V, h] (or this rank's share with ``group``), ``bias`` [V] or None."""

    weight: Tensor
    bias: Tensor | None = None
    group: dist.ProcessGroup | None = None


@runtime_checkable
class TreeModel(Protocol):
    """A causal language model that lets its attention be given.

    ``recurrent_layers``: indices of layers that no attention object can serve; ``layers``: how many call attention.
    """

    @property
    def device(self) -> torch.device:
        """Where token ids go."""

    @property
    def layers(self) -> int:
        """How many layers the model has."""

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers that carry state other than by attention over tokens."""

    def hidden(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, experts: Tensor | None = None
    ) -> Tensor:
        """Final hidden states [n, h], normalised, of int64[n] tokens at int64[n] positions.

        ``experts`` int64[n, layers, k]: recorded routing to replay (-1: the router's own), or None.
        """

    def causal_hidden(self, token_ids: Tensor, experts: Tensor | None = None) -> Tensor:
        """Final hidden states [n, h] of one plain sequence int64[n], by the model's own attention."""

    def head(self) -> Head:
        """The output head."""

    def session(self) -> AbstractContextManager[None]:
        """Held over a forward and its backward; may be nested. Where nothing needs it, ``nullcontext()``."""

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that take gradients."""


def refuse_recurrent(model: TreeModel, method: str) -> None:
    """Raise RecurrentLayersError if ``method`` cannot compute this model."""
    if model.recurrent_layers:
        raise RecurrentLayersError(
            f"while computing a tree loss with method={method!r}: layers {list(model.recurrent_layers)} are "
            "recurrent (or neither full nor sliding attention), and their state would leak from one branch into "
            "the next; expected attention layers only. "
            'Use method="branches", or pass Options(recurrent="branches") to fall back to it.'
        )
