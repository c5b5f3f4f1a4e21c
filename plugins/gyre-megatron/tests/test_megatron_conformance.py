"""Megatron-Core passes the trainers' suite: families, and the ways to split a model that are offered."""

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
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.engine import LocalEngine
from gyre_local.train.trainer import LocalTrainer
from gyre_megatron.options import MegatronTrainerOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

WHOLE = [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3-tp2-pp2"]
OTHERS = [
    "qwen3_untied-tp2-dp2",
    "llama3-pp3",
    *(pytest.param(words, marks=pytest.mark.slow) for words in ("qwen3-dp2", "qwen3-tp2", "qwen3-pp2", "qwen2-tp2")),
]
"""Tiny model, tensor-, pipeline- and data-parallel ranks."""
RATE = 1e-3


class Given:
    """The rig of a split. Splits are parameters of a class, so that one's tests follow each other and its ranks are
    used again."""

    @pytest.fixture
    def options(self, words: str, python: str) -> MegatronTrainerOptions:
        split = {way[:2]: int(way[2:]) for way in words.split("-")[1:]}
        tensor, pipeline = split.get("tp", 1), split.get("pp", 1)
        return MegatronTrainerOptions(
            python=python, cpu_shim=True, tensor_parallel=tensor, pipeline_parallel=pipeline,
            ranks=tensor * pipeline * split.get("dp", 1), learning_rate=1e-2, recompute="rc" in split,
        )  # fmt: skip

    @pytest.fixture
    def rig(
        self,
        words: str,
        options: MegatronTrainerOptions,
        folder_of: Callable[..., Path],
        context: ComponentContext,
        batches: Any,
        oracle: Any,
        told_logprobs: Any,
        pooled: Any,
    ) -> TrainerRig:
        kind = words.split("-")[0].replace("_", "-")
        return TrainerRig(
            lambda: pooled(options, context),
            WeightSource(0, str(folder_of(kind, layers=4 if options.pipeline_parallel == 2 else 3))),
            batches(count=8),
            oracle,
            told_logprobs,
            trials=2,
            kinds={kind: partial(pooled, dataclasses.replace(options, publish=kind), context) for kind in PUBLISH},
            engine=lambda: LocalEngine(LocalEngineOptions(kv_tokens=1024), context),
        )

    @pytest.fixture
    def slow(self, options: MegatronTrainerOptions, context: ComponentContext, pooled: Any) -> Callable[[], Any]:
        return partial(pooled, dataclasses.replace(options, learning_rate=RATE), context)

    @pytest.fixture
    def reference(self, context: ComponentContext) -> Callable[[], LocalTrainer]:
        return lambda: LocalTrainer(LocalTrainerOptions(learning_rate=RATE), context)


@pytest.mark.parametrize("words", ["qwen3-tp2-pp2"], scope="class")
class TestPublishing(Given, TrainerPublishing):
    """Every rank its shards, in every way."""


@pytest.mark.parametrize("words", WHOLE, scope="class")
class TestMegatron(Given, TrainerConformance, AgainstReference):
    """Everything."""


@pytest.mark.parametrize("words", OTHERS, scope="class")
class TestSplits(Given, TrainerArithmetic, AgainstReference):
    """What depends on the split."""


@pytest.mark.parametrize("words", ["qwen3-pp3-rc1"], scope="class")
class TestRecomputing(Given, AgainstReference):
    """Layers that are computed twice."""
