"""Other people's agents, unchanged, through the real proxy: real sessions, every token on record, every law kept.

Each agent plays twice. Against an engine that says what a script says, it must do the task: one tool call, seen in the
workspace, and an answer. Against SmolLM2-135M on gyre-local, far too small to solve anything, its ways of coping with
odd answers must be recorded as exactly. mini-swe-agent, as a harness and as a command line like the others, and the
model come from the environment that gyre-harnesses describes, the other command-line agents from npm, into the cache
folder; without an index these tests are skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gyre_harnesses
import numpy as np
import pytest
from gyre_core import (
    ComponentContext,
    ContextLengthError,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    GenerateRequest,
    Harness,
    Limits,
    ModelEndpoint,
    ScorerSpec,
    Task,
    WeightSource,
)
from gyre_core.settings import cache_folder
from gyre_core.testing.harnesses import RecordedEvents
from gyre_core.testing.support import environment_python
from gyre_harnesses.command.harness import CommandHarness
from gyre_harnesses.mini_swe.harness import MiniSweHarness
from gyre_harnesses.options import CommandOptions, LocalOptions, MiniSweOptions
from gyre_harnesses.sandbox.local import LocalSandbox
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from gyre_rl.proxy.backend import sampling_of
from gyre_tito import ExecutionSpec, GenerateChunk, ProxyServer, Score, Status, Store, TitoService, load_format
from gyre_tito.backend import GenerateCall, PromptTooLongError
from gyre_tito.chat_format import ChatFormat
from gyre_tito.check_files import check_path, reader_of
from gyre_tito.testing import BookkeepingEngine, EngineEntry, tiny_format

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(gyre_harnesses.__file__).with_name("environment.toml")
CONTEXT = 24_000  # a coding agent's own instructions are most of it
PROMPT = "Copy in.txt to out.txt."
MODEL = """
import runpy, sys
packages, *sys.argv = sys.argv[1:]
sys.path.append(packages)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Makes the model with this interpreter's torch and the other environment's packages, which come last."""


@dataclass(frozen=True)
class Cli:
    """A command-line agent; from npm, or with a package that is empty from the environment of gyre-harnesses."""

    package: str
    command: str
    dialect: str
    tool: str
    """Its tool that runs a shell command."""
    arguments: dict[str, Any]
    """Of that tool, besides "command"."""
    flags: Sequence[str]
    env: dict[str, str]
    last: str = ""
    """The command by which it says that it is done; empty: it just says so."""

    def start(self) -> tuple[Sequence[str], Sequence[str]]:
        """What starts it, installed if it is not; and the folders that must be seen for that."""
        return self.from_npm() if self.package else self.from_environment()

    def from_environment(self) -> tuple[Sequence[str], Sequence[str]]:
        python = environment_python(ENVIRONMENT)
        ask = [python, "-c", "import sys; print(sys.prefix, sys.base_prefix, sep='\\n')"]
        folders = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split("\n")[:2]
        return [str(Path(python).with_name(self.command))], folders

    def from_npm(self) -> tuple[Sequence[str], Sequence[str]]:
        folder = cache_folder() / "npm" / self.package.replace("/", "+")
        program = folder / "bin" / self.command
        node = shutil.which("node")
        if node is None or shutil.which("npm") is None:
            pytest.skip("node and npm are not installed here")
        if not program.exists():
            install = ["npm", "install", "-g", "--prefix", str(folder), "--no-audit", "--no-fund", self.package]
            done = subprocess.run(install, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"npm does not give {self.package}: {done.stderr[-300:]}")
        script = program.resolve()
        node_itself = str(Path(node).resolve())
        native = script.read_bytes()[:4] == b"\x7fELF"
        return [str(script)] if native else [node_itself, str(script)], [str(folder), str(Path(node_itself).parent)]


CLIS = {
    "qwen-code": Cli(
        "@qwen-code/qwen-code@0.24.4",
        "qwen",
        "chat",
        "run_shell_command",
        {"is_background": False, "description": "Copies the file."},
        ["--auth-type", "openai", "--yolo", "-p", "{prompt}"],
        {"OPENAI_MODEL": "{model}", "CI": "1"},
    ),
    "claude-code": Cli(
        "@anthropic-ai/claude-code@2.1.332",
        "claude",
        "anthropic",
        "Bash",
        {"description": "Copies the file."},
        ["--bare", "--dangerously-skip-permissions", "--model", "{model}", "-p", "{prompt}"],
        {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1", "CI": "1"},
    ),
    "mini": Cli(
        "",
        "mini",
        "chat",
        "bash",
        {},
        ["-m", "openai/{model}", "-t", "{prompt}", "--yolo", "--exit-immediately", "--cost-limit", "0"],
        {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
    ),
}


@pytest.fixture(scope="module")
def python():
    """The interpreter of the environment with mini-swe-agent and the small model."""
    return environment_python(ENVIRONMENT)


@pytest.fixture(scope="module")
def smollm(python, tmp_path_factory):
    """SmolLM2-135M as a model folder."""
    folder = tmp_path_factory.mktemp("smollm2")
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    script = ROOT / "examples" / "models" / "smollm2.py"
    made = [sys.executable, "-c", MODEL, packages, str(script), str(folder)]
    subprocess.run(made, check=True)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 2 * CONTEXT  # a coding agent's instructions reach beyond those it was made for
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class LocalBackend:
    """gyre-local as the proxy's backend; keeps the books as `BookkeepingEngine` does."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.books = engine, []

    async def generate(self, call: GenerateCall) -> Any:
        request = GenerateRequest(call.call_id, call.session, call.prompt_ids, sampling_of(call.sampling))
        entry = EngineEntry(call, np.array(call.prompt_ids), [], [], [])
        self.books.append(entry)
        try:
            async for chunk in self.engine.generate(request):
                entry.sampled.extend(chunk.token_ids)
                entry.logprobs.extend(chunk.logprobs)
                finish = None if chunk.finish is None else chunk.finish.value
                yield GenerateChunk(chunk.token_ids, chunk.logprobs, chunk.versions, finish, chunk.cached_tokens)
        except ContextLengthError as error:
            raise PromptTooLongError(str(error)) from error


