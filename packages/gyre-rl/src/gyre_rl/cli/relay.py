"""What passes between an agent and its model, shown while it passes.

Invariant: every byte goes on as it came, in both directions and as soon as it is there; what cannot be read is not
shown and stops nothing. Not here: recording it (the proxy of a run does that).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web
from gyre_core.agents import ModelEndpoint

Tell = Callable[[str, str], None]
"""Takes a session and a line of what it said or got."""
LONGEST = 2000
"""Characters of one thing said that are shown."""
_KEPT = 1 << 24
"""Bytes of one answer that are read."""
_HOPS = {"host", "content-length", "transfer-encoding", "connection", "keep-alive", "content-encoding"}


class Relay:
    """`async with Relay(endpoint, tell) as here`: `here` is the end point to give to the agent."""

    def __init__(self, endpoint: ModelEndpoint, tell: Tell) -> None:
        self._endpoint, self._tell = endpoint, tell
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/v1/{rest:.*}", self._pass)
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> ModelEndpoint:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30))
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        return replace(self._endpoint, base_url=f"http://{host}:{port}/v1")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()
        await self._runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        session, asked = request.headers.get(self._endpoint.session_header, "main"), await request.read()
        for line in received(_json(asked)):
            self._tell(session, line)
        url = self._endpoint.base_url.rstrip("/") + request.path_qs.removeprefix("/v1")
        try:
            upstream = await self._http.request(request.method, url, headers=_on(request.headers), data=asked)
        except aiohttp.ClientError as error:
            self._tell(session, f"the model is not there: {error}")
            if request.transport is not None:
                request.transport.abort()  # as it would have been without us
            raise
        async with upstream:
            answer = web.StreamResponse(status=upstream.status, headers=_on(upstream.headers))
            await answer.prepare(request)
            kept = bytearray()
            async for piece in upstream.content.iter_any():
                kept += piece[: max(0, _KEPT - len(kept))]
                await answer.write(piece)
            await answer.write_eof()
        if upstream.status >= 400:
            self._tell(session, f"the model answers HTTP {upstream.status}: {_cut(kept.decode('utf-8', 'replace'))}")
        for line in said(bytes(kept)):
            self._tell(session, line)
        return answer


def _on(headers: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in headers.items() if key.lower() not in _HOPS}


def received(body: Any) -> Iterator[str]:
    """What a request brings that is new: all after the model's last own message, system messages aside."""
    messages = _list(_get(body, "messages")) or _list(_get(body, "input"))
    own = [n for n, each in enumerate(messages) if _get(each, "role") == "assistant" or _get(each, "type") in _CALLS]
    for each in messages[max(own, default=-1) + 1 :]:
        if _get(each, "role") not in ("system", "developer") and (text := _text(each)):
            yield f"gets: {_cut(text)}"


_CALLS = ("function_call", "reasoning")


def said(answer: bytes) -> Iterator[str]:
    """What the model said and called, in an answer of any dialect, streamed or not."""
    text = answer.decode("utf-8", "replace")
    events = [_json(line[5:].strip()) for line in text.splitlines() if line.startswith("data:")]
    words = _Said()
    for each in events or [_json(answer)]:
        words.add(each)
    if words.text.strip():
        yield f"says: {_cut(words.text.strip())}"
    for name, arguments in words.calls.values():
        yield f"calls {name} {_cut(arguments)}"


class _Said:
    """Puts together what whole answers and pieces of streamed ones say."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: dict[object, tuple[str, str]] = {}

    def add(self, piece: Any) -> None:
        """One JSON value of an answer."""
        for choice in _list(_get(piece, "choices")):
            message = _get(choice, "message") or _get(choice, "delta")
            self.text += _str(_get(message, "reasoning_content")) + _str(_get(message, "content"))
            self.text += _str(_get(choice, "text"))
            for number, call in enumerate(_list(_get(message, "tool_calls"))):
                function = _get(call, "function")
                self._call(_get(call, "index") or number, _get(function, "name"), _get(function, "arguments"))
        kind = _get(piece, "type")
        blocks = _list(_get(piece, "content")) if kind == "message" else _list(_get(piece, "output"))
        if kind == "response.completed":
            blocks = _list(_get(_get(piece, "response"), "output"))
        for number, block in enumerate(blocks):
            self._block(number, block)
        if kind == "content_block_start":
            self._block(_get(piece, "index"), _get(piece, "content_block"))
        if kind == "content_block_delta":
            delta = _get(piece, "delta")
            self.text += _str(_get(delta, "thinking")) + _str(_get(delta, "text"))
            if _get(delta, "partial_json"):
                self._call(_get(piece, "index"), None, _get(delta, "partial_json"))

    def _block(self, number: object, block: Any) -> None:
        if _get(block, "type") in ("tool_use", "function_call"):
            given = _get(block, "arguments") or json.dumps(_get(block, "input") or {}).removesuffix("{}")
            self._call(number, _get(block, "name"), given)
        else:
            self.text += _str(_get(block, "thinking")) + _text(block)

    def _call(self, number: object, name: object, more: object) -> None:
        known, arguments = self.calls.get(number, ("", ""))
        self.calls[number] = (known or _str(name), arguments + _str(more))


def _text(item: Any) -> str:
    """The text of a message, a block or a tool's result."""
    for key in ("text", "content", "output"):
        found = _get(item, key)
        if isinstance(found, list):
            return "\n".join(text for text in map(_text, found) if text)
        if isinstance(found, str) and found:
            return found
    return ""


def _json(data: bytes | str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _str(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} more characters)"
