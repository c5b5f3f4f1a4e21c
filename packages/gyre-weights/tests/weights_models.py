"""Small sets of tensors for the tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre_weights import Publisher, handover
from gyre_weights.handover import store

nearest = partial(handover.nearest, idle_s=200.0, total_s=280.0)
"""Patient: how fast a machine is decides no test."""
NOWHERE = "/nowhere/v4"
"""A location that no machine has."""


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


def equal(opened: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
    """Whether an opened version is these tensors, bit for bit."""
    return same({name: opened[name].torch() for name in opened}, tensors)


def deltas(folder: Path, count: int, *, keep: int = 20, full_every: int = 16) -> list[dict[str, torch.Tensor]]:
    """Publish versions 0 to count-1 under `folder`, the first whole; their tensors."""
    publisher = Publisher("delta", folder, keep=keep, full_every=full_every)
    made = [weights()]
    for version in range(count):
        made.append(changed(made[-1], 0.01, seed=version))
        publisher.publish(version, lambda: made[-1], {"config.json": b"{}"})
    return made[1:]


def left(into: Path) -> list[str]:
    """What lies in a folder of fetched versions, but for the lock."""
    return sorted(path.name for path in into.iterdir() if path.name != store.LOCK) if into.exists() else []


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until it is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
