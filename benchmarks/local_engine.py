"""Embedded engine against transformers' generate on the same model, prompts and machine.

python benchmarks/local_engine.py [--json] [--calls 16] [--prompt 300] [--tokens 128] [--threads 1]

Prints what was measured; the last line is one JSON object. Both sides sample greedily the same number of tokens;
"serial" asks transformers one call at a time, "batched" pads all prompts into one generate call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gyre_core import ComponentContext, GenerateRequest, SamplingParams, WeightSource
from gyre_local.options import LocalEngineOptions
from gyre_local.serve.engine import LocalEngine
from transformers import AutoModelForCausalLM, Qwen3Config


def make_model(folder: str, hidden: int, layers: int, vocab: int) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


async def run_engine(folder: str, prompts: list[list[int]], tokens: int, threads: int) -> dict[str, Any]:
    engine = LocalEngine(
        LocalEngineOptions(max_running=len(prompts), kv_tokens=2 * sum(len(p) + tokens for p in prompts)),
        ComponentContext(".", "bench", threads=threads),
    )
    await engine.start(WeightSource(0, folder))

    async def call(index: int, prompt: list[int], count: int) -> float:
        request = GenerateRequest(f"r{index}", f"s{index}", prompt, SamplingParams(count, temperature=0.0))
        started = time.perf_counter()
        first = 0.0
        async for _ in engine.generate(request):
            first = first or time.perf_counter() - started
        return first

    await asyncio.gather(*(call(i, p[::-1], 4) for i, p in enumerate(prompts)))
    started = time.perf_counter()
    await asyncio.gather(*(call(i, p, 1) for i, p in enumerate(prompts)))
    prefill = time.perf_counter() - started
    started = time.perf_counter()
    await asyncio.gather(*(call(i, p, tokens) for i, p in enumerate(prompts)))
    decode = time.perf_counter() - started
    load = await engine.load()
    await engine.update_weights(WeightSource(1, folder))
    await engine.sleep()
    await engine.wake(WeightSource(2, folder))
    timings = dict(engine.timings)
    await engine.close()
    return {
        "prefill_tokens_per_s": round(sum(map(len, prompts)) / prefill),
        "decode_tokens_per_s": round(len(prompts) * tokens / decode),
        "decode_step_ms": round(1e3 * decode / tokens, 3),
        "load_decode_tokens_per_s": round(load.decode_tokens_per_s or 0),
        "timings_ms": {name: round(1e3 * seconds, 1) for name, seconds in timings.items()},
    }


def run_transformers(folder: str, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    how: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    longest = max(map(len, prompts))
    batch = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        model.generate(
            batch[:, :8], attention_mask=mask[:, :8] | 1, **(how | {"max_new_tokens": 4, "min_new_tokens": 4})
        )
        started = time.perf_counter()
        model.generate(batch, attention_mask=mask, **how)
        batched = time.perf_counter() - started
        few = prompts[:2]
        started = time.perf_counter()
        for prompt in few:
            model.generate(torch.tensor([prompt]), **how)
        serial = (time.perf_counter() - started) / len(few)
    return {
        "batched_tokens_per_s": round(len(prompts) * tokens / batched),
        "serial_tokens_per_s": round(tokens / serial),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON line")
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=300, help="mean prompt length; they vary by half")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    rng = random.Random(0)
    lengths = [rng.randint(given.prompt // 2, 3 * given.prompt // 2) for _ in range(given.calls)]
    prompts = [[rng.randrange(given.vocab) for _ in range(n)] for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        make_model(str(Path(folder)), given.hidden, given.layers, given.vocab)
        ours = asyncio.run(run_engine(folder, prompts, given.tokens, given.threads))
        theirs = run_transformers(folder, prompts, given.tokens)
    result = {
        "name": "local_engine",
        "hardware": f"{platform.machine()}, {given.threads} thread(s), torch {torch.__version__}, shared machine",
        "workload": {
            "calls": given.calls, "prompt_tokens": sum(lengths), "tokens": given.tokens, "hidden": given.hidden,
            "layers": given.layers, "vocab": given.vocab,
        },
        "gyre_local": ours,
        "transformers": theirs,
        "speedup_batched": round(ours["decode_tokens_per_s"] / theirs["batched_tokens_per_s"], 2),
        "speedup_serial": round(ours["decode_tokens_per_s"] / theirs["serial_tokens_per_s"], 2),
    }  # fmt: skip
    if not given.json:
        print(f"decode: {ours['decode_step_ms']} ms a step, {ours['decode_tokens_per_s']} tokens/s")
        print(
            f"transformers: {theirs['batched_tokens_per_s']} batched, {theirs['serial_tokens_per_s']} serial tokens/s"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
