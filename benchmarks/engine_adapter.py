"""An engine plugin against a plain client of the same server: what our adapter costs.

python benchmarks/engine_adapter.py --engine vllm|sglang [--json] [--calls 64] [--prompt 64] [--tokens 64] [--rounds 60]

Starts the engine's server with a tiny random Qwen3 (so that the clients' and the server's own work weighs most), then
lets all sides run `calls` concurrent streamed calls of token ids with logprobs, in turns: ours, peer, ours, peer, ...
The first round is thrown away. `overhead` is 1 - ours / peer of the tokens per second in one round, the median of all
rounds; negative means that ours is faster. `overhead_between` is its 95 % confidence interval, for one round is noise.

The peer is the loop that the server's makers use where the client must not be what is measured, that of their own load
generators: aiohttp, an event at a time, `json.loads`, checking nothing; here it keeps what a
trainer needs: token ids, logprobs, finish reason. For vLLM (`vllm bench serve`) that is over /v1/completions, for
SGLang (`sglang.benchmark.serving`), which is started without a tokenizer, over /generate. For information, vLLM's is
also measured against the same loop over the path our adapter uses ("same_path"), the official openai client ("openai")
and our adapter letting the server gather tokens ("gathered"). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
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

import aiohttp
from gyre_core import ComponentContext, GenerateRequest, Kind, PluginManager, SamplingParams, WeightSource

VOCAB, BOUND = 320, 0.05
OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"dtype": "float32", "max_context": 512, "max_running": 64, "kv_cache_gb": 0.5},
    "sglang": {"dtype": "float32", "max_running": 64, "kv_tokens": 65536},
}
GATHERED = {"vllm": {"stream_tokens": 8}}
NUMBERS = itertools.count()


def make_model(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


async def ours(engine: Any, tokens: int, prompts: list[list[int]]) -> int:
    async def one(index: int, prompt: list[int]) -> int:
        request = GenerateRequest(f"call-{next(NUMBERS)}", f"s{index}", prompt, SamplingParams(tokens))
        found = 0
        async for chunk in engine.generate(request):
            assert len(chunk.logprobs) == len(chunk.token_ids)
            found += len(chunk.token_ids)
        return found

    return sum(await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts))))


async def events(http: Any, url: str, body: dict[str, Any]) -> AsyncIterator[Any]:
    """What the server sends, as a load generator reads it."""
    async with http.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        rest = ""
        async for data in response.content.iter_any():
            *whole, rest = (rest + data.decode()).split("\n\n")
            for event in whole:
                if (text := event.removeprefix("data: ")) != "[DONE]":
                    yield json.loads(text)


async def bare(one: Callable[[Any, list[int]], Awaitable[int]], prompts: list[list[int]]) -> int:
    """Connections last for one round: the server may drop them while the others have their turns."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        return sum(await asyncio.gather(*(one(http, prompt) for prompt in prompts)))


def checked(ids: list[int], logprobs: list[float], finish: str) -> int:
    assert len(logprobs) == len(ids)
    assert finish == "length"
    return len(ids)


def sampled(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
AS_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}  # the server has no tokenizer


async def bare_sglang(url: str, tokens: int, http: Any, prompt: list[int]) -> int:
    body = {
        "input_ids": prompt, "stream": True, "return_logprob": True,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
    }  # fmt: skip
    ids: list[int] = []
    logprobs: list[float] = []
    async for event in events(http, url + "/generate", body):
        ids += event["output_ids"]
        logprobs += [pair[0] for pair in event["meta_info"]["output_token_logprobs"]]
        finish = event["meta_info"]["finish_reason"]
    return checked(ids, logprobs, finish["type"])


async def bare_vllm(url: str, model: str, tokens: int, http: Any, prompt: list[int]) -> int:
    body = {"model": model, "prompt": prompt, "logprobs": 1, **sampled(tokens), **STREAMED, **AS_IDS}
    ids: list[int] = []
    logprobs: list[float] = []
    async for event in events(http, url + "/v1/completions", body):
        for choice in event["choices"]:
            ids += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
            finish = choice["finish_reason"]
    return checked(ids, logprobs, finish)


async def same_path_vllm(url: str, model: str, tokens: int, http: Any, prompt: list[int]) -> int:
    how = {**sampled(tokens), "logprobs": 0, "detokenize": False}
    body = {"model": model, "token_ids": prompt, "sampling_params": how, **STREAMED}
    ids: list[int] = []
    logprobs: list[float] = []
    async for event in events(http, url + "/inference/v1/generate", body):
        for choice in event["choices"]:
            ids += choice["token_ids"]
            logprobs += [entry["logprob"] for entry in choice["logprobs"]["content"]]
            finish = choice["finish_reason"]
    return checked(ids, logprobs, finish)


