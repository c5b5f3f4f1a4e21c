"""What the dialects share: strict decoding with errors that help, content parts, server-sent events.

Pure functions; no state, no HTTP objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from gyre_tito.messages import Message
from gyre_tito.requests import (
    Answer,
    ApiError,
    ChatRequest,
    Delta,
    Piece,
    SamplingRequest,
    Started,
    invalid,
)

T = TypeVar("T")


class Part(msgspec.Struct):
    """A content part of any dialect; which fields matter depends on `type`."""

    type: str = "text"
    text: str | None = None
    thinking: str | None = None
    refusal: str | None = None


Content = str | list[Part | str] | None


def decode(data: bytes | msgspec.Raw, kind: Any, what: str) -> Any:
    """Decode JSON strictly. Error: 400 that says what was decoded and where it is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise invalid(f"{what}: {error}", _field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"{what} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise invalid(f"{what} is nested too deeply") from error


def _field(text: str) -> str | None:
    """`max_tokens` from msgspec's `... - at `$.max_tokens``."""
    _, found, place = text.rpartition("`$.")
    return place.rstrip("`") if found else None


def list_decoder(
    kind: type[T], convert: Callable[[T, int], Iterable[Message]], what: str
) -> Callable[[bytes], tuple[Message, ...]]:
    """A decoder for (a part of) a message list; `convert` turns one element into messages."""

    def read(raw: bytes) -> tuple[Message, ...]:
        items: list[T] = decode(raw, list[kind], what)  # type: ignore[valid-type]
        return tuple(message for place, item in enumerate(items) for message in convert(item, place))

    return read


def text_of(content: Content, what: str) -> str:
    """The text of a content field. Error: parts that are not text (this proxy serves text models)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else _part_text(part, what) for part in content)


def _part_text(part: Part, what: str) -> str:
    if part.type in ("text", "input_text", "output_text") and part.text is not None:
        return part.text
    if part.type == "refusal":
        return part.refusal or ""
    raise invalid(
        f"{what} has a content part of type {part.type!r}"
        + (" without text" if part.type.endswith("text") else "; only text parts are supported here")
    )


def clean_tools(tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    """OpenAI tool specifications, checked. Error: a tool that is no function or has no name."""
    out = []
    for place, tool in enumerate(tools or []):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise invalid(f"tools[{place}] is not a function tool; only those can be rendered for a model", "tools")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{place}].function.name is missing", "tools")
        out.append(tool)
    return tuple(out)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """`stop` as a tuple. Error: an empty stop string (it would match everywhere)."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if any(not text for text in strings):
        raise invalid("a stop string is empty; leave it out", "stop")
    return strings


def in_range(value: float | None, low: float, high: float, name: str) -> None:
    """Refuse a number outside its range."""
    if value is not None and not low <= value <= high:
        raise invalid(f"{name} must be between {low:g} and {high:g}, got {value:g}", name)


def check_sampling(sampling: SamplingRequest, vocabulary: int) -> SamplingRequest:
    """The sampling request if every number is usable, else a 400 that names the field."""
    in_range(sampling.temperature, 0, 10, "temperature")
    in_range(sampling.top_p, 0, 1, "top_p")
    in_range(sampling.min_p, 0, 1, "min_p")
    in_range(sampling.top_k, -1, vocabulary, "top_k")
    in_range(sampling.max_tokens, 1, 2**31 - 1, "max_tokens")
    in_range(sampling.top_logprobs, 0, 128, "top_logprobs")
    in_range(sampling.frequency_penalty, -2, 2, "frequency_penalty")
    in_range(sampling.presence_penalty, -2, 2, "presence_penalty")
    in_range(sampling.repetition_penalty, 0.01, 10, "repetition_penalty")
    in_range(sampling.seed, -(2**63), 2**63 - 1, "seed")
    for token in sampling.stop_token_ids:
        in_range(token, 0, vocabulary - 1, "stop_token_ids")
    for token, bias in sampling.logit_bias:
        in_range(token, 0, vocabulary - 1, "logit_bias")
        in_range(bias, -100, 100, "logit_bias")
    return sampling


def event(data: Any, name: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


class StreamWriter(Protocol):
    """Turns the pieces of a streamed answer into bytes for the client."""

    def start(self, started: Started) -> bytes:
        """What comes before the first delta."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """New text."""
        ...

    def ping(self) -> bytes:
        """Something that keeps the connection alive and means nothing."""
        ...

    def end(self, answer: Answer) -> bytes:
        """Whatever ends the stream: calls, reasons, usage."""
        ...

    def error(self, error: ApiError) -> bytes:
        """A failure in the middle of the stream."""
        ...


def write(writer: StreamWriter, piece: Piece) -> bytes:
    """One piece of a streamed answer as bytes."""
    if isinstance(piece, Delta):
        return writer.delta(piece)
    if isinstance(piece, Answer):
        return writer.end(piece)
    return writer.start(piece) if isinstance(piece, Started) else writer.ping()


class ChatDialect(Protocol):
    """One chat dialect: a request in, an answer or a stream out, errors in its own shape."""

    name: str

    def request(self, body: bytes, vocabulary: int) -> tuple[ChatRequest, bool]:
        """Read a body; returns it and whether to stream. Error: `ApiError`."""
        ...

    def response(self, request: ChatRequest, answer: Answer, model: str) -> Mapping[str, Any]:
        """The whole answer as JSON."""
        ...

    def stream(self, request: ChatRequest, model: str) -> StreamWriter:
        """A writer for one streamed answer."""
        ...

    def error(self, error: ApiError) -> Mapping[str, Any]:
        """An error in the dialect's shape."""
        ...


def is_list(raw: bytes) -> bool:
    """Whether JSON text is a list."""
    return raw.lstrip().startswith(b"[")


def openai_error(error: ApiError) -> dict[str, Any]:
    """An error as OpenAI's API writes it."""
    kinds = {
        "invalid_request": "invalid_request_error",
        "context_length": "invalid_request_error",
        "too_large": "invalid_request_error",
        "not_found": "invalid_request_error",
        "authentication": "authentication_error",
        "overloaded": "rate_limit_error",
        "engine": "server_error",
    }
    code = "context_length_exceeded" if error.kind == "context_length" else None
    if error.kind == "authentication":
        code = "invalid_api_key"
    return {
        "error": {
            "message": error.message,
            "type": kinds.get(error.kind, "server_error"),
            "param": error.param,
            "code": code,
        }
    }
