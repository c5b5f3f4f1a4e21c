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
from gyre_core.testing.trainers import TrainerArithmetic, TrainerConformance, TrainerRig
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from gyre_megatron.options import MegatronTrainerOptions

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

WHOLE = ["qwen3", "qwen3-tp2-pp2"]
OTHERS = ["qwen3-dp2", "qwen3-tp2", "qwen3-pp2", "qwen3-untied-tp2-dp2", "qwen2-tp2", "llama3-pp3"]
"""Tiny model, tensor-, pipeline- and data-parallel ranks."""


class Given:
    """The rig of a split. Splits are parameters of a class, so that one's tests follow each other and its ranks are
    used again."""

    @pytest.fixture
    def rig(
        self,
        words: str,
        python: str,
        folder_of: Callable[..., Path],
        context: ComponentContext,
        batches: Any,
        oracle: Any,
        told_logprobs: Any,
        pooled: Any,
    ) -> TrainerRig:
        kind, *ways = words.replace("-untied", "_untied").split("-")
        split = {way[:2]: int(way[2:]) for way in ways}
        tensor, pipeline = split.get("tp", 1), split.get("pp", 1)
        options = MegatronTrainerOptions(
            python=python, cpu_shim=True, tensor_parallel=tensor, pipeline_parallel=pipeline,
            ranks=tensor * pipeline * split.get("dp", 1), learning_rate=1e-2,
        )  # fmt: skip
        folder = folder_of(kind.replace("_", "-"), layers=4 if pipeline == 2 else 3)
        return TrainerRig(
            lambda: pooled(options, context),
            WeightSource(0, str(folder)),
            batches(count=8),
            oracle,
            told_logprobs,
            trials=3,
            kinds={
                kind: partial(pooled, dataclasses.replace(options, publish=kind), context) for kind in PUBLISH
            },
            engine=lambda: LocalEngine(LocalEngineOptions(kv_tokens=1024), context),
        )  # fmt: skip


@pytest.mark.parametrize("words", WHOLE, scope="class")
class TestMegatron(Given, TrainerConformance):
    """Everything."""


@pytest.mark.parametrize("words", ["qwen3-tp2-pp2"], scope="class")
class TestPublishing(Given, TrainerPublishing):
    """Every rank its shards, in every way."""


@pytest.mark.parametrize("words", OTHERS, scope="class")
class TestSplits(Given, TrainerArithmetic):
    """What depends on the split."""
