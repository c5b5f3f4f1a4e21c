"""A session's next token after moving its KV, against prefilling it again; and a live move while it decodes.

Two processes with gyre-local's engine and the same small model. For each length: seconds from the decision to the
next token at the destination, with the KV moved and without. The rule is fed with every second measurement and
predicts the break-even length, which is compared with the one measured. Prints one JSON object as its last line.

python benchmarks/kv_vs_prefill.py [--json] [--longest 32768] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gyre_core import ComponentContext, FinishReason, GenerateRequest, SamplingParams, WeightSource
from gyre_kvxfer import MigrationServer, MovePolicy, MoveReport, migrate
from gyre_kvxfer.rule import MoveRule
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from gyre_rl.cell.kv import EngineKV
from transformers import AutoModelForCausalLM, Qwen3Config

KEY = b"benchmark"
VOCAB = 1024
SHORT = (16, 32, 64, 128, 256, 512, 1024, 2048)
LONG = (4096, 8192, 16384, 32768)


def make_model(folder: str, longest: int) -> None:
    """A random Qwen3 of a few million parameters."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2 * longest,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


async def start_engine(folder: str, longest: int, threads: int) -> LocalEngine:
    """An engine with room for a few sessions, handing out every token at once."""
    room = 2 * longest + 8192
    options = LocalEngineOptions(kv_tokens=room, max_running=4, max_context=longest + 1024, chunk_tokens=1)
    engine = LocalEngine(options, ComponentContext(".", "bench", threads=threads))
    await engine.start(WeightSource(0, folder))
    return engine


def prompt_of(session: str, n: int) -> list[int]:
    """n random tokens that no other session has."""
    rng = random.Random(session)
    return [rng.randrange(VOCAB) for _ in range(n)]


def nothing_yet() -> dict[str, Any]:
    """What `sample` fills while it runs."""
    return {"ids": [], "logprobs": [], "at": [], "computed": 0, "finish": ""}


