from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from gyre_core import ComponentContext, GenerateChunk, GenerateRequest, SamplingParams, WeightSource
from gyre_core.settings import inherited_environment
from gyre_core.testing.support import environment_python, load_module
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.launch import ENVIRONMENT, Place, interpreter, launch_plan
from gyre_vllm.network import free_port
from gyre_vllm.options import VLLMOptions
from gyre_vllm.process import KEEPER, telling_lines

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    return load_module(HERE / "vllm_fake.py")


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


async def at_once(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """In place of a thread: the fake samples on while a thread works, so how fast one is would decide how far it is."""
    return work(*args, **named)


@pytest.fixture
async def served(
    fake: ModuleType, context: ComponentContext, sources: list[WeightSource], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Any]:
    """`await served(options={}, **fake's)`: a fake server and an engine on it, both ended afterwards."""
    monkeypatch.setattr(asyncio, "to_thread", at_once)
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


@pytest.fixture
async def running(served: Any, ask: Any) -> Any:
    """`await running(options={})`: a fake, an engine, and a call of 100 tokens on its way."""

    async def make(options: dict[str, Any] | None = None) -> tuple[Any, VLLMEngine, asyncio.Task[Any]]:
        server, engine = await served({"control_timeout_s": 30.0} | (options or {}))
        chunks: list[Any] = []
        server.most = 50
        task = asyncio.create_task(ask(engine, [7], 100, name="running", into=chunks))
        while not chunks:
            await asyncio.sleep(0.002)
        return server, engine, task

    return make


@pytest.fixture
def serves(fake: ModuleType) -> Any:
    """`await serves(engine, version, prompt)`: a call comes back, with tokens and logprobs of these weights."""

    async def check(engine: VLLMEngine, version: int, prompt: list[int], **how: Any) -> Result:
        result = await asyncio.wait_for(collect(engine, prompt, 4, name="after", **how), 60)
        ids = list(prompt)
        for token in result.ids:
            assert token == fake.token_after(ids, 10 + version)
            ids.append(token)
        assert result.versions == [version] * 4
        assert result.logprobs == [fake.logprob_of(10 + version)] * 4
        return result

    return check


# -- servers of ours ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def owned(context: ComponentContext) -> AsyncIterator[Any]:
    """`owned(*faults, **options)`: an engine that starts fakes as servers of its own."""
    made: list[VLLMEngine] = []

    def make(*faults: str, **how: Any) -> VLLMEngine:
        command = (sys.executable, str(HERE / "vllm_fake.py"))
        options = {"command": command, "arguments": faults, "control_timeout_s": 10.0} | how
        made.append(VLLMEngine(VLLMOptions(**options), context))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


@pytest.fixture
def process_of() -> Callable[[VLLMEngine], tuple[int, int]]:
    """`process_of(engine)`: the keeper's and the server's process."""

    def find(engine: VLLMEngine) -> tuple[int, int]:
        server = engine._state.server
        assert server is not None
        assert server.process is not None
        keeper = server.process._process.pid
        return keeper, int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])

    return find


# -- the real server ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RealServer:
    """A vLLM that serves tiny random Qwen3 models for all tests of a session."""

    url: str
    sources: list[WeightSource]
    vocab: int
    block: int
    max_context: int


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of the environment with vLLM, built if need be; GYRE_VLLM_PYTHON names another."""
    return environment_python(ENVIRONMENT, os.environ.get("GYRE_VLLM_PYTHON"))


@pytest.fixture(scope="session")
def tiny_sources(tmp_path_factory: pytest.TempPathFactory) -> list[WeightSource]:
    """Versions 0, 1 and 2 of a tiny random Qwen3."""
    root, models = tmp_path_factory.mktemp("qwen3"), load_module(HERE / "vllm_models.py")
    return [WeightSource(seed, str(models.save(root / str(seed), seed))) for seed in range(3)]


@pytest.fixture(scope="session")
def real_server(
    vllm_python: str, tiny_sources: list[WeightSource], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    """One server for the session; GYRE_VLLM_URL takes one that runs already with the same model and sizes."""
    vocab, block, limit = load_module(HERE / "vllm_models.py").VOCAB, 32, 2048
    if url := os.environ.get("GYRE_VLLM_URL"):
        yield RealServer(url, tiny_sources, vocab, block, limit)
        return
    options = VLLMOptions(
        python=vllm_python, dtype="float32", max_context=limit, max_running=16, kv_cache_gb=0.1,
        arguments=("--block-size", str(block)),
    )  # fmt: skip
    place = Place("127.0.0.1", free_port("127.0.0.1"), seed=1)
    plan = launch_plan(options, tiny_sources[0].location, interpreter(options), place)
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    env = inherited_environment() | dict(plan.env)
    words = [sys.executable, str(KEEPER), "15", *plan.argv]
    with (
        log.open("ab") as out,
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=out, stderr=out, env=env, start_new_session=True
        ) as process,
    ):
        try:
            _until_healthy(plan.url, process, log)
            yield RealServer(plan.url, tiny_sources, vocab, block, limit)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 800
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"vLLM did not start: {telling_lines(log)}")
