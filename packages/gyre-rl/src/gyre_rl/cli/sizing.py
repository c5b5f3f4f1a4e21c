"""The memory estimate of a run's cells: reads the model's config.json, the rest is `gyre_rl.config.memory`.

Invariant: says nothing of a run on CPU, and nothing of a model whose shape it cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from gyre_rl.config import Problem, RunConfig
from gyre_rl.config.memory import GIB, Estimate, ModelShape, estimate, problems_of, shape_of


def model_shape(config: RunConfig) -> ModelShape | None:
    """The model's shape, from `model.shape` or the model's folder; None when neither is there."""
    path = config.resolve(config.model.shape) if config.model.shape else config.model_dir / "config.json"
    if not path.is_file():
        return None
    return shape_of(json.loads(path.read_text(encoding="utf-8")))


def size(config: RunConfig, shape: ModelShape) -> Estimate:
    """The estimate for the run's cells."""
    count = config.cells.accelerators
    kept = getattr(config.trainer.options, "kept", None)
    return estimate(
        shape,
        accelerators=count,
        accelerator_gib=config.cells.accelerator_gib,
        micro_batch_tokens=config.loss.micro_batch_tokens,
        context_tokens=config.limits.max_context_tokens or config.loss.micro_batch_tokens,
        kept=(kept(count, core=False), kept(count, core=True)) if kept else None,
    )


def memory_problems(config: RunConfig) -> Iterator[Problem]:
    """What does not fit into the cells' accelerators."""
    if not config.cells.accelerators:
        return
    try:
        shape = model_shape(config)
    except (OSError, ValueError, KeyError) as error:
        key = "model.shape" if config.model.shape else "model.path"
        yield Problem(key, f"got a config.json that cannot be read ({error!r}), expected a Hugging Face model's")
        return
    if shape is None:
        if config.model.shape:
            yield Problem("model.shape", f"got {config.resolve(config.model.shape)}, expected a config.json")
        return
    for text in problems_of(size(config, shape)):
        yield Problem("cells.accelerators", f"got {config.cells.accelerators}: {text}")


def memory_line(config: RunConfig) -> str:
    """The estimate in words; empty when there is none to give."""
    shape = model_shape(config) if config.cells.accelerators else None
    if shape is None:
        return ""
    found = size(config, shape)
    active = f" ({shape.active / 1e9:.1f} active)" if shape.active != shape.parameters else ""
    return (
        f"{shape.parameters / 1e9:.1f} billion weights{active}; GiB an accelerator of {found.usable / GIB:.0f} usable: "
        f"rollout {found.rollout_weights / GIB:.0f} and {found.kv_tokens} tokens of KV a cell "
        f"({found.full_contexts} full contexts), satellite {found.satellite / GIB:.0f}, core {found.core / GIB:.0f}"
    )
