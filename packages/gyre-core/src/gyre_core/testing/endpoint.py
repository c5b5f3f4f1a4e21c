"""A model endpoint that says what a script tells it: for tests of harnesses, over real HTTP.

Invariant: it answers OpenAI chat completions as the dialect is documented, one scripted answer a request in the order
of arrival for each session, and keeps every request. Standard library only. Not here: a model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_core.agents import ModelEndpoint


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a scripted answer; `arguments` may be a text that is not JSON."""

    name: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Say:
    """A scripted answer."""

    text: str = ""
    calls: Sequence[Call] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 10
    sampled_tokens: int = 5
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """A scripted error: an HTTP status and a body; status 0 drops the connection."""

    status: int
    body: str = '{"error": {"message": "scripted"}}'


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """One request as it came."""

    session: str
    parent: str | None
    headers: Mapping[str, str]
    body: Mapping[str, Any]


Script = Callable[[SeenRequest], "Say | Refuse"]


def in_order(sessions: Mapping[str, Sequence[Say | Refuse]]) -> Script:
    """A script of fixed answers for each session; more requests than answers are refused with 400."""
    left = {name: list(answers) for name, answers in sessions.items()}

    def answer(request: SeenRequest) -> Say | Refuse:
        answers = left.get(request.session)
        return (
            answers.pop(0) if answers else Refuse(400, f'{{"error": {{"message": "no answer for {request.session}"}}}}')
        )

    return answer


@dataclass
class ScriptedEndpoint:
    """Use as `async with ScriptedEndpoint(script) as endpoint: … endpoint.address …`."""

    script: Script
    requests: list[SeenRequest] = field(default_factory=list)
    before: int = 0
    """Requests that were answered elsewhere before; ids go on from there."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def address(self) -> ModelEndpoint:
        """To give to a harness."""
        assert self._server is not None, "enter the endpoint first"
        port = self._server.sockets[0].getsockname()[1]
        return ModelEndpoint(f"http://127.0.0.1:{port}/v1", "key-of-the-execution", "scripted")

    async def __aenter__(self) -> ScriptedEndpoint:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {
            key.strip().lower(): text.strip() for key, _, text in (line.partition(":") for line in head[1:] if line)
        }
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        if "/chat/completions" not in head[0]:
            return await self._reply(writer, 404, f"no {head[0]}")
        address = self.address
        seen = SeenRequest(
            headers.get(address.session_header, "main"), headers.get(address.parent_header), headers, json.loads(data)
        )
        self.requests.append(seen)
        answer = self.script(seen)
        if isinstance(answer, Refuse):
            return answer.status != 0 and await self._reply(writer, answer.status, answer.body)
        await asyncio.sleep(answer.delay_s)
        return await self._reply(writer, 200, json.dumps(self._completion(answer)))

    async def _reply(self, writer: asyncio.StreamWriter, status: int, text: str) -> bool:
        data = text.encode()
        head = f"HTTP/1.1 {status} scripted\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return True

    def _completion(self, answer: Say) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
        number = self.before + len(self.requests)
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": f"call-{number}-{index}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments),
                    },
                }
                for index, call in enumerate(answer.calls)
            ]
        reason = answer.finish_reason or ("tool_calls" if answer.calls else "stop")
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.sampled_tokens,
                "total_tokens": answer.prompt_tokens + answer.sampled_tokens,
            },
        }
