"""DeepSpeed passes the trainers' suite, in each ZeRO stage and with two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.trainers import TrainerConformance, TrainerRig
from gyre_deepspeed.options import DeepSpeedTrainerOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


class TestDeepSpeed(TrainerConformance):
    @pytest.fixture(params=["zero1", "zero2x2", "zero3", "zero3x2"])
    def rig(
        self,
        request: pytest.FixtureRequest,
        python: str,
        folder_of: Callable[..., Path],
        context: ComponentContext,
        batches: Any,
        oracle: Any,
        pooled: Any,
    ) -> TrainerRig:
        stage, _, ranks = request.param.removeprefix("zero").partition("x")
        options = DeepSpeedTrainerOptions(
            python=python, stage=int(stage), ranks=int(ranks or 1), learning_rate=1e-2, bucket_elements=20_000
        )
        return TrainerRig(
            lambda: pooled(options, context),
            WeightSource(0, str(folder_of("qwen3"))),
            batches(count=8),
            oracle,
            trials=3,
        )
