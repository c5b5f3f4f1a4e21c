"""A session's next token after moving its KV, against prefilling it again; and a live move while it decodes.

Two engines of a kind with one model: gyre-local in two processes, and two vLLM servers on the CPU. For each length:
seconds from the decision to the next token at the destination, with the KV moved and without. The rule is fed with
every second length and predicts the break-even, which is compared with the one measured. From 4,096 tokens on the
source's own prefill runs beside the destination's, each on a core. Prints one JSON object as its last line.

A long run may be made in parts: `--parts` says which lengths (and `live`) to measure now, `--resume FILE` keeps what
was measured and goes on from it, and `--servers` names vLLM servers that run already (see kv_prefill_vllm.py). Figures
are derived when all parts are there; the same lengths measured again replace the older ones.

python benchmarks/kv_vs_prefill.py [--json] [--engines gyre-local,vllm] [--longest 32768]
python benchmarks/kv_vs_prefill.py --json --engines vllm --servers URL,URL --resume FILE --parts 4096,8192
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from gyre_kvxfer.rule import MoveRule
from gyre_sched import CostPriors
from gyre_sched.costs import Costs
from kv_prefill_local import LocalPair
from kv_prefill_support import Pair, make_model, prompt_of
from kv_prefill_vllm import VLLMPair

LONG = (4096, 8192, 16384, 32768)
LIVE = (300, 2048)
PAIRS = {pair.name: pair for pair in (LocalPair, VLLMPair)}


async def prefill(pair: Pair, session: str, n: int) -> float:
    """Seconds to the next token of a context that the destination has never seen."""
    context = prompt_of(session, n)
    await pair.wake()
    began = time.monotonic()
    return (await pair.next_token(session, context))["at"][0] - began


async def one_length(pair: Pair, n: int, repeat: int) -> dict[str, float]:
    """Seconds to the next token at the destination: moved, and prefilled. The best of `repeat`."""
    moved, prefilled, move_only, computed = [], [], [], []
    for i in range(repeat):
        session = f"length-{n}-{i}"
        if n in LONG:
            context, alone = await asyncio.gather(pair.fill(session, n), prefill(pair, f"fresh-{n}-{i}", n + 1))
        else:
            context, alone = await pair.fill(session, n), await prefill(pair, f"fresh-{n}-{i}", n + 1)
        prefilled.append(alone)
        await pair.wake()
        began = time.monotonic()
        move = await pair.move(session)
        after = await pair.next_token(session, context)
        moved.append(after["at"][0] - began)
        move_only.append(move.seconds)
        computed.append(after["computed"])
        await pair.forget()
    best = {"moved_s": min(moved), "prefilled_s": min(prefilled), "move_s": min(move_only)}
    print(pair.name, n, best, file=sys.stderr, flush=True)
    return best | {"tokens": n, "bytes": move.bytes, "computed_after_move": max(computed)}


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


async def best_live(pair: Any, n: int) -> dict[str, Any]:
    """Of three live moves the one with the shortest pause, and whether it kept to three token gaps and a round trip."""
    moves = [await pair.live(n) for _ in range(3)]
    best = min(moves, key=lambda move: move["pause_ms"])
    print(pair.name, "live", best, file=sys.stderr, flush=True)
    allowed = 3 * best["token_gap_ms"] + best["round_trip_ms"]
    best |= {"pauses_ms": [move["pause_ms"] for move in moves]}
    return {"tokens": n, **best, "allowed_ms": round(allowed, 2), "within": best["pause_ms"] <= allowed}


async def measure(
    pair: Any, how: argparse.Namespace, parts: set[str], found: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """These lengths and live moves of a pair, with those `found` before; again after each of them."""
    rows = {int(row["tokens"]): row for row in found.get("lengths", [])} if found.get("model") == pair.model else {}
    live = found.get("live", []) if found.get("live_model") == pair.live_model else []
    await pair.start()
    try:
        await one_length(pair, 64, 2)
        if "live" in parts:
            live = [await best_live(pair, n) for n in LIVE if 2 * n <= how.longest]
        for n in [0, *pair.short, *LONG]:
            if str(n) in parts:
                rows[n] = await one_length(pair, n, 1 if n in LONG else how.repeat)
            if n == 0 or str(n) in parts:
                models = {"model": pair.model, "live_model": pair.live_model, "hardware": hardware()}
                yield models | {"lengths": [rows[n] for n in sorted(rows)], "live": live}
    finally:
        await pair.close()


def disturbed(rows: list[dict[str, float]]) -> list[float]:
    """Lengths whose prefill took longer than that of the next: something else ran, and no break-even follows."""
    return [low["tokens"] for low, high in pairwise(rows) if low["prefilled_s"] > high["prefilled_s"]]


def derived(pair: dict[str, Any], longest: int) -> dict[str, Any]:
    """What follows from a pair's measurements; nothing while some are missing or were disturbed."""
    rows = pair["lengths"]
    if not rows or rows[-1]["tokens"] != longest or not pair["live"]:
        return pair
    if again := disturbed(rows):
        return pair | {"measure_again": again}
    measured, told = crossing(rows), predicted(rows)
    out = pair | {"breakeven_measured": measured, "breakeven_predicted": told}
    if measured and told:
        out["breakeven_error"] = round(abs(told - measured) / measured, 3)
    ratio = round(rows[-1]["prefilled_s"] / rows[-1]["moved_s"], 1)
    return out | scheduler(rows) | {f"ratio_{longest // 1024}k": ratio}


