"""An engine plugin against a plain client of the same server: what our adapter costs.

python benchmarks/engine_adapter.py --engine vllm|sglang [--json] [--calls 64] [--prompt 64] [--tokens 64] [--rounds 60]

Starts the engine's server with a tiny random Qwen3 (so that the clients' and the server's own work weighs most), then
lets both sides run `calls` concurrent streamed calls of token ids with logprobs, in turns: ours, peer, ours, peer, ...
The first round is thrown away. `overhead` is 1 - ours / peer of the tokens per second in one round, the median of all
rounds; negative means that ours is faster. `overhead_between` is its 95 % confidence interval, for one round is noise.

The peer is what the server's makers hand out to talk to it, and keeps what a trainer needs: token ids, logprobs, finish
reason. For vLLM that is the official openai client. SGLang, which is started without a tokenizer, has only /generate;
the peer is the loop of its own load generator (`sglang.benchmark.serving`: aiohttp, a line at a time, `json.loads`)
over kept connections, checking nothing. Where the engine has a way to gather tokens ("gathered"), it is measured too,
for information. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from gyre_core import ComponentContext, GenerateRequest, Kind, PluginManager, SamplingParams, WeightSource

VOCAB, BOUND = 320, 0.05
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"dtype": "float32", "max_context": 512, "max_running": 64, "kv_cache_gb": 0.5},
    "sglang": {"dtype": "float32", "max_running": 64, "kv_tokens": 65536},
}
GATHERED = {"vllm": {"stream_tokens": 8}}


def make_model(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


async def ours(engine: Any, prompts: list[list[int]], tokens: int, turn: int) -> int:
    async def one(index: int, prompt: list[int]) -> int:
        request = GenerateRequest(f"{turn}.{index}", f"s{index}", prompt, SamplingParams(tokens))
        found = 0
        async for chunk in engine.generate(request):
            assert len(chunk.logprobs) == len(chunk.token_ids)
            found += len(chunk.token_ids)
        return found

    return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))


async def peers(client: Any, model: str, prompts: list[list[int]], tokens: int) -> int:
    async def one(prompt: list[int]) -> int:
        stream = await client.completions.create(
            model=model, prompt=prompt, max_tokens=tokens, temperature=1.0, logprobs=1, stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True},
        )  # fmt: skip
        ids: list[int] = []
        logprobs: list[float] = []
        async for event in stream:
            for choice in event.choices:
                ids += choice.token_ids or ()
                logprobs += choice.logprobs.token_logprobs if choice.logprobs else ()
                finish = choice.finish_reason
        assert len(logprobs) == len(ids)
        assert finish == "length"
        return len(ids)

    return sum(await asyncio.gather(*map(one, prompts)))


async def bare_sglang(http: Any, url: str, prompts: list[list[int]], tokens: int) -> int:
    """The loop of SGLang's load generator, keeping ids, logprobs and the reason of the end."""

    async def one(prompt: list[int]) -> int:
        body = {
            "input_ids": prompt, "stream": True, "return_logprob": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
        }  # fmt: skip
        ids: list[int] = []
        logprobs: list[float] = []
        async with http.post(url + "/generate", json=body) as response:
            async for line in response.content:
                text = line.strip().decode().removeprefix("data: ")
                if text and text != "[DONE]":
                    event = json.loads(text)
                    ids += event["output_ids"]
                    logprobs += [pair[0] for pair in event["meta_info"]["output_token_logprobs"]]
                    finish = event["meta_info"]["finish_reason"]
        assert len(logprobs) == len(ids)
        assert finish["type"] == "length"
        return len(ids)

    return sum(await asyncio.gather(*map(one, prompts)))


@contextlib.asynccontextmanager
async def peer_of(engine: str, url: str) -> AsyncIterator[tuple[str, Callable[[list[list[int]], int], Awaitable[int]]]]:
    """Its name, and what runs prompts to so many tokens each."""
    if engine == "sglang":
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield (
                "the aiohttp loop of SGLang's load generator over /generate on the same server",
                partial(bare_sglang, http, url),
            )
        return
    import openai

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        yield f"openai {openai.__version__}, streamed completions on the same server", partial(peers, client, model)


