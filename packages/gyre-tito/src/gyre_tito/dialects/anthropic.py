"""Anthropic messages: `POST /v1/messages` and `/v1/messages/count_tokens`, streamed or not.

Translates both ways and keeps nothing. A last assistant message is a beginning that the model continues (prefill); the
answer then holds only what comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from gyre_tito.dialects import common
from gyre_tito.messages import Message, ToolCall
from gyre_tito.requests import (
    Answer,
    ApiError,
    ChatRequest,
    Choice,
    Delta,
    SamplingRequest,
    Started,
    Transcript,
    invalid,
)


class _Block(msgspec.Struct):
    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None


class AnthropicMessage(msgspec.Struct):
    """One message of a request."""

    role: str
    content: str | list[_Block]


class AnthropicTool(msgspec.Struct):
    """A tool specification."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class AnthropicBody(msgspec.Struct):
    """A request body; fields that are not named here are ignored."""

    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    model: str | None = None
    max_tokens: int | None = None
    system: str | list[common.Part] | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_choice: _Choice | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def to_messages(item: AnthropicMessage, place: int) -> Iterable[Message]:
    """One Anthropic message as one or several of the proxy's (tool results become messages of their own)."""
    if item.role not in ("user", "assistant"):
        raise invalid(f"messages.{place}.role is {item.role!r}; use user or assistant, and `system` for instructions")
    if isinstance(item.content, str):
        yield Message(item.role, item.content)  # type: ignore[arg-type]
        return
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(item.content):
        where = f"messages.{place}.content.{number}"
        if block.type == "text" and block.text is not None:
            texts.append(block.text)
        elif block.type == "thinking" and item.role == "assistant":
            thoughts.append(block.thinking or "")
        elif block.type == "redacted_thinking" and item.role == "assistant":
            continue
        elif block.type == "tool_use" and item.role == "assistant" and block.name:
            arguments = msgspec.json.encode(block.input or {}).decode()
            calls.append(ToolCall(block.id or "", block.name, arguments))
        elif block.type == "tool_result" and item.role == "user":
            if not block.tool_use_id:
                raise invalid(f"{where}.tool_use_id is missing")
            yield Message("tool", _result_text(block.content, where), tool_call_id=block.tool_use_id)
        else:
            raise invalid(f"{where}: a {block.type!r} block cannot stand in a message of role {item.role!r} here")
    if item.role == "assistant":
        reasoning = "\n".join(thoughts) if thoughts else None
        yield Message("assistant", "".join(texts), reasoning, tuple(calls))
    elif texts:
        yield Message("user", "".join(texts))


def _result_text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    try:
        parts = msgspec.convert(content, list[common.Part])
    except msgspec.ValidationError as error:
        raise invalid(f"{where}.content: {error}") from error
    return common.text_of(list(parts), f"{where}.content")


decode_messages = common.list_decoder(AnthropicMessage, to_messages, "messages")


def _tools(raw: bytes) -> tuple[dict[str, Any], ...]:
    """Anthropic tools in the form that chat formats render. Error: tools that only Anthropic's servers can run."""
    out = []
    for tool in common.decode(raw or b"[]", list[AnthropicTool] | None, "tools") or []:
        if tool.input_schema is None or tool.type not in (None, "custom"):
            raise invalid(f"tool {tool.name!r} of type {tool.type!r} has no input_schema; only custom tools work here")
        function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
        out.append({"type": "function", "function": function})
    return tuple(out)


def _transcript(read: AnthropicBody, *, prefill: bool) -> Transcript:
    raw = bytes(read.messages)
    if not common.is_list(raw):
        raise invalid("messages: a list is required")
    system = common.text_of(read.system, "system")  # type: ignore[arg-type]
    preface = (Message("system", system),) if system else ()
    raw, begun = _split_prefill(raw) if prefill else (raw, "")
    tools_raw = bytes(read.tools)
    return Transcript("anthropic", raw, decode_messages, preface, _tools(tools_raw), tools_raw, begun)


def _split_prefill(raw: bytes) -> tuple[bytes, str]:
    """The list without a last assistant message, and that message's text."""
    items: list[msgspec.Raw] = common.decode(raw, list[msgspec.Raw], "messages")
    if len(items) < 2:
        return raw, ""
    last = common.decode(items[-1], AnthropicMessage, "the last message")
    if last.role != "assistant":
        return raw, ""
    (begun,) = to_messages(last, len(items) - 1)
    if begun.tool_calls:
        raise invalid("the last message holds tool calls; send their results after it")
    at = raw.rindex(bytes(items[-1]))
    return raw[:at].rstrip(b" \t\r\n,") + b"]", begun.content


def read_count(body: bytes) -> Transcript:
    """Read the body of a token count."""
    return _transcript(common.decode(body, AnthropicBody, "the request body"), prefill=False)