@dataclass
class Played:
    """What an execution left."""

    end: ExecutionEnd
    books: list[EngineEntry]
    files: dict[str, bytes]
    store: Path
    chat: ChatFormat

    def hold(self, dialect: str) -> None:
        """Every token that the engine consumed or produced is in the store, as it was, and no law is broken."""
        with Store.open(self.store) as store:
            tree = store.load_tree("e")
            calls = {call.index: call for call in store.calls("e")}
        assert len(calls) == len(self.books)
        for entry in self.books:
            index = int(entry.call.call_id.rpartition("#")[2])
            assert calls[index].meta["dialect"] == dialect
            view = tree.path(index)
            prompt = entry.prompt.tolist()
            assert view.token_ids.tolist() == prompt + entry.sampled
            assert view.logprobs[len(prompt) :].tolist() == pytest.approx(entry.logprobs)
            assert view.sampled[len(prompt) :].all()
        assert tree.sampled_count == sum(len(entry.sampled) for entry in self.books)
        findings = check_path(self.store, reader=reader_of(self.chat)).findings
        assert [one for one in findings if one.severity != "note"] == []


async def play(
    tmp_path: Path,
    chat: ChatFormat,
    backend: Any,
    harness: Harness,
    sandbox: LocalOptions,
    limits: Limits,
    context: int = 1_000_000,
) -> Played:
    """One execution by a real agent; `context` is the model's limit, in tokens."""
    path = tmp_path / "trajectories.db"
    service = TitoService(backend, store := Store.open(path, writable=True), chat, context_limit=context)
    server = ProxyServer(service)
    made = LocalSandbox(sandbox, ComponentContext(str(tmp_path), "test"))
    try:
        await server.start()
        opened = await service.open_execution(ExecutionSpec("e", "t", "g"))
        endpoint = ModelEndpoint(opened.base_url, opened.api_key, service.model)
        workspace = await made.create("w", {"in.txt": b"5\n"})
        job = ExecutionJob("e", Task("t", PROMPT, ScorerSpec("files")), endpoint, limits)
        end = await harness.run(job, workspace, RecordedEvents())
        files = {name: await workspace.read(name) for name in await workspace.list()}
        await service.close_execution("e", Status(end.status.value), Score(0.0))
    finally:
        await made.close()
        await server.stop()
        await service.close()
        store.close()
    return Played(end, backend.books, files, path, chat)


