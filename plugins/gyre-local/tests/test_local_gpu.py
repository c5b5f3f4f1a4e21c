"""The suites on one GPU, and what only exists there: memory that is given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, WeightSource
from gyre_core.testing.engines import EngineConformance, EngineRig
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.engine import LocalEngine
from gyre_local.train.trainer import LocalTrainer

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_gpu(context: ComponentContext) -> ComponentContext:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    return dataclasses.replace(context, device="cuda")


class TestLocalEngineOnGPU(EngineConformance):
    @pytest.fixture(params=["qwen3", "llama"])
    def rig(
        self, request: pytest.FixtureRequest, folder_of: Callable[..., Path], on_gpu: ComponentContext
    ) -> EngineRig:
        options = LocalEngineOptions(kv_tokens=4096, max_context=256, prefill_tokens=64, chunk_tokens=1)
        sources = [WeightSource(seed, str(folder_of(request.param, seed))) for seed in range(2)]
        return EngineRig(lambda: LocalEngine(options, on_gpu), sources, vocab=320, tolerance=1e-3)

    def copy_blocks(self, source: Any, target: Any, from_ids: Any, to_ids: Any) -> None:
        """Both engines live in this process: copy through their pools' tensors."""
        a, b = (engine._worker._core.pool for engine in (source, target))
        for left, right in zip(from_ids, to_ids, strict=True):
            rows = slice(left * a.block_tokens, (left + 1) * a.block_tokens)
            b.data[:, :, right * b.block_tokens : (right + 1) * b.block_tokens] = a.data[:, :, rows]
        torch.cuda.synchronize()

    def read_block(self, engine: Any, block: int) -> bytes:
        pool = engine._worker._core.pool
        rows = slice(block * pool.block_tokens, (block + 1) * pool.block_tokens)
        return pool.data[:, :, rows].cpu().numpy().tobytes()  # type: ignore[no-any-return]


async def test_sleeping_and_offloading_give_the_gpu_back(on_gpu: ComponentContext, folder_of: Any, ask: Any) -> None:
    engine = LocalEngine(LocalEngineOptions(kv_tokens=100_000), on_gpu)
    before = torch.cuda.memory_allocated()
    await engine.start(WeightSource(0, str(folder_of())))
    await ask(engine, [1, 2, 3], 4)
    assert torch.cuda.memory_allocated() > before + 50e6
    await engine.sleep()
    assert torch.cuda.memory_allocated() <= before + 1e6
    trainer = LocalTrainer(LocalTrainerOptions(), on_gpu)
    await trainer.start(WeightSource(0, str(folder_of())), core=True)
    await trainer.offload()
    assert torch.cuda.memory_allocated() <= before + 1e6
    await trainer.onload()
    assert torch.cuda.memory_allocated() > before
    await trainer.close()
    await engine.close()
