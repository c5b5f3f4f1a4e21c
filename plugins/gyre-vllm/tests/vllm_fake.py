"""A server that keeps vLLM 0.32's protocol as far as the engine uses it, with faults to order.

Its "model" is arithmetic on the context and on one number in the weights, so that every token tells under which weights
it was sampled: `token_after`. It samples a token for each running call at each tick, keeps a prefix cache by salt,
pauses, aborts and answers worker calls as the real server does.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

VOCAB, BLOCK, CONTEXT = 97, 8, 256


def write_weights(folder: Path, number: int, names: Sequence[str] = ("w", "lm_head.weight")) -> str:
    """A model folder whose one tensor holds `number`."""
    folder.mkdir(parents=True, exist_ok=True)
    header = {n: {"dtype": "I64", "shape": [1], "data_offsets": [8 * i, 8 * i + 8]} for i, n in enumerate(names)}
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + struct.pack("<q", number) * len(names)
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}))
    return str(folder)


def token_after(context: Sequence[int], weights: int) -> int:
    """What the fake model samples after `context`."""
    return (sum(context) * 31 + len(context) * 7 + weights * 13) % VOCAB


def logprob_of(weights: int) -> float:
    """The same for every token."""
    return -0.25 * (weights + 1)


@dataclass
class Call:
    id: str
    context: list[int]
    prompt: int
    limit: int
    stops: list[int]
    salt: str
    every: int
    out: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    sampled: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached: int | None = None
    reason: str | None = None
    fetched: int = 0
    """Tokens of its context whose KV comes from another server."""


class FakeVLLM:
    """`faults` is a set of words the handlers look for; "X-fails" lets what is named X answer with HTTP 500."""

    def __init__(self, *, slots: int = 4, tick_s: float = 0.002, extension: bool = True) -> None:
        self.slots, self.tick_s, self.extension = slots, tick_s, extension
        self.weights, self.version, self.paused, self.asleep = 0, "default", False, False
        self.faults: set[str] = set()
        self.waiting: list[Call] = []
        self.running: list[Call] = []
        self.cache: set[tuple[str, tuple[int, ...]]] = set()
        self.totals = {"local_compute": 0, "local_cache_hit": 0, "generation": 0, "prefills": 0}
        self.log: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.experts = False
        """Each answer ends with the experts of its passes: the positions that they read, three layers, two each."""
        self.hold_s = 0.0
        """Tokens reach the connection this much later than they are sampled."""
        self.most = CONTEXT
        """No call is sampled more tokens than so many, for the time being."""
        self.room = asyncio.Event()
        """Cleared: requests that move KV wait, as on a server that is full."""
        self.room.set()
        self.late = asyncio.Event()
        """Cleared: workers wait before they load or sleep, whether or not anybody still listens."""
        self.late.set()
        self.reads = asyncio.Event()
        """Cleared: calls are taken from their connections no more, and nobody knows of them."""
        self.reads.set()
        self.mute: set[str] = set()
        """"resume", "abort", methods of workers: they are carried out, and not answered while they are in here."""
        self.orders: list[dict[str, Any]] = []
        self.device, self.replicas, self.model, self.prepared = "cpu", 1, "gyre", False
        self._names = itertools.count()

    async def start(self, port: int = 0) -> str:
        app = web.Application(client_max_size=1 << 30)
        post = {
            "/pause": self._pause, "/resume": self._resume, "/abort_requests": self._abort,
            "/update_weight_version": self._set_version, "/collective_rpc": self._rpc,
            "/reset_prefix_cache": self._forget, "/inference/v1/generate": self._generate,
            "/v1/completions": self._complete, "/sleep": self._sleep, "/wake_up": self._wake,
        }  # fmt: skip
        get = {
            "/health": self._health, "/version": self._version, "/openapi.json": self._openapi,
            "/v1/models": self._models, "/metrics": self._metrics, "/server_info": self._info,
        }  # fmt: skip
        self.paths = list(post) + list(get)
        for path, handler in post.items():
            app.router.add_post(path, handler)
        for path, handler in get.items():
            app.router.add_get(path, handler)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self._ticker = asyncio.create_task(self._ticking())
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    async def stop(self) -> None:
        for gate in (self.room, self.late, self.reads):
            gate.set()
        self.mute.clear()
        self._ticker.cancel()
        await self._runner.cleanup()

    # -- the scheduler

    async def _ticking(self) -> None:
        while True:
            await asyncio.sleep(self.tick_s)
            if self.paused or "hang" in self.faults:
                continue
            while self.waiting and len(self.running) < self.slots:
                self._admit(self.waiting.pop(0))
            for call in list(self.running):
                if len(call.sampled) < self.most:
                    self._step(call)

    def _blocks(self, ids: Sequence[int]) -> Iterable[tuple[int, ...]]:
        return (tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK))

    def _admit(self, call: Call) -> None:
        call.cached = call.fetched
        for block in self._blocks(call.context[:-1]):
            if (call.salt, block) not in self.cache:
                break
            call.cached = max(call.cached, len(block))
        self.totals["prefills"] += 1
        self.totals["local_cache_hit"] += call.cached
        self.totals["local_compute"] += len(call.context) - call.cached
        self.running.append(call)

    def _step(self, call: Call) -> None:
        token = token_after(call.context, self.weights)
        call.context.append(token)
        call.sampled.append(token)
        call.versions.append(self.version)
        call.logprobs.append(logprob_of(self.weights) - (self.extension and not self.prepared))
        self.totals["generation"] += 1
        self.cache |= {(call.salt, block) for block in self._blocks(call.context[:-1])}
        if token in call.stops:
            self._finish(call, "stop")
        elif len(call.sampled) >= call.limit:
            self._finish(call, "length")
        else:
            call.out.put_nowait(len(call.sampled))

    def _finish(self, call: Call, reason: str) -> None:
        for group in (self.running, self.waiting):
            if call in group:
                group.remove(call)
        call.reason = reason
        call.out.put_nowait(len(call.sampled))

    # -- handlers

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if "500" in self.faults:
            return web.json_response({"error": {"message": "CUDA out of memory"}}, status=500)
        body = await request.json()
        self.bodies.append(body)
        how = body["sampling_params"]
        if how["max_tokens"] + len(body["token_ids"]) > CONTEXT:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        name = f"generate-tokens-{request.headers['x-request-id']}"
        call = Call(
            name, list(body["token_ids"]), len(body["token_ids"]), how["max_tokens"], how["stop_token_ids"],
            body["cache_salt"], how.get("stream_interval", 1),
            fetched=min(body.get("kv_transfer_params", {}).get("remote_num_tokens", 0), len(body["token_ids"]) - 1),
        )  # fmt: skip
        await self.reads.wait()
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        if call.fetched and "silent-source" in self.faults:  # waits for blocks that do not come, until nobody listens
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(self.tick_s)
            return answer
        self.waiting.append(call)
        try:
            await self._stream(call, answer)
        finally:
            if call.reason is None:
                self._finish(call, "abort")
        return answer

    async def _complete(self, request: web.Request) -> web.Response:
        """One token, with the NIXL connector's parameters in and out; takes any blocks for any prompt, as vLLM does."""
        body = await request.json()
        self.bodies.append(body)
        await self.room.wait()
        prompt, params = body["prompt"], body["kv_transfer_params"]
        if "gyre_take" in params:
            return await self._take(params["gyre_take"])
        found = params["remote_num_tokens"] if params.get("do_remote_prefill") else 0
        self.cache |= {(body["cache_salt"], block) for block in self._blocks(prompt)}
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": found}}
        offered = {"do_remote_prefill": True, "remote_num_tokens": len(prompt) // BLOCK * BLOCK}
        given = None if "no-params" in self.faults else offered
        return web.json_response({"choices": [{"token_ids": [1]}], "usage": usage, "kv_transfer_params": given})

    async def _take(self, name: str) -> web.Response:
        """The call ends at its next token; where its KV is, all but the last token's."""
        given = None
        call = next((call for call in self.running if call.id == name and call.sampled), None)
        if call is not None and "no-params" not in self.faults:
            call.limit = min(call.limit, len(call.sampled) + 1)
            while call.reason is None:
                await asyncio.sleep(self.tick_s)
            given = {"do_remote_prefill": True, "remote_num_tokens": len(call.context) - 1}
        return web.json_response({"choices": [{"token_ids": [1]}], "kv_transfer_params": given})

    async def _stream(self, call: Call, answer: web.StreamResponse) -> None:
        sent = 0
        while True:
            upto = await call.out.get()
            if self.hold_s:
                await asyncio.sleep(self.hold_s)
            last = call.reason is not None and upto == len(call.sampled)
            if not last and sent and upto - sent < call.every:
                continue
            if "die" in self.faults and upto >= 3:
                raise ConnectionResetError
            await self._event(answer, self._choice(call, sent, upto, last))
            sent = upto
            if last:
                break
            if "truncate" in self.faults and sent >= 3:
                return
            if "error-event" in self.faults and sent >= 2:
                await self._event(answer, {"error": {"message": "EngineCore died", "code": 500}})
                return
        while "late-end" in self.faults:
            await asyncio.sleep(self.tick_s)
        usage = {"prompt_tokens": call.prompt, "prompt_tokens_details": {"cached_tokens": call.cached or 0}}
        await self._event(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")

    def _choice(self, call: Call, start: int, end: int, last: bool) -> dict[str, Any]:
        ids = call.sampled[start:end]
        if "vocabulary" in self.faults and end >= 2:
            ids[-1] = VOCAB + 5
        found = [call.logprobs[start + i] for i in range(len(ids))]
        if "nan" in self.faults and end >= 2:
            found[-1] = -9999.0
        content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(ids, found, strict=True)]
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": call.reason if last else None}
        choice["logprobs"] = {"content": content}
        if last and call.sampled:
            choice["weight_versions"] = _spans(["wrong" if "spans" in self.faults else v for v in call.versions])
        if last and self.experts:
            first = self.bodies[-1]["sampling_params"].get("routed_experts_prompt_start", 0)
            rows = np.arange(first, call.prompt + len(call.sampled) - 1, dtype=np.uint8)
            np.save(file := io.BytesIO(), np.repeat(rows, 6).reshape(-1, 3, 2))
            choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return {"request_id": call.id, "choices": [choice]}

    async def _event(self, answer: web.StreamResponse, event: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _may_fail(self, what: str) -> None:
        if f"{what}-fails" in self.faults:
            raise web.HTTPInternalServerError(text=json.dumps({"error": {"message": f"{what} failed"}}))

    async def _until_told(self, what: str) -> None:
        while what in self.mute:
            await asyncio.sleep(self.tick_s)

    async def _pause(self, request: web.Request) -> web.Response:
        self._may_fail("pause")
        assert "connector" not in self.faults, "vLLM would wait for ever for a lease to end"
        self.log.append("pause")
        self.paused = True
        if request.query["mode"] == "abort":
            for call in [*self.running, *self.waiting]:
                self._finish(call, "abort")
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._may_fail("resume")
        self.log.append("resume")
        self.paused = False
        await self._until_told("resume")
        return web.json_response({"status": "resumed"})

    async def _abort(self, request: web.Request) -> web.Response:
        ids = set((await request.json())["request_ids"])
        for call in [*self.running, *self.waiting]:
            if call.id in ids:
                self._finish(call, "abort")
        await self._until_told("abort")
        return web.json_response({"status": "aborted"})

    async def _set_version(self, request: web.Request) -> web.Response:
        assert self.paused or not self.running, "weight versions change only while generation is paused"
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _forget(self, request: web.Request) -> web.Response:
        done = not self.running and "reset-refused" not in self.faults
        if done:
            self.cache.clear()
        return web.json_response({"success": done})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        method, given = body["method"], body.get("kwargs", {})
        self.orders.append(body)
        if method.startswith("gyre_") and not self.extension:
            return web.json_response({"error": {"message": f"no attribute {method!r}"}}, status=500)
        self.log.append(method)
        result = getattr(self, f"_do_{method}")(**given)
        if asyncio.iscoroutine(result):
            result = await result
        await self._until_told(method)
        return web.json_response({"results": [result]})

    def _do_gyre_prepare(self) -> dict[str, Any]:
        self.prepared = True
        return {
            "device": self.device, "data_parallel": self.replicas, "sleep_mode": True,
            "experts": self.experts,
            "vocab": VOCAB + 1 if "other-model" in self.faults else VOCAB, "max_context": CONTEXT,
            "max_running": self.slots, "counts": True, "connector": "connector" in self.faults,
            "takes": "takes" in self.faults,
            "kv_tokens": 4 * CONTEXT, "kv_bytes": 4 * CONTEXT * 8,
        }  # fmt: skip

    def _do_gyre_counts(self) -> dict[str, Any]:
        calls = [*self.running, *self.waiting]
        return {"counts": {f"{call.id}-{i:08x}": len(call.sampled) for i, call in enumerate(calls) if call.sampled}}

    async def _sleep(self, request: web.Request) -> web.Response:
        self.asleep, self.weights = True, -1
        return web.json_response({})

    async def _wake(self, request: web.Request) -> web.Response:
        self.asleep = False
        return web.json_response({})

    async def _do_reload_weights(self, weights_path: str) -> None:
        await self.late.wait()
        assert self.paused or not (self.running or self.waiting)
        assert not self.asleep
        if "load-fails" in self.faults:
            self.faults.discard("load-fails")
            self.weights = -1
            raise web.HTTPInternalServerError(text=json.dumps({"error": {"message": "load failed"}}))
        await asyncio.sleep(0.01)
        data = (Path(weights_path) / "model.safetensors").read_bytes()
        (self.weights,) = struct.unpack("<q", data[-8:])

    async def _do_gyre_sleep(self) -> dict[str, Any]:
        await self.late.wait()
        assert self.paused
        assert not self.running
        self.asleep, self.weights = True, -1
        self._may_fail("sleep")
        return {"before": 10, "after": 1}

    def _do_gyre_wake(self) -> dict[str, Any]:
        self._may_fail("wake")
        self.asleep = False
        return {"after": 10}

    async def _do_gyre_load(self, location: str, package: str) -> dict[str, Any]:
        assert not self.asleep
        assert (Path(package) / "__init__.py").exists()
        if "worker-error" in self.faults:
            self.faults.discard("worker-error")
            return {"error": "worker failed"}
        await self._do_reload_weights(location)
        return {"repacked": []}

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if "unhealthy" in self.faults else 200)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.33.1" if "newer" in self.faults else "0.32.0"})

    async def _openapi(self, request: web.Request) -> web.Response:
        left_out = {"/pause"} if "no-dev-mode" in self.faults else set()
        return web.json_response({"paths": {path: {} for path in self.paths if path not in left_out}})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": CONTEXT}]})

    async def _info(self, request: web.Request) -> web.Response:
        config = {
            "device_config": {"device": "cpu"}, "model_config": {"logprobs_mode": "raw_logprobs"},
            "scheduler_config": {"max_num_seqs": self.slots}, "kv_transfer_config": None,
        }  # fmt: skip
        return web.json_response({"vllm_config": config})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._may_fail("metrics")
        used = sum(-(-len(call.context) // BLOCK) for call in self.running)
        return web.Response(
            text=f"""# HELP vllm:num_requests_running Running.
vllm:num_requests_running{{engine="0",model_name="gyre"}} {len(self.running)}.0
vllm:num_requests_waiting{{engine="0",model_name="gyre"}} {len(self.waiting)}.0
vllm:kv_cache_usage_perc{{engine="0",model_name="gyre"}} {used / 1000}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {self.totals["local_compute"]}.0
vllm:prompt_tokens_by_source_total{{engine="0",source="local_cache_hit"}} {self.totals["local_cache_hit"]}.0
vllm:generation_tokens_total{{engine="0",model_name="gyre"}} {self.totals["generation"]}.0
vllm:request_prefill_time_seconds_sum{{engine="0"}} {self.totals["local_compute"] / 1000}
vllm:request_prefill_time_seconds_count{{engine="0"}} {self.totals["prefills"]}.0
vllm:request_prefill_kv_computed_tokens_sum{{engine="0"}} {self.totals["local_compute"]}.0
vllm:cache_config_info{{block_size="{BLOCK}",engine="0",num_gpu_blocks="1000"}} 1.0
"""
        )


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, version in enumerate(versions):
        if not found or found[-1]["version"] != version:
            found.append({"version": version, "start": index, "end": index})
        found[-1]["end"] = index + 1
    return found


async def _serve(port: int, number: int, model: str, faults: Iterable[str]) -> None:
    server = FakeVLLM(tick_s=0.02)  # so that a call of it outlasts a pause of the process that asks
    server.weights, server.model, server.faults = number, model, set(faults)
    print("serving", await server.start(port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":  # as `vllm serve MODEL ... --port N` is called
    words = sys.argv[1:]
    weights = struct.unpack("<q", (Path(words[0]) / "model.safetensors").read_bytes()[-8:])[0]
    if "--die" in words:
        sys.exit("ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB")
    port, model = (words[words.index(flag) + 1] for flag in ("--port", "--served-model-name"))
    asyncio.run(_serve(int(port), weights, model, [w for w in words if w.endswith("-fails")]))