async def measure_all(how: argparse.Namespace) -> dict[str, Any]:
    """Every pair; on top what must hold for each: the worst break-even, the worst ratio, the worst live move."""
    out: dict[str, Any] = json.loads(how.resume.read_text()) if how.resume and how.resume.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for name in how.engines.split(","):
            kind = PAIRS[name]
            every = {str(n) for n in kind.short + LONG if n <= how.longest} | {"live"}
            parts = set(how.parts.split(",")) if how.parts else every
            if parts - every:
                raise SystemExit(f"--parts: got {sorted(parts - every)}, expected some of {sorted(every)}")
            more = {"urls": how.servers.split(",")} if how.servers and name == VLLMPair.name else {}
            lives = (kind.live_model, min(how.longest, 2 * max(LIVE)), parts & {"live"})
            for shape, longest, wanted in ((kind.model, how.longest, parts - {"live"}), lives):
                if not wanted:
                    continue
                model = f"{folder}/{name}-{shape['hidden_size']}"
                make_model(model, longest, shape)
                pair = kind(model, folder, longest, **more)
                async for so_far in measure(pair, how, wanted, out.get(name, {})):
                    pairs = {kept: out[kept] for kept in PAIRS if kept in out}
                    pairs[name] = derived(so_far, how.longest)
                    out = pairs | worst(list(pairs.values()))
                    if how.resume:
                        how.resume.write_text(json.dumps(out) + "\n")
    return out


def hardware() -> dict[str, Any]:
    """Where this was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((x.split(":")[1].strip() for x in lines if "model name" in x), platform.machine())
    return {"cpu": model, "cores": os.cpu_count(), "load": os.getloadavg()[0]}


def scheduler(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the scheduler's own rule makes of the same moves and of the engine's mean prefill speed: from where on it
    moves, and the most that its choice loses at one of the lengths."""
    costs = Costs(CostPriors())
    for row in rows:
        costs.moved(int(row["bytes"]), int(row["tokens"]), row["moved_s"])
    costs.prefilled(sum(row["tokens"] for row in rows) / sum(row["prefilled_s"] for row in rows))
    chosen = [row["moved_s"] if costs.carry_pays(int(row["tokens"])) else row["prefilled_s"] for row in rows]
    lost = [c - min(row["moved_s"], row["prefilled_s"]) for c, row in zip(chosen, rows, strict=True)]
    starts = next((n for n in range(1, int(rows[-1]["tokens"]) + 1) if costs.carry_pays(n)), None)
    return {"scheduler_breakeven": starts, "scheduler_loses_ms": round(max(lost) * 1e3, 1)}


def worst(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """What must hold for each, of the pair where it holds least."""
    live = [move for pair in pairs for move in pair["live"]]
    if not all("breakeven_predicted" in pair for pair in pairs):
        return {}
    found = {name for pair in pairs for name in pair if name.startswith("ratio")}
    return {
        "breakeven_error": max(pair.get("breakeven_error", 9.9) for pair in pairs),
        "scheduler_loses_ms": max(pair["scheduler_loses_ms"] for pair in pairs),
        **{name: min(pair[name] for pair in pairs) for name in found},
        "live_within": all(move["within"] for move in live),
        "live_same_tokens": all(move["same_tokens"] for move in live),
        "live_logprob_difference": max(move["logprob_difference"] for move in live),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--engines", default=",".join(PAIRS))
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--parts", default="", help="lengths to measure, and `live`; all unless given")
    parser.add_argument("--resume", type=Path, help="a file that keeps what was measured")
    parser.add_argument("--servers", default="", help="addresses of two vLLM servers that run already")
    args = parser.parse_args()
    result = asyncio.run(measure_all(args))
    if not args.json:
        for name in args.engines.split(","):
            for row in result[name]["lengths"]:
                print(f"{name} {row['tokens']:6}: moved {row['moved_s']:.4f} s, prefilled {row['prefilled_s']:.4f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
