"""DeepSpeed passes the trainers' suite, in each ZeRO stage and with two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.ranks.options import PUBLISH
from gyre_core.testing.publishing import TrainerPublishing
from gyre_core.testing.ranks import AgainstReference
from gyre_core.testing.trainers import TrainerArithmetic, TrainerConformance, TrainerRig
from gyre_deepspeed.options import DeepSpeedTrainerOptions
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.engine import LocalEngine
from gyre_local.train.trainer import LocalTrainer

RATE = 1e-3
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


class Given:
    """The rig of a way. Ways are parameters of a class, so that one's tests follow each other and its ranks are used
    again."""

    @pytest.fixture
    def options(self, way: str, python: str) -> DeepSpeedTrainerOptions:
        split, _, more = way.removeprefix("zero").partition("-")
        stage, _, ranks = split.partition("x")
        return DeepSpeedTrainerOptions(
            python=python, stage=int(stage), ranks=int(ranks), learning_rate=1e-2, bucket_elements=20_000,
            offload_optimizer="offload" in more, recompute="recompute" in more,
        )  # fmt: skip

    @pytest.fixture
    def rig(
        self,
        options: DeepSpeedTrainerOptions,
        folder_of: Callable[..., Path],
        context: ComponentContext,
        batches: Any,
        oracle: Any,
        told_logprobs: Any,
        pooled: Any,
    ) -> TrainerRig:
        return TrainerRig(
            lambda: pooled(options, context),
            WeightSource(0, str(folder_of("qwen3"))),
            batches(count=8),
            oracle,
            told_logprobs,
            trials=2,
            kinds={kind: partial(pooled, dataclasses.replace(options, publish=kind), context) for kind in PUBLISH},
            engine=lambda: LocalEngine(LocalEngineOptions(kv_tokens=1024), context),
        )

    @pytest.fixture
    def slow(self, options: DeepSpeedTrainerOptions, context: ComponentContext, pooled: Any) -> Callable[[], Any]:
        return partial(pooled, dataclasses.replace(options, learning_rate=RATE), context)

    @pytest.fixture
    def reference(self, context: ComponentContext) -> Callable[[], LocalTrainer]:
        return lambda: LocalTrainer(LocalTrainerOptions(learning_rate=RATE), context)


@pytest.mark.parametrize("way", [pytest.param("zero1x1", marks=pytest.mark.slow), "zero3x2"], scope="class")
class TestDeepSpeed(Given, TrainerConformance, AgainstReference):
    """Everything."""


@pytest.mark.parametrize("way", ["zero3x2"], scope="class")
class TestPublishing(Given, TrainerPublishing):
    """Every rank its shards, in every way."""


@pytest.mark.slow  # every check has zero3x2, above
@pytest.mark.parametrize("way", ["zero1x2", "zero2x1", "zero2x2", "zero3x1"], scope="class")
class TestWays(Given, TrainerArithmetic, AgainstReference):
    """What depends on the way."""


@pytest.mark.parametrize("way", ["zero2x2-offload-recompute", "zero3x1-offload"], scope="class")
class TestOffloading(Given, AgainstReference):
    """Masters and moments in host memory, layers that are computed twice."""
