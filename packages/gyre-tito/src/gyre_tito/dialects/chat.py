"""OpenAI chat completions: `POST /v1/chat/completions`, streamed or not.

Translates both ways and keeps nothing. Extra fields that common engines accept are read (`top_k`, `min_p`,
`repetition_penalty`, `stop_token_ids`, `ignore_eos`); fields that cannot be honoured are refused, not ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

import msgspec

from gyre_tito.dialects import common
from gyre_tito.dialects.common import Content
from gyre_tito.messages import Message, ToolCall
from gyre_tito.requests import (
    Answer,
    ApiError,
    ChatRequest,
    Choice,
    Delta,
    SamplingRequest,
    Started,
    TokenLogprob,
    Transcript,
    invalid,
)

_Tools = Optional[list[dict[str, Any]]]  # noqa: UP045 - a runtime type


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""
    type: str = "function"


class ChatMessage(msgspec.Struct):
    """One message of a request."""

    role: str
    content: Content = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class StreamOptions(msgspec.Struct):
    """What a stream holds besides text."""

    include_usage: bool = False


class _Format(msgspec.Struct):
    type: str = "text"


class ChatBody(msgspec.Struct):
    """A request body; fields that are not named here are ignored."""

    messages: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    model: str | None = None
    tools: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: _Format | None = None
    functions: Any = None
    function_call: Any = None
    chat_template_kwargs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None


_UNCONSTRAINED = "needs constrained sampling, which is not available; ask for the form in the prompt, or with a tool"
_REFUSED = {
    "functions": "is the old form of tools; use tools",
    "function_call": "is the old form of tool_choice; use tool_choice",
    "chat_template_kwargs": "cannot change how one request is rendered; the proxy's operator chooses that for a model",
    "guided_json": _UNCONSTRAINED,
    "guided_regex": _UNCONSTRAINED,
    "guided_choice": _UNCONSTRAINED,
    "guided_grammar": _UNCONSTRAINED,
    "structured_outputs": _UNCONSTRAINED,
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def to_message(item: ChatMessage, place: int) -> Iterable[Message]:
    """One chat message in the proxy's shape. Error: an unknown role, parts that are not text."""
    role = _ROLES.get(item.role)
    if role is None:
        raise invalid(
            f"messages[{place}].role is {item.role!r}; use system, developer, user, assistant or tool", "messages"
        )
    calls = tuple(
        ToolCall(call.id, call.function.name, _arguments(call.function.arguments)) for call in item.tool_calls or ()
    )
    if calls and role != "assistant":
        raise invalid(f"messages[{place}] has tool calls, but only an assistant turn can", "messages")
    reasoning = item.reasoning_content if item.reasoning_content is not None else item.reasoning
    yield Message(
        role,  # type: ignore[arg-type]
        common.text_of(item.content, f"messages[{place}]"),
        reasoning if role == "assistant" else None,
        calls,
        item.tool_call_id if role == "tool" else None,
        item.name if role in ("tool", "user") else None,
    )


def _arguments(value: str | dict[str, Any] | None) -> str:
    if value is None:
        return "{}"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


decode_messages = common.list_decoder(ChatMessage, to_message, "messages")


class ChatCompletions:
    """The dialect."""

    name = "chat"

    def request(self, body: bytes, vocabulary: int) -> tuple[ChatRequest, bool]:
        """Read a request body; returns it and whether to stream."""
        read = common.decode(body, ChatBody, "the request body")
        if not common.is_list(bytes(read.messages)):
            raise invalid("messages is missing or no list; send the conversation so far as a list", "messages")
        if read.response_format is not None and read.response_format.type != "text":
            raise invalid(f"response_format {read.response_format.type!r} {_UNCONSTRAINED}", "response_format")
        for field, reason in _REFUSED.items():
            value = getattr(read, field)
            if value or (value is not None and reason is _UNCONSTRAINED):
                raise invalid(f"{field} {reason}", field)
        tools_raw = bytes(read.tools)
        tools = common.clean_tools(common.decode(tools_raw or b"[]", _Tools, "tools"))
        transcript = Transcript(self.name, bytes(read.messages), decode_messages, (), tools, tools_raw)
        request = ChatRequest(
            transcript,
            common.check_sampling(_sampling(read), vocabulary),
            tool_choice(read.tool_choice, tools),
            read.parallel_tool_calls is not False,
            {"include_usage": bool(read.stream_options and read.stream_options.include_usage)},
        )
        return request, bool(read.stream)

    def response(self, request: ChatRequest, answer: Answer, model: str) -> dict[str, Any]:
        """The whole answer."""
        return {
            "id": f"chatcmpl-{answer.answer_id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": model,
            "choices": [_choice(choice, request.sampling.logprobs) for choice in answer.choices],
            "usage": usage(answer),
        }

    def stream(self, request: ChatRequest, model: str) -> ChatStream:
        """A writer for one streamed answer."""
        return ChatStream(request, model)

    def error(self, error: ApiError) -> dict[str, Any]:
        """An error in OpenAI's shape."""
        return common.openai_error(error)


