"""A stand-in for SGLang 0.5.23's HTTP server: the same routes, fields and traps, a toy for a model, faults on request.

    python fake_sglang.py --model-path FOLDER --port N [flags of the real server] [--fault NAME]

Written from what the real server was seen to do: versions of a call's tokens are told in its last event alone; a call
that comes during a pause gets no further than the door before its end; an abort is by prefix of the request id, is
forgotten when it comes too early, is passed on once, also when the call is at the door still, and takes effect only
when the server goes on; a call that had to go back into the queue repeats a token when it is ended there; an id outside
the vocabulary, or resuming a tag that was not released, ends the server.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import json
import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from gyre_weights import open_version

PAGE = 16


@dataclass
class Request:
    rid: str
    ids: list[int]
    key: str
    sampling: dict[str, Any]
    routed: bool
    routed_from: int
    out: list[int] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    cached: int = 0
    aborted: bool = False


class FakeServer:
    """State of one server. `fault` names what goes wrong, see `FAULTS`."""

    def __init__(self, flags: argparse.Namespace, fault: str = "", step_s: float = 0.002) -> None:
        self.flags, self.fault, self.step_s = flags, fault, step_s
        self.vocab = json.loads((Path(flags.model_path) / "config.json").read_text())["vocab_size"]
        self.location, self.version = flags.model_path, flags.weight_version
        self.running: dict[str, Request] = {}
        self.known: dict[str, bool] = {}
        """Calls, at the door too, and whether an abort of them was passed on."""
        self.queued = False
        """The pool is full: calls that run are put back into the queue."""
        self.loads_s = 0.01
        """How long it reads a version from disk, one after the other; it ends when the folder goes meanwhile."""
        self.loading = asyncio.Lock()
        self.reading_s = 0.0
        """How long it reads a prompt before it knows the call."""
        self.cache: set[tuple[str, tuple[int, ...]]] = set()
        self.paused = False
        self.dead = asyncio.Event()
        self.released: set[str] = set()
        self.asked: list[tuple[str, Any]] = []
        self.session = False
        self.loaded: list[list[str]] = []
        self.lost_loads = 0
        """How many calls to end because pages that were found for them could not be read."""
        self.counts: dict[str, int] = {}
        """Requests by path."""

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**30)
        gets = {"/health": self.health, "/server_info": self.server_info, "/model_info": self.model_info,
                "/v1/loads": self.loads}  # fmt: skip
        posts = {
            "/generate": self.generate, "/abort_request": self.abort, "/pause_generation": self.pause,
            "/continue_generation": self.proceed, "/flush_cache": self.flush,
            "/update_weights_from_disk": self.update, "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.resume, "/begin_weight_update": self.begin,
            "/update_weights_from_tensor": self.from_tensor, "/end_weight_update": self.end,
            "/update_weight_version": self.rename,
        }  # fmt: skip
        for path, handler in gets.items():
            app.router.add_get(path, self._counted(path, handler))
        for path, handler in posts.items():
            app.router.add_post(path, self._noted(handler))
        return app

    def _noted(self, handler: Any) -> Any:
        async def noted(request: web.Request) -> web.StreamResponse:
            body = await request.json() if request.can_read_body else None
            self.asked.append((request.path, body))
            if self.fault == "die" and request.path == "/generate" and len(self.running) >= 1:
                self.die()
            return await self._counted(request.path, handler)(request, body)  # type: ignore[no-any-return]

        return noted

    def _counted(self, path: str, handler: Any) -> Any:
        async def counted(*args: Any) -> web.StreamResponse:
            """Faults of the n-th request to a path, or of all: "refuse:/path:2", "break:/path:*"."""
            self.counts[path] = self.counts.get(path, 0) + 1
            how = next((how for how in ("refuse", "die", "break", "late", "slow")
                        if self.fault in (f"{how}:{path}:{self.counts[path]}", f"{how}:{path}:*")), "")  # fmt: skip
            if how == "die":
                self.die()
            answer: web.StreamResponse | None = None if how == "refuse" else await handler(*args)
            if how in ("late", "slow"):  # it is done and not said
                await asyncio.sleep(3600 if how == "late" else 0.5)
            return web.Response(status=500, text="boom") if answer is None or how == "break" else answer

        return counted

    def die(self) -> None:
        """What any exception in the scheduler does to the real one."""
        print("Scheduler hit an exception: Traceback ... IndexError: index out of range in self", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def server_info(self, _: web.Request) -> web.Response:
        slots = self.flags.max_running_requests or 4096
        return web.json_response({
            "version": "0.5.24" if self.fault == "newer" else "0.5.23", "page_size": PAGE, "max_req_input_len": 1018,
            "incremental_streaming_output": self.flags.incremental_streaming_output, "stream_interval": 1,
            "disable_overlap_schedule": self.flags.disable_overlap_schedule,
            "dp_size": self.flags.dp_size, "tp_size": 1,
            "enable_deterministic_inference": False, "enable_memory_saver": self.flags.enable_memory_saver,
            "enable_return_routed_experts": self.flags.enable_return_routed_experts,
            "custom_weight_loader": self.flags.custom_weight_loader, "random_seed": self.flags.random_seed,
            "internal_states": [{"effective_max_running_requests_per_dp": slots, "device": "cpu",
                                 "memory_usage": {"token_capacity": 8192}}] * self.flags.dp_size,
        })  # fmt: skip

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.location, "weight_version": self.version})

    async def loads(self, _: web.Request) -> web.Response:
        used = sum(math.ceil(len(r.ids + r.out) / PAGE) * PAGE for r in self.running.values())
        return web.json_response({"loads": [{
            "num_running_reqs": len(self.running), "num_waiting_reqs": 0, "num_used_tokens": used,
            "gen_throughput": 100.0, "total_prefill_uncached_tokens": 50, "total_prefill_busy_us": 25000,
        }]})  # fmt: skip

    # Sampling

    async def generate(self, http: web.Request, body: Any) -> web.StreamResponse:
        if self.fault == "500":
            return web.json_response({"error": {"message": "CUDA error: an illegal memory access"}}, status=500)
        request = Request(body["rid"], body["input_ids"], body["extra_key"], body["sampling_params"],
                          body.get("return_routed_experts", False),
                          body.get("routed_experts_start_len", 0))  # fmt: skip
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        wanted = len(request.ids) + request.sampling["max_new_tokens"]
        if not request.ids or wanted > 1024:
            await self._send(response, {"error": {"message": f"{wanted} tokens do not fit", "code": 400}})
            await response.write(b"data: [DONE]\n\n")
            return response
        if any(not 0 <= token < self.vocab for token in request.ids):
            self.die()
        await asyncio.sleep(self.reading_s)
        self.known[request.rid] = False
        try:
            while self.paused:
                await asyncio.sleep(0.001)
            self.running[request.rid] = request
            await self._sample(request, response)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running.pop(request.rid, None)
            self.known.pop(request.rid)
        return response

    async def _sample(self, request: Request, response: web.StreamResponse) -> None:
        known = [n for key, ids in self.cache if key == request.key
                 for n in [_common(ids, tuple(request.ids[:-1]))]]  # fmt: skip
        request.cached = max(known, default=0) // PAGE * PAGE
        finish: dict[str, Any] | None = None
        while finish is None:
            await asyncio.sleep(self.step_s)
            while self.paused:
                await asyncio.sleep(0.001)
            if request.aborted and self.queued:
                await self._event_of_queued(request, response)
                break
            if request.aborted:
                finish = {"type": "abort", "message": "Abort in scheduler"}
                await self._event(request, [], finish, response)
                break
            if self.lost_loads:
                self.lost_loads -= 1
                finish = {"type": "abort", "message": "External KV cache load failed", "status_code": 503}
                await self._event(request, [], finish, response)
                break
            at = len(request.out)
            if self.fault == "truncate" and at == 3:
                assert response._payload_writer is not None
                http_transport = response._req.transport  # type: ignore[union-attr]
                http_transport.close()
                return
            if self.fault == "hang" and at == 3:
                await asyncio.sleep(3600)
            if self.fault == "oom" and at == 3:
                finish = {"type": "abort", "message": "Out of memory. Please retry", "status_code": 503}
                await self._event(request, [], finish, response)
                break
            token = self._next(request)
            request.out.append(token)
            finish = self._finish(request, token)
            await self._event(request, [token], finish, response)
        self.cache.add((request.key, tuple(request.ids + request.out[:-1])))

    def _next(self, request: Request) -> int:
        if self.fault == "vocab" and len(request.out) == 2:
            return self.vocab + 1
        text = f"{self.version}|{request.ids + request.out}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % self.vocab

    def _finish(self, request: Request, token: int) -> dict[str, Any] | None:
        how = request.sampling
        if self.fault == "nan-finish" and len(request.out) == 3:
            return {"type": "stop", "matched": "NaN happened"}
        if not how["ignore_eos"] and token in how["stop_token_ids"]:
            return {"type": "stop", "matched": token}
        if not how["ignore_eos"] and self.flags.eos is not None and token % self.flags.eos == 0:
            return {"type": "stop", "matched": token}
        if len(request.out) >= how["max_new_tokens"]:
            return {"type": "length", "length": len(request.out)}
        return None

    async def _event(self, request: Request, new: list[int], finish: Any, response: web.StreamResponse) -> None:
        offset = len(request.out) - len(new) if self.flags.incremental_streaming_output else 0
        pairs = [[logprob_of(self.version, t), t, None] for t in request.out[offset:]]
        if self.fault == "nan" and len(request.out) == 3:
            pairs[-1][0] = None
        meta: dict[str, Any] = {
            "id": request.rid, "finish_reason": finish, "prompt_tokens": len(request.ids),
            "weight_version": self.version, "completion_tokens": len(request.out), "cached_tokens": request.cached,
            "output_token_logprobs": pairs, "output_token_logprobs_length": len(request.out),
        }  # fmt: skip
        if finish is not None and request.routed and self.fault != "no-experts":
            end = len(request.ids) + len(request.out) - 1
            rows = np.repeat(np.arange(request.routed_from, end, dtype="<i4"), 3 * 2)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        if finish is not None:
            meta["weight_versions"] = self._spans(request)
        await self._send(response, {"output_ids": request.out[offset:], "meta_info": meta})

    async def _event_of_queued(self, request: Request, response: web.StreamResponse) -> None:
        """The last token once more, beside the logprobs of all."""
        pairs = [[logprob_of(self.version, t), t, None] for t in request.out]
        meta = {
            "id": request.rid, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": self.version, "weight_versions": self._spans(request),
            "completion_tokens": len(request.out), "output_token_logprobs": pairs,
            "output_token_logprobs_length": len(pairs),
        }  # fmt: skip
        await self._send(response, {"text": "", "output_ids": request.out[-1:], "meta_info": meta})

    def _spans(self, request: Request) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*request.events, (self.version, len(request.out))]:
            start = spans[-1]["end"] if spans else 0
            if end > start or not spans:
                spans.append({"version": version, "start": start, "end": end})
        if self.fault == "spans" and len(spans) > 1:
            spans[0]["end"] += 1
            spans[1]["start"] += 1
        return spans

    @staticmethod
    async def _send(response: web.StreamResponse, event: Any) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    # Control

    async def abort(self, _: web.Request, body: Any) -> web.Response:
        if self.known.get(body["rid"]) is False:
            self.known[body["rid"]] = True
            for rid, request in self.running.items():
                request.aborted |= rid.startswith(body["rid"])
        return web.Response()

    async def pause(self, _: web.Request, body: Any) -> web.Response:
        assert body["mode"] == "in_place"
        self.paused = True
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def proceed(self, _: web.Request, body: Any) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def flush(self, _: web.Request, body: Any) -> web.Response:
        if self.running:
            return web.Response(status=400, text="Flush cache failed.")
        self.cache.clear()
        return web.Response(text="Cache flushed.")

    async def update(self, _: web.Request, body: Any) -> web.Response:
        while not self.paused and self.running:  # the real one waits for its lock
            await asyncio.sleep(0.001)
        if not Path(body["model_path"]).is_dir() or self.fault in ("update", f"update-{body['weight_version']}"):
            return web.json_response({"success": False, "message": "Failed to get weights iterator"}, status=400)
        async with self.loading:
            await asyncio.sleep(self.loads_s)
            if not Path(body["model_path"]).is_dir():
                self.die()
            self.loaded.append(sorted(open_version(body["model_path"])))
            self._enter(body["weight_version"])
            self.location = body["model_path"]
        if body.get("flush_cache", True):
            self.cache.clear()
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})

    def _enter(self, version: str) -> None:
        for request in self.running.values():
            if request.out:
                request.events.append((self.version, len(request.out)))
        self.version = version

    async def begin(self, _: web.Request, body: Any) -> web.Response:
        if self.session:
            return web.json_response({"success": False, "message": "already open"}, status=400)
        self.session = True
        return web.json_response({"success": True})

    async def from_tensor(self, _: web.Request, body: Any) -> web.Response:
        """Calls the custom loader, and reports success whatever it did. Fails an assertion when there are replicas."""
        if self.flags.dp_size > 1:
            return web.Response(status=500, text="AssertionError: data-parallel replicas are not supported")
        if not self.session or body["load_format"] not in self.flags.custom_weight_loader:
            return web.json_response({"success": False, "message": "must run between begin and end"}, status=400)
        folder = Path(os.environ["GYRE_SGLANG_ORDERS"])
        order = json.loads((folder / "order.json").read_text())
        opened = open_version(order["location"])
        answer: dict[str, Any] = {"id": order["id"], "version": opened.version}
        if self.fault in [f"{how}-{order['id'].partition('@')[0]}" for how in ("torn", "unmoved")]:
            answer = {"id": order["id"], "error": "RuntimeError: out of memory"}
            answer |= {"moved": False} if self.fault.startswith("unmoved") else {}
        else:
            self.loaded.append(sorted(opened if order["all"] else opened.changed))
        (folder / f"report-{os.getpid()}.json").write_text(json.dumps(answer))
        return web.json_response({"success": True, "message": "Success"})

    async def end(self, _: web.Request, body: Any) -> web.Response:
        self.session = False
        return web.json_response({"success": True})

    async def rename(self, _: web.Request, body: Any) -> web.Response:
        assert body["abort_all_requests"] is False
        self._enter(body["new_version"])
        return web.json_response({"success": True})

    async def release(self, _: web.Request, body: Any) -> web.Response:
        if self.running:
            return web.Response(status=400, text="not idle")
        self.released |= set(body["tags"])
        return web.json_response(None)

    async def resume(self, _: web.Request, body: Any) -> web.Response:
        if not set(body["tags"]) <= self.released:
            self.die()
        self.released -= set(body["tags"])
        return web.json_response(None)


def logprob_of(version: str, token: int) -> float:
    """The toy model's logprob: tells version and token."""
    return -(token + 1) / 1000 - int(version)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser()
    flags.add_argument("--model-path", required=True)
    flags.add_argument("--port", type=int, default=0)
    flags.add_argument("--weight-version", default="default")
    flags.add_argument("--random-seed", type=int, default=0)
    flags.add_argument("--max-running-requests", type=int, default=0)
    flags.add_argument("--dp-size", type=int, default=1)
    flags.add_argument("--fault", default="")
    flags.add_argument("--eos", type=int)
    flags.add_argument("--custom-weight-loader", nargs="*", default=[])
    for name in ("incremental-streaming-output", "disable-overlap-schedule", "enable-memory-saver",
                 "enable-return-routed-experts"):  # fmt: skip
        flags.add_argument(f"--{name}", action="store_true")
    return flags


def main() -> None:
    words = sys.argv[1:]
    if words == ["--spare"]:
        words = json.loads(sys.stdin.readline())
    flags, _ = parser().parse_known_args(words)
    if flags.fault == "start":
        raise SystemExit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.00 GiB.")
    taken = Path(flags.fault.removeprefix("port:"))
    if flags.fault.startswith("port:") and not taken.exists():  # as SGLang does: it says so, warms up in vain and stays
        taken.touch()
        print(f"ERROR: error while attempting to bind on address ('127.0.0.1', {flags.port}): address already in use")
        print(*["  File ..., line 1"] * 80, "The server is fired up and ready to roll!", sep="\n", flush=True)
        time.sleep(1000)
    print("The server is fired up and ready to roll!", flush=True)
    # Slow enough that a call of it outlasts a pause of the process that asks.
    web.run_app(FakeServer(flags, flags.fault, step_s=0.01).app(), host="127.0.0.1", port=flags.port, print=None)


if __name__ == "__main__":
    main()
