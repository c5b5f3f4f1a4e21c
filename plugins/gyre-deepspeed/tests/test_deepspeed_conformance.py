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
    @pytest.fixture(scope="class", params=["zero1", "zero1x2", "zero2", "zero2x2", "zero3", "zero3x2"])
    def stage_and_ranks(self, request: pytest.FixtureRequest) -> tuple[int, int]:
        """Of the class, so that one way's tests follow each other and its ranks are used again."""
        stage, _, ranks = request.param.removeprefix("zero").partition("x")
        return int(stage), int(ranks or 1)

    @pytest.fixture
    def rig(
        self,
        stage_and_ranks: tuple[int, int],
        python: str,
        folder_of: Callable[..., Path],
        context: ComponentContext,
        batches: Any,
        oracle: Any,
        told_logprobs: Any,
        pooled: Any,
    ) -> TrainerRig:
        stage, ranks = stage_and_ranks
        options = DeepSpeedTrainerOptions(
            python=python, stage=stage, ranks=ranks, learning_rate=1e-2, bucket_elements=20_000
        )
        return TrainerRig(
            lambda: pooled(options, context),
            WeightSource(0, str(folder_of("qwen3"))),
            batches(count=8),
            oracle,
            told_logprobs,
            trials=3,
        )