class ChatStream:
    """Chunks of one streamed answer."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        self._request = request
        self._base: dict[str, Any] = {"id": "", "object": "chat.completion.chunk", "created": 0, "model": model}

    def start(self, started: Started) -> bytes:
        """The chunks that open every choice."""
        self._base = {**self._base, "id": f"chatcmpl-{started.answer_id}", "created": started.created}
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._request.sampling.n)
        )

    def delta(self, delta: Delta) -> bytes:
        """New text."""
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        return self._chunk(delta.index, fields, logprobs=delta.logprobs)

    def ping(self) -> bytes:
        """A comment, which clients skip."""
        return b": still working\n\n"

    def error(self, error: ApiError) -> bytes:
        """An error event; the stream ends after it."""
        return common.event(common.openai_error(error))

    def end(self, answer: Answer) -> bytes:
        """Tool calls, finish reasons, usage, end mark."""
        out = b""
        for choice in answer.choices:
            for number, call in enumerate(choice.turn.tool_calls):
                out += self._chunk(choice.index, {"tool_calls": [{"index": number, **_call(call)}]})
            out += self._chunk(choice.index, {}, finish=finish_reason(choice))
        if self._request.metadata.get("include_usage"):
            out += common.event({**self._base, "choices": [], "usage": usage(answer)})
        return out + b"data: [DONE]\n\n"

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": {"content": [token_logprob(one) for one in logprobs]} if logprobs else None,
            "finish_reason": finish,
        }
        return common.event({**self._base, "choices": [choice]})


def _sampling(read: ChatBody) -> SamplingRequest:
    limit = read.max_completion_tokens if read.max_completion_tokens is not None else read.max_tokens
    return SamplingRequest(
        max_tokens=limit,
        temperature=read.temperature,
        top_p=read.top_p,
        top_k=None if read.top_k == -1 else read.top_k,
        min_p=read.min_p,
        seed=read.seed,
        stop=common.stop_strings(read.stop),
        stop_token_ids=tuple(read.stop_token_ids or ()),
        ignore_eos=read.ignore_eos,
        frequency_penalty=read.frequency_penalty or 0.0,
        presence_penalty=read.presence_penalty or 0.0,
        repetition_penalty=1.0 if read.repetition_penalty is None else read.repetition_penalty,
        logit_bias=logit_bias(read.logit_bias),
        logprobs=bool(read.logprobs),
        top_logprobs=read.top_logprobs or 0,
        n=1 if read.n is None else read.n,
    )


def logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    """`logit_bias` as pairs. Error: a key that is no token id."""
    try:
        return tuple((int(token), value) for token, value in (bias or {}).items())
    except ValueError as error:
        raise invalid(f"logit_bias: {error}; its keys are token ids", "logit_bias") from error


def tool_choice(value: str | dict[str, Any] | None, tools: tuple[dict[str, Any], ...]) -> str:
    """`tool_choice` as `auto`, `none`, `required` or `tool:<name>`. Error: a choice that the tools do not allow."""
    if isinstance(value, dict):
        function = value.get("function")
        name = function.get("name") if isinstance(function, dict) else value.get("name")
        names = [tool["function"]["name"] for tool in tools]
        if name not in names:
            raise invalid(f"tool_choice names {name!r}, but the tools are {', '.join(names) or 'none'}", "tool_choice")
        return f"tool:{name}"
    if value not in (None, "auto", "none", "required"):
        raise invalid(f"tool_choice is {value!r}; use auto, none, required or a function", "tool_choice")
    if value == "required" and not tools:
        raise invalid("tool_choice is 'required', but there are no tools", "tool_choice")
    return value or "auto"


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def finish_reason(choice: Choice) -> str:
    """OpenAI's word for how a choice ended."""
    return "stop" if choice.finish == "stop_string" else choice.finish


def _choice(choice: Choice, with_logprobs: bool) -> dict[str, Any]:
    turn = choice.turn
    message: dict[str, Any] = {"role": "assistant", "content": turn.content or (None if turn.tool_calls else "")}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [_call(call) for call in turn.tool_calls]
    logprobs = {"content": [token_logprob(one) for one in choice.logprobs]} if with_logprobs else None
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish_reason(choice),
    }


def token_logprob(one: TokenLogprob) -> dict[str, Any]:
    """A token with its logprob in chat form."""
    return {
        "token": one.text,
        "logprob": one.logprob,
        "bytes": list(one.text.encode()),
        "token_id": one.token_id,
        "top_logprobs": [{"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in one.top],
    }


def usage(answer: Answer) -> dict[str, Any]:
    """Token counts in chat form."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens or 0},
    }