async def sample(
    engine: LocalEngine, session: str, prompt: list[int], count: int, out: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run a greedy call: tokens, logprobs, when each came, prompt tokens computed, how it ended."""
    request = GenerateRequest(
        f"{session}-{time.monotonic_ns()}", session, prompt, SamplingParams(count, temperature=0.0)
    )
    out = nothing_yet() if out is None else out
    async for chunk in engine.generate(request):
        out["ids"] += chunk.token_ids
        out["logprobs"] += chunk.logprobs
        out["at"] += [time.monotonic()] * len(chunk.token_ids)
        if chunk.cached_tokens is not None:
            out["computed"] = len(prompt) - chunk.cached_tokens
        if chunk.finish is not None:
            out["finish"] = str(chunk.finish)
    return out


# -- the source's process -------------------------------------------------------------------------------------------


async def serve(folder: str, longest: int, threads: int) -> None:
    """Obeys JSON lines: run a call to its end, or start one and tell when it has sampled enough."""
    engine = await start_engine(folder, longest, threads)
    async with MigrationServer(EngineKV(engine), key=KEY, lease_s=30.0) as server:
        say({"endpoint": server.endpoint})
        loop = asyncio.get_running_loop()
        running: asyncio.Task[dict[str, Any]] | None = None
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            told = json.loads(line)
            if told["do"] == "run":
                say(await sample(engine, told["session"], prompt_of(told["session"], told["n"]), told["count"]))
            elif told["do"] == "start":
                prompt = prompt_of(told["session"], told["n"])
                so_far = nothing_yet()
                running = asyncio.ensure_future(sample(engine, told["session"], prompt, told["count"], so_far))
                while len(so_far["ids"]) < told["after"]:
                    await asyncio.sleep(0.005)
                say({})
            elif told["do"] == "ended" and running is not None:
                say(await running)
    await engine.close()


def say(what: dict[str, Any]) -> None:
    print("SAID" + json.dumps(what), flush=True)


class Peer:
    """The source's process, asked with JSON lines."""

    def __init__(self, folder: str, longest: int, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", folder, "--longest", str(longest), "--threads", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = self.read()["endpoint"]

    def read(self) -> dict[str, Any]:
        """The next thing it says."""
        while not (line := self.process.stdout.readline()).startswith("SAID"):
            if not line:
                raise RuntimeError("the source's process ended")
        return json.loads(line[4:])

    async def ask(self, **what: Any) -> dict[str, Any]:
        """Tell it and wait for its word."""
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return await asyncio.to_thread(self.read)

    def end(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


# -- measuring ------------------------------------------------------------------------------------------------------


async def one_length(peer: Peer, engine: LocalEngine, n: int, repeat: int) -> dict[str, float]:
    """Seconds to the next token at the destination: moved, and prefilled. The best of `repeat`."""
    moved, prefilled, move_only, computed = [], [], [], []
    for i in range(repeat):
        session = f"length-{n}-{i}"
        there = await peer.ask(do="run", session=session, n=n, count=1)
        context = prompt_of(session, n) + there["ids"]
        began = time.monotonic()
        report = await migrate(session, peer.endpoint, EngineKV(engine), key=KEY)
        if not report.carried:
            raise RuntimeError(str(report))
        after = await sample(engine, session, context, 1)
        moved.append(after["at"][0] - began)
        move_only.append(report.seconds)
        computed.append(after["computed"])
        fresh = prompt_of(f"fresh-{n}-{i}", n + 1)
        began = time.monotonic()
        again = await sample(engine, f"fresh-{n}-{i}", fresh, 1)
        prefilled.append(again["at"][0] - began)
        await engine.flush_cache()
    best = {"moved_s": min(moved), "prefilled_s": min(prefilled), "move_s": min(move_only)}
    return best | {"tokens": n, "bytes": report.bytes, "computed_after_move": max(computed)}


def crossing(rows: list[dict[str, float]]) -> float | None:
    """The measured break-even length: where the two lines meet, between two lengths in proportion."""
    for low, high in pairwise(rows):
        a, b = (r["prefilled_s"] - r["moved_s"] for r in (low, high))
        if a < 0 <= b:
            return low["tokens"] + (high["tokens"] - low["tokens"]) * a / (a - b)
    return None


def predicted(rows: list[dict[str, float]]) -> int | None:
    """The rule's break-even, fed with every second length."""
    rule = MoveRule.of()
    for row in rows[::2] * 4:
        rule = rule.moved(int(row["bytes"]), row["moved_s"]).prefilled(int(row["tokens"]), row["prefilled_s"])
    return rule.break_even(int(rows[-1]["bytes"] // rows[-1]["tokens"]))


async def live_move(peer: Peer, engine: LocalEngine, n: int, policy: MovePolicy) -> dict[str, Any]:
    """Move a session while it decodes; compare with the same call left alone."""
    whole = await peer.ask(do="run", session=f"alone-{n}", n=n, count=200)
    session = f"live-{n}"
    await peer.ask(do="start", session=session, n=n, count=900, after=60)
    report: MoveReport = await migrate(session, peer.endpoint, EngineKV(engine), key=KEY, policy=policy)
    part = await peer.ask(do="ended")
    if not report.carried or part["finish"] != str(FinishReason.ABORT):
        raise RuntimeError(f"{report} {part['finish']}")
    context = prompt_of(session, n) + part["ids"]
    rest = await sample(engine, session, context, 40)
    alone = await sample(engine, f"again-{n}", prompt_of(session, n), len(part["ids"]) + 40)
    got, want = part["logprobs"] + rest["logprobs"], alone["logprobs"]
    gaps = np.diff(whole["at"])
    return {
        "tokens": n + len(part["ids"]),
        "rounds": report.rounds,
        "pause_ms": round(1e3 * (rest["at"][0] - part["at"][-1]), 2),
        "protocol_pause_ms": round(1e3 * report.pause_seconds, 2),
        "token_gap_ms": round(1e3 * float(statistics.median(gaps)), 2),
        "prefilled_again": rest["computed"] - 1,
        "same_tokens": part["ids"] + rest["ids"] == alone["ids"],
        "logprob_difference": float(np.max(np.abs(np.array(got) - np.array(want)))),
        "transport": report.transport,
    }


async def measure(longest: int, threads: int, repeat: int) -> dict[str, Any]:
    lengths = [n for n in SHORT + LONG if n <= longest]
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, longest)
        peer = Peer(folder, longest, threads)
        try:
            engine = await start_engine(folder, longest, threads)
            await one_length(peer, engine, 64, 1)
            rows = [await one_length(peer, engine, n, repeat if n <= 2048 else 1) for n in lengths]
            small = await live_move(peer, engine, 300, MovePolicy())
            pre = await live_move(peer, engine, min(2048, longest // 2), MovePolicy(freeze_below=0))
            await engine.close()
        finally:
            peer.end()
    measured, told = crossing(rows), predicted(rows)
    out: dict[str, Any] = {"lengths": rows, "breakeven_measured": measured, "breakeven_predicted": told}
    if measured and told:
        out["breakeven_error"] = round(abs(told - measured) / measured, 3)
    out[f"ratio_{longest // 1024}k"] = round(rows[-1]["prefilled_s"] / rows[-1]["moved_s"], 1)
    return out | {"live_at_once": small, "live_pre_copy": pre}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.serve:
        asyncio.run(serve(args.serve, args.longest, args.threads))
        return
    result = asyncio.run(measure(args.longest, args.threads, args.repeat))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":")[1].strip() for x in lines if "model name" in x), platform.machine())
    result["hardware"] = {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0], "threads": args.threads}
    if not args.json:
        for row in result["lengths"]:
            print(f"{row['tokens']:6} tokens: moved {row['moved_s']:.4f} s, prefilled {row['prefilled_s']:.4f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
