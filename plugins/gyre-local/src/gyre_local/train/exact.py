"""Norms for float64 training.

transformers computes RMSNorm in float32 whatever the model's dtype; in float64 that rounding would make a gradient
depend on how work was split. Invariant: same formula, same weights, the input's own precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ExactRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Any leading shape."""
        return self.weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps))


def use_exact_norms(model: nn.Module) -> int:
    """Replace every RMSNorm of a transformers model; how many there were."""
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                norm: Any = child
                setattr(module, name, ExactRMSNorm(norm.weight, float(norm.variance_epsilon)))
                count += 1
    return count
