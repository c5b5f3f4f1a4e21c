"""A mixture of experts through Megatron-Core is the transformers model, in values, gradients and after a step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gyre_loss as gl
import numpy as np
import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.ranks import check_it_is_transformers
from gyre_core.testing.trainer_rig import gap, step_once, weights_of
from gyre_loss.shares import alone as one_execution
from gyre_megatron.options import MegatronTrainerOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


CHECKED: list[dict[str, Any]] = [
    {},
    {"expert_parallel": 2, "ranks": 4},
    {"expert_parallel": 2, "pipeline_parallel": 2},
]
FURTHER: list[dict[str, Any]] = [
    {"pipeline_parallel": 2},
    {"ranks": 2},
    {"expert_parallel": 2},
    {"expert_parallel": 4, "recompute": True},
]
SPLITS = [*CHECKED, *(pytest.param(told, marks=pytest.mark.slow) for told in FURTHER)]


@pytest.mark.parametrize("told", SPLITS, ids=lambda told: "-".join(f"{k}{v}" for k, v in told.items()) or "one")
async def test_it_is_transformers(
    told: dict[str, Any],
    python: str,
    folder_of: Any,
    context: ComponentContext,
    batches: Any,
    expert_oracle: Any,
    told_logprobs: Any,
    pooled: Any,
    tmp_path: Path,
) -> None:
    core = pooled(MegatronTrainerOptions(python=python, cpu_shim=True, learning_rate=1e-2, **told), context)
    try:
        folder = folder_of("qwen3-moe", layers=2)
        await check_it_is_transformers(core, folder, batches(count=4), expert_oracle, told_logprobs, tmp_path)
        assert core.facts.experts == 4
    finally:
        await core.close()


async def test_what_only_fills_the_pipeline_is_not_counted(
    python: str, folder_of: Any, context: ComponentContext, batches: Any, pooled: Any
) -> None:
    """One execution is one part for four places in the pipeline: the ranks tell what a single rank tells of it."""
    source, batch = WeightSource(0, str(folder_of("qwen3-moe", layers=2))), batches(count=4)[0]
    tree = gl.from_bytes(bytearray(batch.blob))
    alone = one_execution(tree, tree.execution_ids[0])
    batch = dataclasses.replace(batch, tokens=alone.tokens, blob=gl.to_bytes(alone))
    found = []
    for told in ({}, {"expert_parallel": 2, "pipeline_parallel": 2}):
        options = MegatronTrainerOptions(python=python, cpu_shim=True, learning_rate=1e-2, **told)
        trainer = pooled(options, context)
        try:
            await trainer.start(source, core=False)
            found.append(await trainer.accumulate(batch))
        finally:
            await trainer.close()
    one, many = found
    assert (many.trained_tokens, many.tokens) == (one.trained_tokens, one.tokens)
    assert many.metrics["computed_tokens"] == alone.tokens
    assert many.loss_sum == pytest.approx(one.loss_sum, abs=1e-4)
    assert dict(many.metrics) == pytest.approx(dict(one.metrics), abs=1e-4)


async def test_a_checkpoint_goes_on_where_experts_lie_otherwise(
    python: str, folder_of: Any, context: ComponentContext, batches: Any, pooled: Any, tmp_path: Path
) -> None:
    base = MegatronTrainerOptions(python=python, cpu_shim=True, learning_rate=1e-2)
    source, work = WeightSource(0, str(folder_of("qwen3-moe", layers=2))), batches(count=4)
    found = []
    for told in ({"expert_parallel": 2}, {}):
        core = pooled(dataclasses.replace(base, **told), context)
        try:
            await core.start(source, core=True)
            if not found:
                await step_once(core, work, "first", tmp_path)
                await core.save(str(tmp_path / "checkpoint"))
            else:
                await core.restore(str(tmp_path / "checkpoint"))
            await step_once(core, work[:2], f"second{len(found)}", tmp_path)
            found.append(await weights_of(core, tmp_path / f"w{len(found)}"))
        finally:
            await core.close()
    assert gap(*found) < 1e-4


async def test_recorded_experts_are_refused_and_not_chosen_anew(
    python: str, folder_of: Any, context: ComponentContext, batches: Any, pooled: Any
) -> None:
    tree = gl.from_bytes(bytearray(batches(count=2)[0].blob))
    recorded = dataclasses.replace(tree, routed_experts=np.zeros((tree.tokens, 2, 2), np.int16))
    batch = dataclasses.replace(batches(count=2)[0], blob=gl.to_bytes(recorded))
    trainer = pooled(MegatronTrainerOptions(python=python, cpu_shim=True, learning_rate=1e-2), context)
    try:
        await trainer.start(WeightSource(0, str(folder_of("qwen3-moe", layers=2))), core=False)
        for action in (trainer.accumulate, trainer.logprobs):
            with pytest.raises(ValueError, match="experts that the engine recorded"):
                await action(batch)
    finally:
        await trainer.close()
