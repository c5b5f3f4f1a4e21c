from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, GenerateChunk, GenerateRequest, SamplingParams, WeightSource
from gyre_core.testing.support import load_module
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    torch.set_num_threads(1)
    return load_module(HERE / "tiny_models.py")


@pytest.fixture(scope="session")
def batches() -> Callable[..., Any]:
    """`batches(seed, count)`: micro-batches of step 1."""
    return load_module(HERE / "tree_batches.py").make_batches  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def gradient() -> Callable[..., Any]:
    """`gradient(model, batches)`: by the slow oracle."""
    return load_module(HERE / "tree_batches.py").gradient  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def told_logprobs() -> Callable[..., Any]:
    """`told_logprobs(model, batch)`, branch by branch."""
    return load_module(HERE / "tree_batches.py").logprobs  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def folder_of(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny model by (kind, seed); made once."""
    root = tmp_path_factory.mktemp("models")

    def find(kind: str = "qwen3", seed: int = 0) -> Path:
        folder = root / f"{kind}-{seed}"
        if not folder.exists():
            tiny.save(kind, folder, seed)
        return folder

    return find


@pytest.fixture
def context(tmp_path: Path) -> ComponentContext:
    return ComponentContext(str(tmp_path), "cell-0", seed=7)


class Oracle:
    """Plain transformers in float32: no cache, no batching."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        """float32 [n, vocab]: row i is the distribution of the token after ids[: i + 1]."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0].float()
        return torch.log_softmax(logits / temperature, -1)

    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
        ids, found = list(prompt), []
        for _ in range(count):
            row = self.logprobs(ids)[-1]
            ids.append(int(row.argmax()))
            found.append(float(row[ids[-1]]))
        return ids[len(prompt) :], found


@pytest.fixture(scope="session")
def oracle_of(tiny: ModuleType) -> Callable[..., Oracle]:
    made: dict[tuple[str, int], Oracle] = {}

    def find(kind: str = "qwen3", seed: int = 0) -> Oracle:
        if (kind, seed) not in made:
            made[kind, seed] = Oracle(tiny.build(kind, seed))
        return made[kind, seed]

    return find


class Result:
    """A call's chunks, put together."""

    def __init__(self, chunks: list[GenerateChunk]) -> None:
        self.chunks = chunks
        self.ids = [t for c in chunks for t in c.token_ids]
        self.logprobs = [x for c in chunks for x in c.logprobs]
        self.versions = [v for c in chunks for v in c.versions]
        self.finish = chunks[-1].finish
        self.cached = chunks[0].cached_tokens


async def collect(
    engine: LocalEngine, prompt: list[int], count: int, *, name: str = "a", session: str | None = None, **how: Any
) -> Result:
    sampling = SamplingParams(count, **({"temperature": 0.0} | how))
    request = GenerateRequest(name, session or name, prompt, sampling)
    return Result([chunk async for chunk in engine.generate(request)])


@pytest.fixture
def ask() -> Callable[..., Any]:
    return collect


@pytest.fixture
async def engines(context: ComponentContext, folder_of: Callable[..., Path]) -> Any:
    """Makes started engines and closes them: `await engines(kind, seed, **options)`."""
    made: list[LocalEngine] = []

    async def make(kind: str = "qwen3", seed: int = 0, **options: Any) -> LocalEngine:
        engine = LocalEngine(LocalEngineOptions(**({"kv_tokens": 4096} | options)), context)
        await engine.start(WeightSource(0, str(folder_of(kind, seed))))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        await engine.close()