async def rate(run: Callable[[], Awaitable[int]], expected: int, cpu: list[float]) -> float:
    """Tokens per second; `cpu` gets the microseconds that this process, the client, spent on each token."""
    began, busy = time.perf_counter(), time.process_time()
    found = await run()
    assert found == expected, f"{found} tokens came, {expected} were asked for"
    cpu.append((time.process_time() - busy) / found * 1e6)
    return found / (time.perf_counter() - began)


def likely(ratios: list[float]) -> list[float]:
    """Between which overheads the true median lies, 19 times in 20: by order statistics, whatever the noise."""
    ranked, spread = sorted(ratios), 0.98 * len(ratios) ** 0.5
    low, high = int(len(ratios) / 2 - spread), int(len(ratios) / 2 + spread)
    return [round(1 - ranked[min(high, len(ranked) - 1)], 4), round(1 - ranked[max(low, 0)], 4)]


async def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    plugins = PluginManager.installed()
    options = OPTIONS[args.engine] | ({"python": args.python} if args.python else {})
    context = ComponentContext(folder, "bench", seed=1)
    engine = plugins.create(Kind.ENGINE, args.engine, options, context)
    rng = random.Random(0)
    stack = contextlib.AsyncExitStack()
    started = time.perf_counter()
    await engine.start(WeightSource(0, folder))
    print(f"started in {time.perf_counter() - started:.0f} s", flush=True)
    try:
        url = (engine._state.server if args.engine == "vllm" else engine._server).client.url
        peer_name, run_peer = await stack.enter_async_context(peer_of(args.engine, url))
        sides: dict[str, Any] = {"ours": engine}
        if args.engine in GATHERED:
            sides["gathered"] = plugins.create(
                Kind.ENGINE, args.engine, {"url": url} | GATHERED[args.engine], ComponentContext(folder, "gathered")
            )
            await sides["gathered"].start(WeightSource(0, folder))
        found: dict[str, list[float]] = {name: [] for name in (*sides, "peer")}
        cpu: dict[str, list[float]] = {name: [] for name in found}
        expected = args.calls * args.tokens
        for turn in range(args.rounds + 1):
            for name in found if turn % 2 else reversed(found):
                prompts = [[rng.randrange(VOCAB) for _ in range(args.prompt)] for _ in range(args.calls)]
                if name == "peer":
                    speed = await rate(lambda p=prompts: run_peer(p, args.tokens), expected, cpu[name])
                else:
                    speed = await rate(
                        lambda p=prompts, e=sides[name], t=turn: ours(e, p, args.tokens, t), expected, cpu[name]
                    )
                if turn:
                    found[name].append(speed)
                print(f"round {turn} {name}: {speed:.0f} tokens/s", flush=True)
        for name, side in sides.items():
            if name != "ours":
                await side.close()
    finally:
        await stack.aclose()
        await engine.close()
    ratios = [mine / peers for mine, peers in zip(found["ours"], found["peer"], strict=True)]
    medians = {name: statistics.median(speeds) for name, speeds in found.items()}
    return {
        "benchmark": "engine_adapter",
        "engine": args.engine,
        "calls": args.calls, "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds,
        "tokens_per_s": {name: round(value, 1) for name, value in medians.items()},
        "all": {name: [round(speed, 1) for speed in speeds] for name, speeds in found.items()},
        "client_cpu_us_per_token": {name: round(statistics.median(spent[1:]), 1) for name, spent in cpu.items()},
        "overhead": round(1 - statistics.median(ratios), 4),
        "overhead_between": likely(ratios),
        "bound": BOUND,
        "peer": peer_name,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores shared by server and client, no accelerator",
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=sorted(OPTIONS), required=True)
    parser.add_argument("--python", default="", help="interpreter of the engine's environment, if not the built one")
    parser.add_argument("--json", action="store_true", help="without the summary in words")
    for name, default in (("calls", 64), ("prompt", 64), ("tokens", 64), ("rounds", 60)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder)
        result = asyncio.run(measure(args, folder))
    if not args.json:
        print(f"overhead {result['overhead']:.1%}, bound {BOUND:.0%}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
