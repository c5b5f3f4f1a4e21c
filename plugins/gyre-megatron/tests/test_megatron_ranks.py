"""Megatron-Core beside the embedded trainer: same parameters from the same data, satellites of another backend, other
numbers of ranks, faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gyre_core import ComponentContext
from gyre_core.testing.ranks import RankTrainerChecks
from gyre_local.options import LocalTrainerOptions
from gyre_local.train.trainer import LocalTrainer
from gyre_megatron.options import MegatronTrainerOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
RATE = 1e-3
LAYERS = 6
"""Over two stages and over three, of which the middle one has neither embedding nor head."""


class TestRanks(RankTrainerChecks):
    two: ClassVar = {"tensor_parallel": 2}
    elsewhere: ClassVar = ({"pipeline_parallel": 2}, {"ranks": 2})

    @pytest.fixture
    def folder_of(self, folder_of: Any) -> Callable[..., Path]:
        return partial(folder_of, layers=LAYERS)

    @pytest.fixture
    def reference(self, context: ComponentContext) -> Callable[[], LocalTrainer]:
        return lambda: LocalTrainer(LocalTrainerOptions(learning_rate=RATE), context)

    @pytest.fixture
    def ranks(self, python: str, context: ComponentContext, pooled: Any) -> Callable[..., Any]:
        base = MegatronTrainerOptions(python=python, cpu_shim=True, learning_rate=RATE)
        return lambda **told: pooled(dataclasses.replace(base, **told), context)
