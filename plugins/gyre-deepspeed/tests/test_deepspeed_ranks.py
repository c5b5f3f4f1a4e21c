"""DeepSpeed beside the embedded trainer: same parameters from the same data, satellites of another backend, other
numbers of ranks, faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from gyre_core import ComponentContext
from gyre_core.testing.ranks import RankTrainerChecks
from gyre_deepspeed.options import DeepSpeedTrainerOptions
from gyre_local.options import LocalTrainerOptions
from gyre_local.train.trainer import LocalTrainer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
RATE = 1e-3


class TestRanks(RankTrainerChecks):
    two: ClassVar = {"stage": 3, "ranks": 2}
    elsewhere: ClassVar = ({"stage": 1}, {"stage": 2, "ranks": 2})

    @pytest.fixture
    def reference(self, context: ComponentContext) -> Callable[[], LocalTrainer]:
        return lambda: LocalTrainer(LocalTrainerOptions(learning_rate=RATE), context)

    @pytest.fixture
    def ranks(self, python: str, context: ComponentContext, pooled: Any) -> Callable[..., Any]:
        base = DeepSpeedTrainerOptions(python=python, bucket_elements=20_000, learning_rate=RATE)
        return lambda **told: pooled(dataclasses.replace(base, **told), context)
