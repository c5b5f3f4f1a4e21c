"""The one way from an agent program to its model: an HTTP server that forwards what limits let through.

Invariant: nothing but the execution's endpoint can be reached through it, with the execution's key, whatever key the
program sends; a call beyond a limit is refused, not forwarded, and so is one that the gate cannot read. Requests and
answers are passed on as they are, streamed or not, but for what holds them to the limits. Not here: the program, what
counts.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable

import aiohttp
from aiohttp import web
from gyre_core import HarnessEvents, Limits, ModelEndpoint

from gyre_harnesses.command.asking import ASKING, AnswerReader, UnreadableError, read_request
from gyre_harnesses.command.tally import Call, Desk, fault

_HOP = {"host", "connection", "content-length", "transfer-encoding", "keep-alive", "te", "upgrade", "accept-encoding"}
_KEYS = {"authorization", "x-api-key", "api-key"}
_ENCODING = {"content-encoding"}
"""Bodies are taken out of their encoding when they are read."""
_LARGEST = 1 << 28
_KEPT_OF_ERROR = 1 << 16
_COUNTING = "/v1/messages/count_tokens"
_PLAIN = re.compile(r"/v1(?:/(?!\.)[\w.:@~+-]+)+", re.ASCII)
"""Paths that mean the same to whoever reads them next: none with `..`, empty parts or characters written as `%63`."""


class _GoneError(Exception):
    """The program does not read on."""


class Gate:
    """An HTTP server on a given socket, with a desk where calls are let through and counted."""

    def __init__(
        self, http: aiohttp.ClientSession, endpoint: ModelEndpoint, limits: Limits, events: HarnessEvents
    ) -> None:
        self._http, self._endpoint = http, endpoint
        self._runner: web.AppRunner | None = None
        self._desk = Desk(limits, events)
        self.tally, self.over = self._desk.tally, self._desk.over

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
        path, method = "/" + request.match_info["path"], request.method
        asks = method == "POST" and path.removeprefix("/v1") in ASKING
        looks = method in ("GET", "HEAD") or (method == "POST" and path == _COUNTING)
        if not _PLAIN.fullmatch(path) or not (asks or looks):
            return self._turn_down(404, f"no {method} {path} here; the model is under /v1")
        path, body = path.removeprefix("/v1"), await request.read()
        if not asks:
            return await self._forward(request, path, body, None)
        try:
            asked = read_request(path, body)
        except UnreadableError as error:
            return self._turn_down(400, str(error))
        call = await self._desk.begin(asked, request.headers.get(self._endpoint.session_header, "main"))
        if isinstance(call, str):
            return web.json_response({"error": {"message": f"limit of {call}", "type": "limit"}}, status=403)
        try:
            return await self._forward(request, path, asked.bounded(call.most), call)
        finally:
            call.left()

    def _turn_down(self, status: int, message: str) -> web.Response:
        self.tally.turned_down = f"HTTP {status}: {message}"
        return _refusal(status, message)

    async def _forward(self, request: web.Request, path: str, body: bytes, call: Call | None) -> web.StreamResponse:
        """Pass one request on and its answer back; `call` when it asks the model for one."""
        dropped = _HOP | _KEYS | _ENCODING
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in dropped]
        headers += [("authorization", f"Bearer {self._endpoint.api_key}"), ("x-api-key", self._endpoint.api_key)]
        url = self._endpoint.base_url.rstrip("/") + path + (f"?{request.query_string}" if request.query_string else "")
        response: web.StreamResponse | None = None
        try:
            async with self._http.request(request.method, url, data=body or None, headers=headers) as answer:
                kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP | _ENCODING}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await _to_program(response.prepare(request))
                if call is not None and answer.status == 200:
                    await _answer(answer, response, call)
                else:
                    await self._other(request, answer, response, call)
                await _to_program(response.write_eof())
                return response
        except _GoneError:
            return _hung_up(request, response)
        except (aiohttp.ClientError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            if call is not None:
                call.failed(why)
            else:
                self.tally.fault = why
            if response is None:
                return _refusal(502, "the model cannot be reached")
            return _hung_up(request, response)

    async def _other(
        self, request: web.Request, answer: aiohttp.ClientResponse, response: web.StreamResponse, call: Call | None
    ) -> None:
        """Pass on what is no answer of the model."""
        begin = bytearray()
        async for chunk in answer.content.iter_any():
            begin += chunk[: _KEPT_OF_ERROR - len(begin)]
            await _to_program(response.write(chunk))
        if call is not None:
            call.refused(answer.status, bytes(begin))
        elif request.method == "POST":
            self.tally.fault = fault(answer.status, bytes(begin)) or self.tally.fault


async def _answer(answer: aiohttp.ClientResponse, response: web.StreamResponse, call: Call) -> None:
    """Pass on an answer. It counts as answered before the program has all of it: some hang up at a stream's last word,
    others ask again at once."""
    reader = AnswerReader(call.asked, stream=answer.content_type == "text/event-stream")
    async for chunk in answer.content.iter_any():
        out = reader.take(chunk)
        if reader.complete:
            call.answered(reader)
        if out:
            await _to_program(response.write(out))
    rest = reader.end()
    call.answered(reader)
    if rest:
        await _to_program(response.write(rest))


async def _to_program(writing: Awaitable[object]) -> None:
    try:
        await writing
    except (aiohttp.ClientError, OSError) as error:
        raise _GoneError from error


def _hung_up(request: web.Request, response: web.StreamResponse | None) -> web.StreamResponse:
    """End a connection in the middle of an answer, so that nobody takes it for a whole one."""
    if request.transport is not None:
        request.transport.close()
    return response or web.Response(status=502)


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)
