"""Fifty turns with tools through the real recording proxy to real servers: every law kept, every number transformers'.

SmolLM2-135M on vLLM talks and never gets a call right; the quickstart's policy, a tiny Qwen3, on SGLang calls its tools
all the time. The agent speaks the OpenAI dialect with the official client. It plays twice in step, once streamed and
once not: both must be the same conversation, to the token. Then SmolLM2 is asked directly, put to sleep and woken; a
mixture of experts is recorded; and one new version of a trainer's goes into all three engines.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import gyre_harnesses
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from gyre_core import ComponentContext, Engine, EngineCapability, GenerateRequest, WeightSource
from gyre_core.environments import build, read_spec
from gyre_core.testing.engine_calls import CallChecks
from gyre_core.testing.engine_rig import EngineRig, Oracle, call
from gyre_core.testing.support import environment_python
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.engine import LocalEngine
from gyre_local.train.trainer import LocalTrainer
from gyre_rl.proxy.backend import sampling_of
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions
from gyre_tito import ExecutionSpec, GenerateChunk, ProxyServer, Score, Status, Store, TitoService, load_format
from gyre_tito.backend import GenerateCall
from gyre_tito.chat_format import ChatFormat
from gyre_tito.check_files import check_path, reader_of
from gyre_tito.testing import EngineEntry
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module")]
ROOT = Path(__file__).parents[2]
TURNS, TOLERANCE = 50, 1e-3
LAYERS, EXPERTS, TOP = 3, 8, 2
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
MODEL = """
import runpy, sys
packages, *sys.argv = sys.argv[1:]
sys.path.append(packages)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Makes the model with this interpreter's torch and the other environment's packages, which come last."""


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a model folder in float32, from the package in the harnesses' environment."""
    folder = tmp_path_factory.mktemp("smollm2")
    python = environment_python(Path(gyre_harnesses.__file__).with_name("environment.toml"))
    ask = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    script = ROOT / "examples" / "models" / "smollm2.py"
    subprocess.run([sys.executable, "-c", MODEL, packages, str(script), str(folder)], check=True)
    return folder


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def on_vllm(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A vLLM that serves SmolLM2, for all tests of this file."""
    build(read_spec(Path(str(files("gyre_vllm") / "environment.toml"))))
    options = VLLMOptions(dtype="float32", max_context=4096, max_running=8, kv_cache_gb=0.5)
    engine = VLLMEngine(options, ComponentContext(str(tmp_path_factory.mktemp("vllm")), "cell-0", seed=7))
    await engine.start(WeightSource(0, str(smollm)))
    yield Served(engine, smollm, load_format(smollm), 4096, tokens=12)
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def on_sglang(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An SGLang that serves the quickstart's policy."""
    build(read_spec(Path(str(files("gyre_sglang") / "environment.toml"))))
    folder = ROOT / "examples" / "quickstart" / "policy"
    engine = SGLangEngine(
        SGLangOptions(dtype="float32"), ComponentContext(str(tmp_path_factory.mktemp("sglang")), "cell-0", seed=7)
    )
    await engine.start(WeightSource(0, str(folder)))
    yield Served(engine, folder, load_format(folder, family="qwen3"), 2040)
    await engine.close()


@dataclass(frozen=True)
class Served:
    """A model on a server."""

    engine: Engine
    folder: Path
    chat: ChatFormat
    context: int
    routed: bool = False
    """Ask for the experts of every new token."""
    tokens: int = 32
    """Of an answer: enough for a tool's call, where the model makes any."""

    def oracle(self) -> Oracle:
        """The same model in transformers."""
        torch.set_num_threads(1)
        return Oracle(AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval(), torch)


class EngineBackend:
    """An engine as the proxy's backend; keeps the books of what it was asked and what it gave."""

    def __init__(self, engine: Engine, routed: bool) -> None:
        self.engine, self.books, self.routed = engine, list[EngineEntry](), routed

    async def generate(self, asked: GenerateCall) -> AsyncIterator[GenerateChunk]:
        request = GenerateRequest(
            asked.call_id, asked.session, asked.prompt_ids.tolist(), sampling_of(asked.sampling),
            self.routed, asked.new_from,
        )  # fmt: skip
        entry = EngineEntry(asked, np.array(asked.prompt_ids), [], [], [])
        self.books.append(entry)
        async for chunk in self.engine.generate(request):
            entry.sampled.extend(chunk.token_ids)
            entry.logprobs.extend(chunk.logprobs)
            finish = None if chunk.finish is None else chunk.finish.value
            yield GenerateChunk(
                chunk.token_ids, chunk.logprobs, chunk.versions, finish, chunk.cached_tokens,
                chunk.routed_experts, chunk.routed_from,  # type: ignore[arg-type]
            )  # fmt: skip


@dataclass
class Agent:
    """Does what the model calls for, says something else when it calls for nothing."""

    client: openai.AsyncOpenAI
    streamed: bool
    tokens: int
    messages: list[Any] = field(default_factory=lambda: [{"role": "system", "content": "You work in a folder."}])
    calls: int = 0

    async def turn(self, number: int) -> Any:
        """One answer of the model, and the results of its calls."""
        if self.messages[-1]["role"] != "tool":
            self.messages.append({"role": "user", "content": f"Task {number}: read brief{number}.md and do it."})
        how: dict[str, Any] = {"model": "policy", "messages": self.messages, "tools": [TOOL]}
        how |= {"temperature": 0.0, "max_tokens": self.tokens}
        message = await (self._streamed(how) if self.streamed else self._whole(how))
        self.messages.append(message)
        for one in message.get("tool_calls", ()):
            self.calls += 1
            self.messages.append({"role": "tool", "tool_call_id": one["id"], "content": f"a{number}.txt"})
        return message["content"], [one["function"] for one in message.get("tool_calls", ())]

    async def _whole(self, how: dict[str, Any]) -> dict[str, Any]:
        answer = (await self.client.chat.completions.create(**how)).choices[0].message
        made = [one.model_dump(include={"id", "type", "function"}) for one in answer.tool_calls or ()]
        return {"role": "assistant", "content": answer.content or ""} | ({"tool_calls": made} if made else {})

    async def _streamed(self, how: dict[str, Any]) -> dict[str, Any]:
        content, made = "", dict[int, dict[str, Any]]()
        async for event in await self.client.chat.completions.create(stream=True, **how):
            for choice in event.choices:
                content += choice.delta.content or ""
                for delta in choice.delta.tool_calls or ():
                    empty = {"id": delta.id, "type": "function", "function": {"name": "", "arguments": ""}}
                    function = made.setdefault(delta.index, empty)["function"]
                    function["name"] += (delta.function and delta.function.name) or ""
                    function["arguments"] += (delta.function and delta.function.arguments) or ""
        return {"role": "assistant", "content": content} | ({"tool_calls": [*made.values()]} if made else {})


@dataclass(frozen=True)
class Played:
    """What both executions left."""

    store: Path
    books: Sequence[EngineEntry]
    agents: Sequence[Agent]


async def play(served: Served, folder: Path, turns: int = TURNS) -> Played:
    """Both agents, turn by turn."""
    backend = EngineBackend(served.engine, served.routed)
    store = Store.open(folder / "trajectories.db", writable=True)
    service = TitoService(backend, store, served.chat, context_limit=served.context)
    server = ProxyServer(service)
    await server.start()
    try:
        agents = []
        for streamed in (True, False):
            opened = await service.open_execution(ExecutionSpec(f"e{streamed:d}", "t", "g"))
            client = openai.AsyncOpenAI(api_key=opened.api_key, base_url=opened.base_url)
            agents.append(Agent(client, streamed, served.tokens))
        for number in range(turns):
            said = [await agent.turn(number) for agent in agents]
            assert said[0] == said[1], f"turn {number}: streamed and unstreamed differ"
        for name in ("e0", "e1"):
            await service.close_execution(name, Status.COMPLETED, Score(1.0))
        for agent in agents:
            await agent.client.close()
    finally:
        await server.stop()
        await service.close()
        store.close()
    return Played(folder / "trajectories.db", backend.books, agents)


def hold(served: Served, played: Played) -> None:
    """The laws, the engine's own books, and transformers."""
    findings = check_path(played.store, reader=reader_of(served.chat)).findings
    cut = "truncated-as-completed"  # the last answer may be cut: what the agent does is no task
    assert [one for one in findings if one.severity != "note" and one.code != cut] == []
    turns = len(played.books) // 2
    with Store.open(played.store) as store:
        trees = {name: store.load_tree(name) for name in ("e0", "e1")}
        for entry in played.books:
            execution, _, index = entry.call.call_id.rpartition("#")
            view = trees[execution].path(int(index))
            prompt = entry.prompt.tolist()
            assert view.token_ids.tolist() == prompt + entry.sampled
            assert view.logprobs[len(prompt) :].tolist() == pytest.approx(entry.logprobs)
            assert view.sampled[len(prompt) :].all()
        cached = [[call.cached_tokens or 0 for call in store.calls(name)] for name in trees]
    paths = [tree.path(turns - 1) for tree in trees.values()]
    assert [len(tree.leaves()) for tree in trees.values()] == [1, 1], "an append-only agent makes one path"
    assert paths[0].token_ids.tolist() == paths[1].token_ids.tolist()
    assert all(later > 0 for one in cached for later in one[turns // 2 :]), "the session was not found in the cache"
    ids, sampled = paths[0].token_ids.tolist(), np.flatnonzero(paths[0].sampled)
    rows = served.oracle().logprobs(ids)[sampled - 1]
    theirs = rows.gather(1, torch.tensor(ids)[sampled][:, None])[:, 0]
    assert rows.argmax(-1).tolist() == [ids[at] for at in sampled]
    for path in paths:
        assert path.logprobs[sampled].tolist() == pytest.approx(theirs.tolist(), abs=TOLERANCE)


@pytest_asyncio.fixture(loop_scope="module")
async def on_experts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An SGLang that serves a random mixture of experts with the quickstart's vocabulary."""
    build(read_spec(Path(str(files("gyre_sglang") / "environment.toml"))))
    folder, policy = tmp_path_factory.mktemp("moe"), ROOT / "examples" / "quickstart" / "policy"
    shutil.copytree(policy, folder, dirs_exist_ok=True)
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=json.loads((policy / "config.json").read_text())["vocab_size"], hidden_size=64,
        intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, num_experts=EXPERTS,
        num_experts_per_tok=TOP, norm_topk_prob=True, decoder_sparse_step=1, initializer_range=0.3,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
    options = SGLangOptions(dtype="float32", routed_experts=True)
    engine = SGLangEngine(options, ComponentContext(str(tmp_path_factory.mktemp("sglang")), "cell-0", seed=7))
    await engine.start(WeightSource(0, str(folder)))
    assert EngineCapability.ROUTED_EXPERTS in engine.capabilities
    yield Served(engine, folder, load_format(folder, family="qwen3"), 2040, routed=True)
    await engine.close()


async def test_experts_of_prompts_and_answers_are_kept_as_transformers_chooses_them(
    on_experts: Served, tmp_path: Path
) -> None:
    """Of every token but the last of each answer, which the pass that samples the first token of the next one reads."""
    engine, vocab = on_experts.engine, len(on_experts.chat.tokenizer)
    assert isinstance(engine, SGLangEngine)
    other = SGLangOptions(url=engine._server.client.url)  # type: ignore[union-attr]
    make = lambda: SGLangEngine(other, ComponentContext(str(tmp_path), "cell-1"))  # noqa: E731
    rig = EngineRig(make, [WeightSource(0, str(on_experts.folder))], vocab=vocab)
    await CallChecks().test_routed_experts_are_there_or_refused(rig)
    played = await play(on_experts, tmp_path, turns=4)
    hold(on_experts, played)
    with Store.open(played.store) as store:
        arrays = store.load_tree("e0").to_arrays()
        ends = [call.prompt_len + len(call.sampled_ids) - 1 for call in store.calls("e0")]
    assert arrays.routed_experts is not None
    assert arrays.routed_experts.shape == (len(arrays.token_ids), LAYERS, TOP)
    known = [at for at in range(len(arrays.token_ids)) if at not in ends]
    assert (arrays.routed_experts[ends] == -1).all()
    with torch.inference_mode():
        model = Qwen3MoeForCausalLM.from_pretrained(on_experts.folder, dtype=torch.float32).eval()
        found = model(torch.tensor([arrays.token_ids.tolist()]), output_router_logits=True).router_logits
    rows = torch.stack([layer.reshape(len(arrays.token_ids), EXPERTS).topk(TOP).indices for layer in found], 1)
    ours = torch.from_numpy(arrays.routed_experts[known].astype(np.int64))
    assert torch.equal(ours.sort(-1).values, rows[known].sort(-1).values)


@pytest.mark.slow  # fifty turns of a tiny model, and a small one's tokens, are in every check
async def test_fifty_turns_of_a_real_small_model_on_vllm(on_vllm: Served, tmp_path: Path) -> None:
    hold(on_vllm, await play(on_vllm, tmp_path))


async def test_fifty_turns_with_tool_calls_on_sglang(on_sglang: Served, tmp_path: Path) -> None:
    played = await play(on_sglang, tmp_path)
    assert min(agent.calls for agent in played.agents) >= TURNS // 2
    hold(on_sglang, played)


async def test_a_trainers_new_version_is_one_model_in_three_engines(on_sglang: Served, tmp_path: Path) -> None:
    """Random new weights, published by gyre-local's trainer: the same logprobs in gyre-local, vLLM and SGLang."""
    context = ComponentContext(str(tmp_path), "cell-1", seed=7)
    old, prompt = WeightSource(0, str(on_sglang.folder)), [(7 * i + 3) % 300 for i in range(90)]
    trainer = LocalTrainer(LocalTrainerOptions(dtype="float32"), context)
    await trainer.start(old, core=True)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in trainer._replica.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    source = await trainer.publish(str(tmp_path / "weights"))
    oracle = Oracle(trainer._replica.model.eval(), torch)
    others = [
        VLLMEngine(VLLMOptions(dtype="float32", max_context=512, max_running=8, kv_cache_gb=0.1), context),
        LocalEngine(LocalEngineOptions(kv_tokens=4096), context),
    ]
    for engine in others:
        await engine.start(old)
    try:
        for engine in (on_sglang.engine, *others):
            before = await call(engine, prompt, 40, name="before")
            await engine.update_weights(source)
            after = await call(engine, prompt, 40, name="after")
            assert (before.versions, after.versions) == ([0] * 40, [source.version] * 40)
            assert after.ids != before.ids
            assert oracle.margin(prompt, after.ids) <= TOLERANCE
            assert after.logprobs == pytest.approx(oracle.of_sampled(prompt, after.ids), abs=TOLERANCE)
    finally:
        for engine in others:
            await engine.close()
        await trainer.close()


def resident(engine: VLLMEngine) -> int:
    """Bytes of all processes of the server."""
    server = engine._state.server
    assert server is not None
    assert server.process is not None
    todo, total = [server.process._process.pid], 0
    while todo:
        pid = todo.pop()
        todo += [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return total


async def test_a_real_small_model_equals_transformers_and_sleeps(on_vllm: Served) -> None:
    """Several calls at once, tempered with cuts, gathered into one chunk; the same again after a sleep."""
    engine, oracle = on_vllm.engine, on_vllm.oracle()
    assert isinstance(engine, VLLMEngine)
    tokenizer = AutoTokenizer.from_pretrained(on_vllm.folder)
    texts = [
        "The capital of France is",
        "def fibonacci(n):\n    ",
        "Once upon a time, in a village by the sea, there lived an old clockmaker who",
    ]
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    prompts.append((prompts[2] * 12)[:150])

    async def check() -> list[list[int]]:
        called = await asyncio.gather(*(call(engine, p, 24, name=f"c{i}") for i, p in enumerate(prompts)))
        for prompt, result in zip(prompts, called, strict=True):
            rows = oracle.logprobs([*prompt, *result.ids])[len(prompt) - 1 : -1]
            assert result.ids == rows.argmax(-1).tolist()
            assert result.logprobs == pytest.approx(oracle.of_sampled(prompt, result.ids), abs=TOLERANCE)
        return [result.ids for result in called]

    first = await check()
    tempered = await call(engine, prompts[0], 20, name="t", temperature=0.7, top_p=0.9, top_k=20)
    assert tempered.logprobs == pytest.approx(oracle.of_sampled(prompts[0], tempered.ids, 0.7), abs=TOLERANCE)
    url = engine._state.server.client.url  # type: ignore[union-attr]
    whole = VLLMEngine(VLLMOptions(url=url, stream_tokens=1000), ComponentContext(str(on_vllm.folder), "whole"))
    await whole.start(WeightSource(0, str(on_vllm.folder)))
    unstreamed = await call(whole, prompts[0], 24, name="whole")
    assert len(unstreamed.chunks) <= 2
    assert unstreamed.ids == first[0]
    await whole.close()
    awake = resident(engine)
    await engine.sleep()
    asleep = resident(engine)
    print(f"resident {awake >> 20} MiB awake, {asleep >> 20} MiB asleep; {engine.timings}")
    assert awake - asleep > 400 << 20, "the weights alone are 540 MB"
    await engine.wake(WeightSource(1, str(on_vllm.folder)))
    print(f"resident {resident(engine) >> 20} MiB awake again; {engine.timings}")
    assert await check() == first
