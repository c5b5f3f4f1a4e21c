"""OpenAI responses: `POST /v1/responses`, streamed or not.

An assistant turn is several items here (reasoning, message, function calls); reading groups them into one, writing
takes it apart. `previous_response_id` is refused: the client's list says which history it means.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gyre_tito.dialects import common
from gyre_tito.dialects.chat import tool_choice
from gyre_tito.dialects.response_stream import ResponseStream, output_items, response_object
from gyre_tito.messages import Message, ToolCall
from gyre_tito.requests import Answer, ApiError, ChatRequest, SamplingRequest, Transcript, invalid

_ROLES = {"system": "system", "developer": "system", "user": "user"}


class ResponseItem(msgspec.Struct):
    """One input item of a request."""

    type: str = "message"
    role: str | None = None
    content: common.Content = None
    call_id: str | None = None
    id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: common.Content = None


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class ResponseBody(msgspec.Struct):
    """A request body; fields that are not named here are ignored."""

    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    model: str | None = None
    instructions: str | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    text: _Text | None = None
    metadata: dict[str, Any] | None = None


class _Turn:
    """An assistant turn that is being put together."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] | None = None
        self.calls: list[ToolCall] = []

    def message(self) -> Message:
        reasoning = None if self.thoughts is None else "".join(self.thoughts)
        return Message("assistant", "".join(self.texts), reasoning, tuple(self.calls))


def decode_input(raw: bytes) -> tuple[Message, ...]:
    """(A part of) an input list as messages."""
    items: list[ResponseItem] = common.decode(raw, list[ResponseItem], "input")
    out: list[Message] = []
    turn: _Turn | None = None
    for place, item in enumerate(items):
        ours = item.type in ("reasoning", "function_call") or (item.type == "message" and item.role == "assistant")
        if turn is not None and (not ours or (turn.calls and item.type != "function_call")):
            out.append(turn.message())
            turn = None
        if ours:
            turn = turn or _Turn()
            _add_to_turn(turn, item, place)
        else:
            out.append(_plain_item(item, place))
    if turn is not None:
        out.append(turn.message())
    return tuple(out)


def _add_to_turn(turn: _Turn, item: ResponseItem, place: int) -> None:
    if item.type == "reasoning":
        if item.content is not None:
            turn.thoughts = [*(turn.thoughts or []), _reasoning_text(item.content)]
    elif item.type == "function_call":
        if not item.name:
            raise invalid(f"input[{place}] is a function_call without a name", "input")
        turn.calls.append(ToolCall(item.call_id or item.id or "", item.name, item.arguments or "{}"))
    else:
        turn.texts.append(common.text_of(item.content, f"input[{place}]"))


def _reasoning_text(content: common.Content) -> str:
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else part.text or "" for part in content or [])


def _plain_item(item: ResponseItem, place: int) -> Message:
    if item.type == "function_call_output":
        if not item.call_id:
            raise invalid(f"input[{place}] is a function_call_output without call_id", "input")
        return Message("tool", common.text_of(item.output, f"input[{place}]"), tool_call_id=item.call_id)
    if item.type != "message":
        raise invalid(
            f"input[{place}] has type {item.type!r}; use message, function_call, function_call_output or reasoning",
            "input",
        )
    role = _ROLES.get(item.role or "")
    if role is None:
        raise invalid(f"input[{place}].role is {item.role!r}; use system, developer, user or assistant", "input")
    return Message(role, common.text_of(item.content, f"input[{place}]"))  # type: ignore[arg-type]


class Responses:
    """The dialect."""

    name = "responses"

    def request(self, body: bytes, vocabulary: int) -> tuple[ChatRequest, bool]:
        """Read a request body; returns it and whether to stream."""
        read = common.decode(body, ResponseBody, "the request body")
        for field in ("previous_response_id", "conversation"):
            if getattr(read, field) is not None:
                raise invalid(f"{field} is not supported; send the whole history in `input`", field)
        if read.background:
            raise invalid("background responses are not supported; stream instead", "background")
        if read.text is not None and read.text.format is not None and read.text.format.type != "text":
            raise invalid("text.format needs constrained sampling, which is not available; ask in the prompt", "text")
        tools_raw = bytes(read.tools)
        tools = _tools(tools_raw)
        preface = (Message("system", read.instructions),) if read.instructions else ()
        transcript = Transcript(self.name, _input(read), decode_input, preface, tools, tools_raw)
        sampling = SamplingRequest(
            max_tokens=read.max_output_tokens,
            temperature=read.temperature,
            top_p=read.top_p,
            logprobs="message.output_text.logprobs" in (read.include or ()),
            top_logprobs=read.top_logprobs or 0,
        )
        request = ChatRequest(
            transcript,
            common.check_sampling(sampling, vocabulary),
            tool_choice(read.tool_choice, tools),
            read.parallel_tool_calls is not False,
            _echo(read, tools),
        )
        return request, bool(read.stream)

    def response(self, request: ChatRequest, answer: Answer, model: str) -> dict[str, Any]:
        """The whole answer."""
        items = output_items(answer)
        return response_object(request.metadata, model, answer.answer_id, answer.created, items, answer)

    def stream(self, request: ChatRequest, model: str) -> ResponseStream:
        """A writer for one streamed answer."""
        return ResponseStream(request.metadata, model)

    def error(self, error: ApiError) -> dict[str, Any]:
        """An error in OpenAI's shape."""
        return common.openai_error(error)


def _input(read: ResponseBody) -> bytes:
    raw = bytes(read.input).strip()
    if raw.startswith(b'"'):
        return b'[{"role":"user","content":' + raw + b"}]"
    if not common.is_list(raw):
        raise invalid("input is missing; send text or a list of items", "input")
    return raw


def _tools(raw: bytes) -> tuple[dict[str, Any], ...]:
    """Function tools in the form that chat formats render. Error: tools that only OpenAI's servers can run."""
    out = []
    for place, tool in enumerate(common.decode(raw or b"[]", list[dict[str, Any]] | None, "tools") or []):
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise invalid(f"tools[{place}] of type {tool.get('type')!r} cannot run here; use function tools", "tools")
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        out.append({"type": "function", "function": function})
    return tuple(out)


def _echo(read: ResponseBody, tools: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """What a response object repeats of its request."""
    return {
        "instructions": read.instructions,
        "metadata": read.metadata or {},
        "parallel_tool_calls": read.parallel_tool_calls is not False,
        "temperature": read.temperature,
        "top_p": read.top_p,
        "max_output_tokens": read.max_output_tokens,
        "top_logprobs": read.top_logprobs or 0,
        "tool_choice": read.tool_choice or "auto",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
    }
