from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gyre_core import ComponentContext, GenerateChunk, GenerateRequest, SamplingParams, WeightSource
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions


def load_beside(name: str) -> ModuleType:
    """A helper module of this folder."""
    full = f"gyre_vllm_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    return load_beside("vllm_fake")


@pytest.fixture
def context(tmp_path: Path) -> ComponentContext:
    return ComponentContext(str(tmp_path), "cell-0", seed=7)


@pytest.fixture
def sources(tmp_path: Path, fake: ModuleType) -> list[WeightSource]:
    """Versions 0, 1, 2; the fake model's number is 10 + version."""
    return [WeightSource(v, fake.write_weights(tmp_path / f"v{v}", 10 + v)) for v in range(3)]


class Result:
    """A call's chunks, put together."""

    def __init__(self, chunks: list[GenerateChunk]) -> None:
        self.chunks = chunks
        self.ids = [t for c in chunks for t in c.token_ids]
        self.logprobs = [x for c in chunks for x in c.logprobs]
        self.versions = [v for c in chunks for v in c.versions]
        self.finish = chunks[-1].finish
        self.cached = next((c.cached_tokens for c in chunks if c.cached_tokens is not None), None)


async def collect(
    engine: Any, prompt: list[int], count: int, *, name: str = "a", into: list[GenerateChunk] | None = None, **how: Any
) -> Result:
    chunks: list[GenerateChunk] = [] if into is None else into
    request = GenerateRequest(name, f"s-{name}", prompt, SamplingParams(count, **({"temperature": 0.0} | how)))
    async for chunk in engine.generate(request):
        chunks.append(chunk)  # noqa: PERF401 - what came before an error must be there
    return Result(chunks)


@pytest.fixture
def ask() -> Callable[..., Awaitable[Result]]:
    return collect


@pytest.fixture
async def served(fake: ModuleType, context: ComponentContext, sources: list[WeightSource]) -> AsyncIterator[Any]:
    """`await served(options={}, **fake's)`: a fake server and an engine on it, both ended afterwards."""
    made: list[tuple[Any, VLLMEngine]] = []

    async def make(options: dict[str, Any] | None = None, *, start: bool = True, **how: Any) -> tuple[Any, VLLMEngine]:
        server = fake.FakeVLLM(**how)
        url = await server.start()
        engine = VLLMEngine(VLLMOptions(url=url, **(options or {})), context)
        made.append((server, engine))
        if start:
            await engine.start(sources[0])
        return server, engine

    yield make
    for server, engine in made:
        await engine.close()
        await server.stop()