async def play_small(tmp_path: Path, model: Path, harness: Harness, sandbox: LocalOptions, limits: Limits) -> Played:
    """The same with SmolLM2 on gyre-local."""
    options = LocalEngineOptions(kv_tokens=CONTEXT + 4096, max_context=CONTEXT)
    engine = LocalEngine(options, ComponentContext(str(tmp_path), "test"))
    await engine.start(WeightSource(0, str(model)))
    try:
        return await play(tmp_path, load_format(model), LocalBackend(engine), harness, sandbox, limits, CONTEXT)
    finally:
        await engine.close()


def doing(chat: ChatFormat, cli: Cli) -> Callable[[GenerateCall], list[int]]:
    """Copies the file when it is offered the tool and has no result yet, else says that it is done."""

    def reply(call: GenerateCall) -> list[int]:
        seen = chat.tokenizer.decode(call.prompt_ids.tolist())
        begin = f'"name": "{cli.tool}"' in seen and "<tool_response>" not in seen
        arguments = {"command": "cp in.txt out.txt" if begin else cli.last, **cli.arguments}
        use = f"<tool_call>\n{json.dumps({'name': cli.tool, 'arguments': arguments})}\n</tool_call>"
        return [*chat.tokenizer.encode(use if begin or cli.last else "It is copied."), chat.stop_ids[0]]

    return reply


def cli_harness(tmp_path: Path, cli: Cli) -> tuple[CommandHarness, LocalOptions]:
    start, folders = cli.start()
    options = CommandOptions(argv=(*start, *cli.flags), env=cli.env)
    visible = (*LocalOptions().visible, *folders)
    return CommandHarness(options, ComponentContext(str(tmp_path), "test")), LocalOptions(visible=visible, memory_mb=0)


@pytest.mark.parametrize("name", CLIS)
async def test_a_command_line_agent_does_its_task(tmp_path, name):
    cli, chat = CLIS[name], tiny_format()
    harness, sandbox = cli_harness(tmp_path, cli)
    engine = BookkeepingEngine(doing(chat, cli))
    played = await play(tmp_path, chat, engine, harness, sandbox, Limits(max_turns=8, max_call_tokens=400, wall_s=300))
    assert played.end.status is ExecutionStatus.COMPLETED, played.end
    assert played.files.get("out.txt") == b"5\n", played.end
    assert played.end.turns == len(played.books) >= 2
    played.hold(cli.dialect)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "mini" else pytest.mark.slow) for n in CLIS])
async def test_a_command_line_agent_with_a_real_small_model(smollm, tmp_path, name):
    harness, sandbox = cli_harness(tmp_path, CLIS[name])
    limits = Limits(max_turns=2, max_call_tokens=48, wall_s=1200)
    played = await play_small(tmp_path, smollm, harness, sandbox, limits)
    assert played.end.status is not ExecutionStatus.FAILED
    assert any(entry.sampled for entry in played.books), "the model was not heard"
    played.hold(CLIS[name].dialect)


async def test_mini_swe_agent_with_a_real_small_model(smollm, python, tmp_path):
    harness = MiniSweHarness(MiniSweOptions(python=python), ComponentContext(str(tmp_path), "test"))
    limits = Limits(max_turns=4, max_call_tokens=48, wall_s=900)
    played = await play_small(tmp_path, smollm, harness, LocalOptions(), limits)
    assert played.end.status is not ExecutionStatus.FAILED
    assert 1 <= len(played.books) <= 4
    played.hold("chat")