async def openai_vllm(client: Any, model: str, tokens: int, prompts: list[list[int]]) -> int:
    return sum(await asyncio.gather(*(one_openai(client, model, tokens, prompt) for prompt in prompts)))


async def one_openai(client: Any, model: str, tokens: int, prompt: list[int]) -> int:
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=tokens, temperature=1.0, logprobs=1,
        extra_body={"ignore_eos": True, **AS_IDS}, **STREAMED,
    )  # fmt: skip
    ids: list[int] = []
    logprobs: list[float] = []
    async for event in stream:
        for choice in event.choices:
            ids += choice.token_ids or ()
            logprobs += choice.logprobs.token_logprobs if choice.logprobs else ()
            finish = choice.finish_reason
    return checked(ids, logprobs, finish)


Run = Callable[[list[list[int]]], Awaitable[int]]


@contextlib.asynccontextmanager
async def peers_of(engine: str, url: str, tokens: int) -> AsyncIterator[tuple[str, dict[str, Run]]]:
    """The peer's name, and what runs prompts to their ends: "peer", then what is measured for information."""
    if engine == "sglang":
        name = "the aiohttp loop of SGLang's load generator over /generate on the same server"
        yield name, {"peer": partial(bare, partial(bare_sglang, url, tokens))}
        return
    import openai

    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        model = (await client.models.list()).data[0].id
        name = (
            "the aiohttp loop of vLLM's load generator over /v1/completions on the same server"
            f" (same_path: over /inference/v1/generate; openai: openai {openai.__version__})"
        )
        yield (
            name,
            {
                "peer": partial(bare, partial(bare_vllm, url, model, tokens)),
                "same_path": partial(bare, partial(same_path_vllm, url, model, tokens)),
                "openai": partial(openai_vllm, client, model, tokens),
            },
        )


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


@contextlib.asynccontextmanager
async def sides_of(args: argparse.Namespace, folder: str) -> AsyncIterator[tuple[str, dict[str, Run]]]:
    """A server's start to its end; the peer's name, and the sides by name."""
    plugins = PluginManager.installed()
    options = OPTIONS[args.engine] | ({"python": args.python} if args.python else {})
    engine = plugins.create(Kind.ENGINE, args.engine, options, ComponentContext(folder, "bench", seed=1))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        started = time.perf_counter()
        await engine.start(WeightSource(0, folder))
        print(f"started in {time.perf_counter() - started:.0f} s", flush=True)
        url = (engine._state.server if args.engine == "vllm" else engine._server).client.url
        sides: dict[str, Run] = {"ours": partial(ours, engine, args.tokens)}
        name, peers = await stack.enter_async_context(peers_of(args.engine, url, args.tokens))
        if args.engine in GATHERED:
            gathered = plugins.create(
                Kind.ENGINE, args.engine, {"url": url} | GATHERED[args.engine], ComponentContext(folder, "gathered")
            )
            stack.push_async_callback(gathered.close)
            await gathered.start(WeightSource(0, folder))
            sides["gathered"] = partial(ours, gathered, args.tokens)
        yield name, sides | peers


async def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    rng = random.Random(0)
    async with sides_of(args, folder) as (peer_name, sides):
        found: dict[str, list[float]] = {name: [] for name in sides}
        cpu: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds + 1):
            for name in sides if turn % 2 else reversed(sides):
                prompts = [[rng.randrange(VOCAB) for _ in range(args.prompt)] for _ in range(args.calls)]
                speed = await rate(partial(sides[name], prompts), args.calls * args.tokens, cpu[name])
                found[name].append(speed)
                print(f"round {turn} {name}: {speed:.0f} tokens/s", flush=True)
    found = {name: speeds[1:] for name, speeds in found.items()}
    against = {
        name: [mine / theirs for mine, theirs in zip(found["ours"], speeds, strict=True)]
        for name, speeds in found.items()
        if name not in ("ours", "gathered")
    }
    return {
        "benchmark": "engine_adapter",
        "engine": args.engine,
        "calls": args.calls, "prompt": args.prompt, "tokens": args.tokens, "rounds": args.rounds,
        "tokens_per_s": {name: round(statistics.median(speeds), 1) for name, speeds in found.items()},
        "client_cpu_us_per_token": {name: round(statistics.median(spent[1:]), 1) for name, spent in cpu.items()},
        "overhead": round(1 - statistics.median(against["peer"]), 4),
        "overhead_between": likely(against["peer"]),
        "bound": BOUND,
        "for_information": {
            name: {"overhead": round(1 - statistics.median(ratios), 4), "overhead_between": likely(ratios)}
            for name, ratios in against.items()
            if name != "peer"
        },
        "all": {name: [round(speed, 1) for speed in speeds] for name, speeds in found.items()},
        "peer": peer_name,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores shared by server and client, no accelerator,"
        f" load {os.getloadavg()[0]:.1f} at the end of the run",
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
