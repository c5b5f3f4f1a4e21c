"""Small sets of tensors for the tests."""

from __future__ import annotations

import numpy as np
import torch


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Like a tiny model's: a matrix, an odd-sized one, a vector, a scalar, an empty tensor, one of several chunks."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make).to(dtype)

    return {
        "model.embed_tokens.weight": normal(37, 11),
        "model.layers.0.mlp.weight": normal(700, 513),
        "model.norm.weight": normal(11),
        "model.scale": normal(1).reshape(()),
        "model.nothing": normal(0, 3),
    }


def changed(tensors: dict[str, torch.Tensor], part: float, seed: int = 1) -> dict[str, torch.Tensor]:
    """The same with about `part` of the elements of the matrices changed."""
    random = np.random.default_rng(seed)
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.weight"):
        flat = found[name].view(-1)
        at = torch.from_numpy(np.flatnonzero(random.random(flat.numel()) < part))
        flat[at] += 1.0
    return found


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes, so that NaN and -0.0 compare as what they are."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return set(left) == set(right) and all(bits(left[name]) == bits(right[name]) for name in left)


def empty_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Targets of the same form."""
    return {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
