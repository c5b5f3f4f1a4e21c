"""The one way from an agent program to its model: forwards requests, counts what limits count, notes what went wrong.

Invariant: nothing but the execution's endpoint can be reached through it, with the execution's key, whatever key the
program sends; a call beyond a limit is refused, not forwarded. Bodies are passed on as they are, streamed or not, but
for what asks for more tokens than a call may have. Not here: the program.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from gyre_core import HarnessEvents, Limits, ModelEndpoint

_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "te", "upgrade", "accept-encoding"}
_KEYS = {"authorization", "x-api-key", "api-key"}
_LOOKED_AT = 1 << 20
"""Bytes at the end of an answer in which its usage is looked for."""
_LARGEST = 1 << 28
_ASKING = {
    "/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/completions": ("max_tokens",),
    "/messages": ("max_tokens",),
    "/responses": ("max_output_tokens",),
}
"""Where tokens are asked for, and by what fields; the first is set where there is none."""
_PLAIN = re.compile(r"/v1(?:/(?!\.)[\w.:@~+-]+)+", re.ASCII)
"""Paths that mean the same to whoever reads them next: none with `..`, empty parts or characters written as `%63`."""
_USAGE = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*(\d+)')
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens)"\s*:\s*(\d+)')
_CONTEXT = re.compile(r"context.?(?:length|window)|maximum context|prompt is too long", re.IGNORECASE)


@dataclass(slots=True)
class Tally:
    """What went through the gate."""

    calls: int = 0
    answered: int = 0
    sampled: int = 0
    longest_context: int = 0
    refused: str | None = None
    """The limit that a call was refused for: `turns`, `sampled_tokens` or `context`."""
    fault: str | None = None
    """What is wrong with the endpoint since its last good answer."""


class Gate:
    """An HTTP server on a given socket. `async with gate:` serves; `over` is set once a limit refused a call."""

    def __init__(
        self, http: aiohttp.ClientSession, endpoint: ModelEndpoint, limits: Limits, events: HarnessEvents
    ) -> None:
        self._http, self._endpoint, self._limits, self._events = http, endpoint, limits, events
        self._runner: web.AppRunner | None = None
        self._idle_since: dict[str, float] = {}
        self.tally = Tally()
        self.over = asyncio.Event()

    async def serve(self, listener: socket.socket) -> str:
        """Start serving; the base URL to give to the program, ending in /v1."""
        app = web.Application(client_max_size=_LARGEST)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"

    async def close(self) -> None:
        """Stop serving."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info["path"]
        if not _PLAIN.fullmatch(path):
            return web.json_response({"error": {"message": f"no {path} here; the model is under /v1"}}, status=404)
        limit = self._limit() if request.method == "POST" else None
        if limit is not None:
            self.tally.refused = limit
            self.over.set()
            return web.json_response({"error": {"message": f"limit of {limit}", "type": "limit"}}, status=403)
        session = request.headers.get(self._endpoint.session_header, "main")
        if request.method == "POST":
            self._busy(session)
        try:
            return await self._forward(request, path.removeprefix("/v1"), session)
        except (aiohttp.ClientError, OSError) as error:
            self.tally.fault = f"{type(error).__name__}: {error}"
            return web.json_response({"error": {"message": "the model cannot be reached"}}, status=502)

    def _limit(self) -> str | None:
        limits, tally = self._limits, self.tally
        if limits.max_turns is not None and tally.calls >= limits.max_turns:
            return "turns"
        if limits.max_sampled_tokens is not None and tally.sampled >= limits.max_sampled_tokens:
            return "sampled_tokens"
        if limits.max_context_tokens is not None and tally.longest_context >= limits.max_context_tokens:
            return "context"
        return None

    def _busy(self, session: str) -> None:
        self.tally.calls += 1
        since = self._idle_since.pop(session, None)
        if since is not None:
            self._events.tool_ended(session, "program", time.monotonic() - since)

    async def _forward(self, request: web.Request, path: str, session: str) -> web.StreamResponse:
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in _HOP | _KEYS]
        headers += [("authorization", f"Bearer {self._endpoint.api_key}"), ("x-api-key", self._endpoint.api_key)]
        url = self._endpoint.base_url.rstrip("/") + path + (f"?{request.query_string}" if request.query_string else "")
        body = bounded(path, await request.read(), self._limits.max_call_tokens)
        async with self._http.request(request.method, url, data=body or None, headers=headers) as answer:
            kept = {
                key: value for key, value in answer.headers.items() if key.lower() not in _HOP | {"content-encoding"}
            }
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            tail = bytearray()
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
                tail += chunk
                del tail[:-_LOOKED_AT]
            if request.method == "POST":
                self._note(answer.status, bytes(tail), session)
            await response.write_eof()
            return response

    def _note(self, status: int, tail: bytes, session: str) -> None:
        tally = self.tally
        if status == 200:
            tally.answered += 1
            tally.fault = None
            sampled, prompt = _last(_USAGE, tail), _last(_PROMPT, tail)
            tally.sampled += sampled
            tally.longest_context = max(tally.longest_context, prompt + sampled)
            self._events.turn(session, tally.answered)
            self._events.tool_started(session, "program")
            self._idle_since[session] = time.monotonic()
        elif status in (400, 413, 422) and _CONTEXT.search(tail.decode("utf-8", "replace")):
            tally.refused = "context"
            self.over.set()
        else:
            tally.fault = f"HTTP {status}: {_message(tail)}"


def bounded(path: str, body: bytes, most: int) -> bytes:
    """`body` asking for at most `most` tokens, as a reader of JSON takes it, in which the last of equal keys counts.

    The very same bytes when nothing had to change; a body that is no JSON object is for the endpoint to refuse.
    """
    names = _ASKING.get(path)
    if names is None:
        return body
    try:
        whole = json.loads(body)
    except ValueError:
        return body
    if not isinstance(whole, dict):
        return body
    asked = {name: whole.get(name) for name in names if name in whole} or {names[0]: None}
    allowed = {name: min(own, most) if isinstance(own, int) else most for name, own in asked.items()}
    return body if allowed == asked else json.dumps(whole | allowed).encode()


def _last(pattern: re.Pattern[bytes], text: bytes) -> int:
    """The last number that the pattern finds: streams repeat their usage as it grows."""
    found = 0
    matches: Iterator[re.Match[bytes]] = pattern.finditer(text)
    for match in matches:
        found = int(match[1])
    return found


def _message(tail: bytes) -> str:
    try:
        return str(json.loads(tail)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return tail[:300].decode("utf-8", "replace")