class AnthropicMessages:
    """The dialect."""

    name = "anthropic"

    def request(self, body: bytes, vocabulary: int) -> tuple[ChatRequest, bool]:
        """Read a request body; returns it and whether to stream."""
        read = common.decode(body, AnthropicBody, "the request body")
        if read.max_tokens is None:
            raise invalid("max_tokens: a number is required")
        transcript = _transcript(read, prefill=True)
        sampling = SamplingRequest(
            max_tokens=read.max_tokens,
            temperature=read.temperature,
            top_p=read.top_p,
            top_k=read.top_k,
            stop=common.stop_strings(read.stop_sequences),
        )
        asked = read.tool_choice or _Choice()
        request = ChatRequest(
            transcript,
            common.check_sampling(sampling, vocabulary),
            _tool_choice(asked, transcript),
            not asked.disable_parallel_tool_use,
        )
        return request, bool(read.stream)

    def response(self, request: ChatRequest, answer: Answer, model: str) -> dict[str, Any]:
        """The whole answer."""
        choice = answer.choices[0]
        return {
            "id": f"msg_{answer.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": _blocks(choice, answer.prefill),
            "stop_reason": _stop_reason(choice),
            "stop_sequence": choice.stop_string,
            "usage": _usage(answer),
        }

    def stream(self, request: ChatRequest, model: str) -> MessageStream:
        """A writer for one streamed answer."""
        return MessageStream(model)

    def error(self, error: ApiError) -> dict[str, Any]:
        """An error in Anthropic's shape."""
        return anthropic_error(error)


class MessageStream:
    """Events of one streamed answer. Blocks are opened when their first text comes: thinking, text, tool uses."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._open: str | None = None
        self._index = -1

    def start(self, started: Started) -> bytes:
        """`message_start`."""
        message: dict[str, Any] = {
            "id": f"msg_{started.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": started.prompt_tokens, "output_tokens": 0},
        }
        return common.event({"type": "message_start", "message": message}, "message_start")

    def delta(self, delta: Delta) -> bytes:
        """Thinking and text."""
        out = b""
        if delta.reasoning:
            out += self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._piece({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            out += self._switch("text", {"type": "text", "text": ""})
            out += self._piece({"type": "text_delta", "text": delta.content})
        return out

    def ping(self) -> bytes:
        """`ping`."""
        return common.event({"type": "ping"}, "ping")

    def error(self, error: ApiError) -> bytes:
        """An error event; the stream ends after it."""
        return common.event(anthropic_error(error), "error")

    def end(self, answer: Answer) -> bytes:
        """Tool uses, stop reason, end."""
        choice = answer.choices[0]
        out = b""
        for call in choice.turn.tool_calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
            out += self._switch(f"tool {call.id}", block)
            out += self._piece({"type": "input_json_delta", "partial_json": call.arguments})
        out += self._close()
        delta = {"stop_reason": _stop_reason(choice), "stop_sequence": choice.stop_string}
        out += common.event({"type": "message_delta", "delta": delta, "usage": _usage(answer)}, "message_delta")
        return out + common.event({"type": "message_stop"}, "message_stop")

    def _switch(self, name: str, block: dict[str, Any]) -> bytes:
        if self._open == name:
            return b""
        out = self._close()
        self._open = name
        self._index += 1
        begin = {"type": "content_block_start", "index": self._index, "content_block": block}
        return out + common.event(begin, "content_block_start")

    def _piece(self, delta: dict[str, Any]) -> bytes:
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return common.event(data, "content_block_delta")

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return common.event({"type": "content_block_stop", "index": self._index}, "content_block_stop")


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error as Anthropic's API writes it."""
    kinds = {
        "authentication": "authentication_error",
        "not_found": "not_found_error",
        "too_large": "request_too_large",
        "overloaded": "overloaded_error",
        "engine": "api_error",
    }
    return {
        "type": "error",
        "error": {"type": kinds.get(error.kind, "invalid_request_error"), "message": error.message},
    }


def _tool_choice(choice: _Choice, transcript: Transcript) -> str:
    if choice.type == "tool":
        names = [tool["function"]["name"] for tool in transcript.tools]
        if choice.name not in names:
            raise invalid(f"tool_choice.name is {choice.name!r}, but the tools are {', '.join(names) or 'none'}")
        return f"tool:{choice.name}"
    if choice.type == "any" and not transcript.tools:
        raise invalid("tool_choice is 'any', but there are no tools")
    return {"any": "required"}.get(choice.type, choice.type)


def _blocks(choice: Choice, prefill: str) -> list[dict[str, Any]]:
    turn = choice.turn
    out: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        out.append({"type": "thinking", "thinking": turn.reasoning, "signature": ""})
    content = turn.content.removeprefix(prefill)
    if content or not (turn.tool_calls or out):
        out.append({"type": "text", "text": content})
    out.extend(
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        for call in turn.tool_calls
    )
    return out


def _input(arguments: str) -> Any:
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return {"_raw": arguments}
    return value if isinstance(value, dict) else {"_raw": value}


def _stop_reason(choice: Choice) -> str:
    names = {"length": "max_tokens", "stop_string": "stop_sequence", "tool_calls": "tool_use"}
    return names.get(choice.finish, "end_turn")


def _usage(answer: Answer) -> dict[str, int]:
    cached = answer.cached_tokens or 0
    return {
        "input_tokens": answer.prompt_tokens - cached,
        "output_tokens": answer.completion_tokens,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
