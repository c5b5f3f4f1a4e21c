"""What the recording proxy adds to an answer's latency, and its throughput beside LiteLLM's proxy.

Three processes: this one is the agents, one is the proxy under test, one is the engine. Ours holds a token-true fake
engine that answers after a known delay; LiteLLM's stands in front of a plain HTTP server that answers after the same
delay. Agents hold real conversations: every request is the whole history, one message longer than the last.

`added` is what a client waited for the proxy's answer beyond what the same client waits, in the median and under the
same load, for the plain HTTP server alone with that delay (`direct_p50_ms` beyond the delay). `waited_*` is the same
without that subtraction: everything beyond the nominal delay, the client's own work and late timers included. The main
figures are with `durability="power"` (every commit is synced to the disk; `fsync_p50_ms` is what the disk itself takes
for that, a page appended and synced in the same run); `light_process` is what a killed process
survives and a power cut may not, as `gyre run` has it; the third has an engine of half the latency, so twice the calls.

Run: `python benchmarks/tito_proxy.py [--json] [--small] [--litellm PATH]` (`PATH`: the `litellm` program of an
environment of its own, `pip install 'litellm[proxy]'`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

WORDS = "read the file and write result 17 to out.txt then check the sum of all lines in the data folder again "
ANSWER = "I read the file and wrote the result to out.txt."


class DelayedEngine:
    """Answers every call with the same sentence after `delay` seconds."""

    def __init__(self, chat, delay: float) -> None:
        self.delay = delay
        self.ids = [*chat.tokenizer.encode(ANSWER), chat.stop_ids[0]]

    async def generate(self, call):
        from gyre_tito.backend import GenerateChunk

        await asyncio.sleep(self.delay)
        yield GenerateChunk(self.ids, [-0.5] * len(self.ids), [0] * len(self.ids), "stop", cached_tokens=call.new_from)


def our_proxy(folder: str, delay: float, agents: int, durability: str, pipe) -> None:
    """The proxy process."""

    async def main() -> None:
        from gyre_tito import ExecutionSpec, ProxyServer, Store, TitoService
        from gyre_tito.testing import tiny_format

        sys.setswitchinterval(0.0005)  # as `gyre_tito.serve` does: the writer's thread should not wait for the loop
        chat = tiny_format()
        store = Store.open(Path(folder) / "s.db", writable=True, durability=durability)
        service = TitoService(DelayedEngine(chat, delay), store, chat)
        server = ProxyServer(service, max_body_bytes=64 << 20)
        await server.start()
        keys = [(await service.open_execution(ExecutionSpec(f"e{number}"))).api_key for number in range(agents)]
        pipe.send((server.base_url, keys))
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv) == "report":
            service_lag = service.metrics.phases["loop_lag"]
            phases = {name: one.sum / max(one.count, 1) * 1e3 for name, one in service.metrics.phases.items()}
            pipe.send((service_lag.quantile(0.99) * 1e3, phases, time.process_time()))
            service.metrics.phases.clear()
        await server.stop()
        store.close()

    asyncio.run(main())


def plain_upstream(port: int, delay: float) -> None:
    """An OpenAI-like server without a model, behind LiteLLM."""
    from aiohttp import web

    message = {"role": "assistant", "content": ANSWER}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    body = {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }

    async def answer(request):
        await request.read()
        await asyncio.sleep(delay)
        return web.json_response(body)

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", answer)
    app.router.add_get("/health/liveliness", lambda _: web.Response())
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


class Agent:
    """One conversation, kept as JSON pieces so that the agent itself costs little."""

    def __init__(self, number: int, prompt_chars: int) -> None:
        filler = (f"task {number}: " + WORDS * (prompt_chars // len(WORDS) + 1))[:prompt_chars]
        self.parts = [json.dumps({"role": "user", "content": filler})]

    def body(self) -> bytes:
        return ('{"model":"m","max_tokens":64,"messages":[' + ",".join(self.parts) + "]}").encode()

    def heard(self, content: str) -> None:
        self.parts.append(json.dumps({"role": "assistant", "content": content}))
        self.parts.append(json.dumps({"role": "user", "content": "tool output: " + WORDS * 2}))


async def drive(url: str, keys: list[str], chars: int, turns: int, timeout: float, pause: float = 0.0) -> dict:
    """All agents at once, each `turns` requests; returns latencies of all but each agent's first request."""
    limit = aiohttp.TCPConnector(limit=0)
    waited: list[float] = []
    first: list[float] = []
    lost = longest = 0

    async def talk(number: int, key: str, http: aiohttp.ClientSession) -> None:
        nonlocal lost, longest
        agent = Agent(number, chars)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        await asyncio.sleep(pause * number / len(keys))
        for turn in range(turns):
            begin = time.perf_counter()
            try:
                async with http.post(f"{url}/v1/chat/completions", data=agent.body(), headers=headers) as answer:
                    said = await answer.json(content_type=None)
                    if answer.status != 200:
                        raise aiohttp.ClientError(str(said))
            except (aiohttp.ClientError, TimeoutError):
                lost += 1
                continue
            (first if turn == 0 else waited).append(time.perf_counter() - begin)
            longest = max(longest, said["usage"]["prompt_tokens"])
            agent.heard(said["choices"][0]["message"]["content"])

    begin = time.perf_counter()
    async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout(total=timeout)) as http:
        await asyncio.gather(*(talk(number, key, http) for number, key in enumerate(keys)))
    spent = time.perf_counter() - begin
    rps = (len(waited) + len(first)) / spent
    return {"waited": waited, "first": first, "lost": lost, "rps": rps, "prompt_tokens": longest}


