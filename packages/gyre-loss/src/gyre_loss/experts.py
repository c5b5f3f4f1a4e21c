"""Replaying the engine's expert choice in a mixture-of-experts model of transformers.

Engine and trainer compute router logits in different orders and precisions, so near-ties fall to different experts
and the trainer's log-probabilities are those of another network. Given the experts that the engine recorded, the
routers of the trainer keep their own logits (and gradients) but weight the recorded experts. The invariant: where the
recorded experts are the router's own choice nothing changes; a router of a form that this formula does not reproduce
is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gyre_loss._check import fail

_DOING = "replaying recorded experts"


def routers(model: nn.Module) -> list[nn.Module]:
    """The top-k routers of a model, in layer order."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextmanager
def replaying(model: nn.Module, experts: Tensor) -> Iterator[None]:
    """Within this, one forward over n tokens takes its experts from int64[n, layers, k]; -1: the router's own choice.

    Raises ValueError where the model's routers are not as many, not as wide, or not softmax routers.
    """
    found = routers(model)
    if not found or len(found) != experts.shape[1]:
        fail(_DOING, f"{len(found)} top-k routers in the model", f"{experts.shape[1]}, the layers recorded")
    with ExitStack() as stack:
        for layer, router in enumerate(found):
            hook = _Replay(layer, experts[:, layer])
            stack.callback(router.register_forward_hook(hook).remove)
        yield


class _Replay:
    """A forward hook: (logits, scores, indices) to the same with the recorded experts."""

    def __init__(self, layer: int, recorded: Tensor) -> None:
        self._layer, self._recorded = layer, recorded

    def __call__(self, router: nn.Module, inputs: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, indices = output
        recorded = self._recorded.to(indices.device, indices.dtype)
        if recorded.shape != indices.shape:
            fail(_DOING, f"recorded experts {tuple(recorded.shape)} in layer {self._layer}", f"{tuple(indices.shape)}")
        if bool((recorded >= logits.shape[1]).any()):
            fail(_DOING, f"expert {int(recorded.max())} in layer {self._layer}", f"experts below {logits.shape[1]}")
        normalise = bool(getattr(router, "norm_topk_prob", True))
        own = _weights(logits, indices, normalise).to(scores.dtype)
        if not torch.allclose(own, scores, rtol=1e-2, atol=1e-3):
            fail(
                _DOING,
                f"a {type(router).__name__} whose weights are no softmax over its logits",
                "a softmax top-k router",
                "Switch the replay off with Options(replay_experts=False).",
            )
        known = (recorded >= 0).all(1, keepdim=True)
        chosen = torch.where(known, recorded, indices)
        return logits, _weights(logits, chosen, normalise).to(scores.dtype), chosen


def _weights(logits: Tensor, chosen: Tensor, normalise: bool) -> Tensor:
    weights = torch.softmax(logits.float(), -1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if normalise else weights
