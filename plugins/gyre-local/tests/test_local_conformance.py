"""gyre-local passes the suites it asks others to pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, MicroBatch, WeightSource
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_core.testing.publishing import TrainerPublishing
from gyre_core.testing.trainers import TrainerConformance, TrainerRig
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.engine import LocalEngine
from gyre_local.train.exact import use_exact_norms
from gyre_local.train.trainer import LocalTrainer


class TestLocalEngine(EngineConformance):
    @pytest.fixture(params=["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
    def rig(
        self, request: pytest.FixtureRequest, folder_of: Callable[..., Path], context: ComponentContext
    ) -> EngineRig:
        options = LocalEngineOptions(kv_tokens=4096, max_context=256, prefill_tokens=64, chunk_tokens=1)
        sources = [WeightSource(seed, str(folder_of(request.param, seed))) for seed in range(2)]
        return EngineRig(lambda: LocalEngine(options, context), sources, vocab=320, tolerance=1e-4)


class TestLocalTrainer(TrainerConformance):
    @pytest.fixture(params=["float64", pytest.param("float32", marks=pytest.mark.slow)])
    def rig(
        self,
        request: pytest.FixtureRequest,
        folder_of: Callable[..., Path],
        context: ComponentContext,
        batches: Any,
        gradient: Any,
        told_logprobs: Any,
    ) -> TrainerRig:
        options = LocalTrainerOptions(dtype=request.param, learning_rate=1e-2)
        exact = request.param == "float64"

        def oracle(model: Any, work: Sequence[MicroBatch]) -> Mapping[str, Any]:
            if exact:
                use_exact_norms(model)
            return gradient(model, work)  # type: ignore[no-any-return]

        return TrainerRig(
            lambda: LocalTrainer(options, context),
            WeightSource(0, str(folder_of("qwen3"))),
            batches(count=8),
            oracle,
            told_logprobs,
            dtype=request.param,
            sum_tolerance=1e-10 if exact else 1e-5,
        )


class TestLocalPublishing(TrainerPublishing):
    @pytest.fixture
    def rig(
        self, folder_of: Callable[..., Path], context: ComponentContext, batches: Any, gradient: Any, told_logprobs: Any
    ) -> TrainerRig:
        options = LocalTrainerOptions(learning_rate=1e-4)

        def by(kind: str) -> LocalTrainer:
            return LocalTrainer(dataclasses.replace(options, publish=kind), context)

        return TrainerRig(
            lambda: LocalTrainer(options, context),
            WeightSource(0, str(folder_of("qwen3"))),
            batches(count=4),
            gradient,
            told_logprobs,
            kinds={kind: partial(by, kind) for kind in ("disk", "shm", "delta")},
            engine=lambda: LocalEngine(LocalEngineOptions(kv_tokens=1024), context),
        )
