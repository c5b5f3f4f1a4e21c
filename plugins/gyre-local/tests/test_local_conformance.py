"""gyre-local passes the suites it asks others to pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine


class TestLocalEngine(EngineConformance):
    @pytest.fixture(params=["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
    def rig(
        self, request: pytest.FixtureRequest, folder_of: Callable[..., Path], context: ComponentContext
    ) -> EngineRig:
        options = LocalEngineOptions(kv_tokens=4096, max_context=256, prefill_tokens=64, chunk_tokens=1)
        sources = [WeightSource(seed, str(folder_of(request.param, seed))) for seed in range(2)]
        return EngineRig(lambda: LocalEngine(options, context), sources, vocab=320, tolerance=1e-4)
