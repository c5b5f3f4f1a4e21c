from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from gyre_core import ComponentContext, WeightSource
from gyre_core.settings import inherited_environment
from gyre_core.testing.support import environment_python, load_module
from gyre_sglang import guard
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.facts import read_model
from gyre_sglang.launch import ENVIRONMENT
from gyre_sglang.options import SGLangOptions
from gyre_sglang.plan import launch_plan
from gyre_sglang.process import free_port
from gyre_weights import HostTensor, publish_full

TINY = Path(__file__).resolve().parents[2] / "gyre-local" / "tests" / "tiny_models.py"
FAKE = Path(__file__).with_name("fake_sglang.py")
READY_S = 600


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a tiny Qwen3 by seed; made once."""
    root = tmp_path_factory.mktemp("models")

    def folder(seed: int = 0, **sizes: int) -> Path:
        target = root / f"qwen3-{seed}-{len(sizes)}"
        if not target.exists():
            load_module(TINY).save("qwen3", target, seed, **sizes)
        return target

    return folder


@pytest.fixture
def context(tmp_path: Path) -> ComponentContext:
    return ComponentContext(str(tmp_path), "cell-0", seed=7)


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of SGLang's environment, built if need be."""
    return environment_python(ENVIRONMENT)


@pytest.fixture(scope="session")
def server_url(
    folder_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    """One real server for all tests of a run; GYRE_SGLANG_URL names one that runs already."""
    running = os.environ.get("GYRE_SGLANG_URL")
    if running:
        yield running
        return
    location, port = folder_of(0), free_port()
    plan = launch_plan(
        SGLangOptions(dtype="float32", kv_tokens=8192, context_length=256), read_model(str(location)),
        python=request.getfixturevalue("python"), location=str(location), version=0, port=port, device="cpu",
        accelerators=0, threads=1, seed=0, orders="",
    )  # fmt: skip
    log = tmp_path_factory.mktemp("server") / "sglang.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, guard.__file__, *plan.argv], env={**inherited_environment(), **plan.env},
            stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(READY_S):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None:
                break
            time.sleep(1)
    pytest.fail(f"SGLang did not come up:\n{log.read_text(errors='replace')[-3000:]}")


class Toy:
    """What the stand-in's model samples."""

    def __init__(self, fake: ModuleType, vocab: int) -> None:
        self._fake, self._vocab = fake, vocab

    def tokens(self, prompt: list[int], versions: list[str]) -> list[int]:
        """Greedy tokens after `prompt`, each under its version."""
        out: list[int] = []
        for version in versions:
            digest = hashlib.sha256(f"{version}|{prompt + out}".encode()).digest()
            out.append(int.from_bytes(digest[:4], "big") % self._vocab)
        return out

    def logprob(self, version: str, token: int) -> float:
        return self._fake.logprob_of(version, token)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def fake_module() -> ModuleType:
    return load_module(FAKE)


@pytest.fixture
def toy(fake_module: ModuleType) -> Toy:
    return Toy(fake_module, 320)


@pytest.fixture
def version(tmp_path: Path) -> Callable[..., WeightSource]:
    """`version(n)`: a policy version of a toy model on disk; `version(n, how)`: one that is broken."""

    def make(number: int, how: str = "") -> WeightSource:
        folder = tmp_path / f"v{number}{how}"
        if how == "missing" or folder.exists():
            return WeightSource(number, str(folder))
        shape = [320, 5] if how == "shape" else [320, 4]
        rows, columns = shape
        header = json.dumps({
            "embed": {"dtype": "F32", "shape": shape, "data_offsets": [0, rows * columns * 4]},
            "__metadata__": {"gyre_version": str(number)},
        }).encode()  # fmt: skip
        folder.mkdir()
        data = len(header).to_bytes(8, "little") + header + bytes(rows * columns * 4)
        (folder / "model.safetensors").write_bytes(data[:-7] if how == "cut" else data)
        config = {"vocab_size": 320, "max_position_embeddings": 1024, "num_hidden_layers": 3,
                  "num_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        if how == "number":
            shutil.rmtree(folder)
            weights = {"embed": HostTensor("F32", (320, 4), np.zeros(320 * 16, np.uint8))}
            found = publish_full(tmp_path / "other", number + 1, weights.items())
            return WeightSource(number, found.location)
        return WeightSource(number, str(folder))

    return make


async def at_once(work: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """In place of a thread: the stand-in goes on while a thread works, so how fast one is would decide how far."""
    return work(*args, **named)


@pytest.fixture
async def engine_of(
    fake_module: ModuleType,
    version: Callable[..., WeightSource],
    context: ComponentContext,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Callable[..., Any]]:
    """`await engine_of(...)`: an engine on a stand-in in this process, and the stand-in."""
    monkeypatch.setattr(asyncio, "to_thread", at_once)
    made: list[Any] = []

    async def make(
        fault: str = "",
        *,
        incremental: bool = True,
        memory_saver: bool = False,
        eos: int | None = None,
        experts: bool = False,
        source: WeightSource | None = None,
        **options: Any,
    ) -> tuple[SGLangEngine, Any]:
        source = source or version(0)
        words = ["--model-path", source.location, "--disable-overlap-schedule"]
        words += ["--incremental-streaming-output"] if incremental else []
        words += ["--enable-memory-saver"] if memory_saver else []
        words += ["--enable-return-routed-experts"] if experts else []
        words += ["--eos", str(eos)] if eos else []
        fake = fake_module.FakeServer(fake_module.parser().parse_args(words), fault)
        runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        engine = SGLangEngine(SGLangOptions(url=f"http://127.0.0.1:{port}", **({"chunk_s": 0.0} | options)), context)
        made.extend((engine, runner))
        await engine.start(source)
        return engine, fake

    yield make
    for thing in made:
        await (thing.close() if isinstance(thing, SGLangEngine) else thing.cleanup())


@pytest.fixture(scope="session")
def fake_path() -> Path:
    return FAKE


@pytest.fixture
def interpreter(tmp_path: Path) -> str:
    """A program that starts the stand-in where SGLang's interpreter would start SGLang."""
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {FAKE} "$@"\n')
    path.chmod(0o755)
    return str(path)