def measure_direct(agents: int, tokens: int, delay: float, turns: int, pause: float) -> float:
    """Median seconds beyond the delay that a client waits for the plain server alone."""
    port = free_port()
    server = multiprocessing.Process(target=plain_upstream, args=(port, delay))
    server.start()
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(wait_until_up(url))
        result = asyncio.run(drive(url, ["x"] * agents, tokens * 12 // 5, turns, 120, pause))
        return statistics.median(result["waited"]) - delay
    finally:
        server.terminate()
        server.join()


def measure_fsync() -> float:
    """Median seconds to append a page to a file and have it on the disk, with pauses as a proxy has them."""
    spent = []
    with tempfile.TemporaryFile() as file:
        for _ in range(100):
            time.sleep(0.01)
            file.write(bytes(4096))
            file.flush()
            begin = time.perf_counter()
            os.fsync(file.fileno())
            spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def measure_ours(
    agents: int,
    tokens: int,
    delay: float,
    turns: int,
    timeout: float,
    pause: float,
    durability: str = "power",
    direct: float = 0.0,
) -> dict:
    here, there = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        worker = multiprocessing.Process(target=our_proxy, args=(folder, delay, agents, durability, there))
        worker.start()
        url, keys = here.recv()
        here.send("report")
        _, _, cpu = here.recv()
        result = asyncio.run(drive(url, keys, tokens * 12 // 5, turns, timeout, pause))
        here.send("report")
        lag, phases, later = here.recv()
        here.send("end")
        worker.join()
    waited = sorted(1e3 * (one - delay) for one in result["waited"])
    p50, p99 = statistics.median(waited), waited[int(len(waited) * 0.99)]
    return {
        "agents": agents,
        "tokens": tokens,
        "prompt_tokens": result["prompt_tokens"],
        "durability": durability,
        "calls": len(waited) + len(result["first"]),
        "added_p50_ms": round(p50 - 1e3 * direct, 3),
        "added_p99_ms": round(p99 - 1e3 * direct, 3),
        "waited_p50_ms": round(p50, 3),
        "waited_p99_ms": round(p99, 3),
        "direct_p50_ms": round(1e3 * direct, 3),
        "first_p50_s": round(statistics.median(result["first"]), 3),
        "first_max_s": round(max(result["first"]), 3),
        "timeouts": result["lost"],
        "loop_lag_p99_ms": lag,
        "cpu_ms_per_call": round(1e3 * (later - cpu) / (len(waited) + len(result["first"])), 3),
        "rps": round(result["rps"], 1),
        "phases_ms": {name: round(value, 3) for name, value in phases.items()},
    }


def measure_litellm(program: str, agents: int, tokens: int, delay: float, turns: int) -> float | None:
    """Requests a second through LiteLLM's proxy with the same conversations; None if it is not there."""
    if not Path(program).exists():
        return None
    upstream_port, port = free_port(), free_port()
    upstream = multiprocessing.Process(target=plain_upstream, args=(upstream_port, delay))
    upstream.start()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(
            "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n"
            f"      api_base: http://127.0.0.1:{upstream_port}/v1\n      api_key: x\n"
            "general_settings:\n  master_key: sk-1\n"
        )
        env = {**os.environ, "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}
        proxy = subprocess.Popen(
            [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(wait_until_up(url))
            asyncio.run(drive(url, ["sk-1"] * 4, 200, 2, 120))
            return asyncio.run(drive(url, ["sk-1"] * agents, tokens * 12 // 5, turns, 600))["rps"]
        finally:
            proxy.terminate()
            proxy.wait()
            upstream.terminate()
            upstream.join()


async def wait_until_up(url: str) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(3000):
            try:
                async with http.get(url + "/health/liveliness") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError(f"the server at {url} did not come up")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--small", action="store_true", help="the large case with 64 agents and 16k tokens")
    parser.add_argument("--litellm", default="", help="the litellm program, in an environment of its own")
    asked = parser.parse_args()
    fsync = measure_fsync()
    direct = measure_direct(64, 2_000, 1.0, 8, pause=1.0)
    light = measure_ours(64, 2_000, 1.0, 8, 120, pause=1.0, direct=direct)
    process = measure_ours(64, 2_000, 1.0, 8, 120, pause=1.0, durability="process", direct=direct)
    busy_direct = measure_direct(64, 2_000, 0.5, 12, pause=0.5)
    busy = measure_ours(64, 2_000, 0.5, 12, 120, pause=0.5, durability="process", direct=busy_direct)
    heavy_size = (64, 16_000) if asked.small else (512, 128_000)
    heavy = measure_ours(*heavy_size, 10.0, 4, 600, pause=20.0)
    ours = measure_ours(64, 2_000, 0.0, 8, 120, pause=0.0)["rps"]
    theirs = measure_litellm(asked.litellm, 64, 2_000, 0.0, 4)
    result = {
        "benchmark": "tito_proxy",
        "added_p50_ms": light["added_p50_ms"],
        "added_p99_ms": light["added_p99_ms"],
        "fsync_p50_ms": round(1e3 * fsync, 3),
        "cpu_ms_per_call": light["cpu_ms_per_call"],
        "timeouts": light["timeouts"] + heavy["timeouts"],
        "loop_lag_p99_ms": heavy["loop_lag_p99_ms"],
        "rps": ours,
        "rps_litellm": None if theirs is None else round(theirs, 1),
        "vs_litellm": None if theirs is None else round(ours / theirs, 2),
        "light": light,
        "light_process": process,
        "light_process_half_second": busy,
        "heavy": heavy,
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    if not asked.json:
        print(json.dumps(result, indent=2), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
