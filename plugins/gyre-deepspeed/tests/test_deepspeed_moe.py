"""A mixture of experts under DeepSpeed is the transformers model, whose experts are stacked where files name each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext
from gyre_core.testing.ranks import check_it_is_transformers
from gyre_deepspeed.options import DeepSpeedTrainerOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize(("stage", "ranks"), [(2, 2), (3, 2)])
async def test_it_is_transformers(
    stage: int,
    ranks: int,
    python: str,
    folder_of: Any,
    context: ComponentContext,
    batches: Any,
    expert_oracle: Any,
    told_logprobs: Any,
    pooled: Any,
    tmp_path: Path,
) -> None:
    options = DeepSpeedTrainerOptions(
        python=python, stage=stage, ranks=ranks, learning_rate=1e-2, bucket_elements=20_000
    )
    core = pooled(options, context)
    try:
        folder = folder_of("qwen3-moe")
        await check_it_is_transformers(core, folder, batches(count=4), expert_oracle, told_logprobs, tmp_path)
        assert core.facts.experts == 4
        assert core.facts.router_replay
    finally:
        await core.close()
