"""What a dialect makes of a request, and what it gets back: the proxy's own shapes between HTTP and the engine.

Invariant: nothing here knows HTTP, a dialect's field names, or token ids of a particular model. Plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gyre_tito.chat_format import ParsedTurn
from gyre_tito.messages import Message

Decode = Callable[[bytes], tuple[Message, ...]]
Finish = Literal["stop", "length", "tool_calls", "stop_string", "abort"]


class ApiError(Exception):
    """A request that is refused or failed; each dialect writes it in its own shape.

    `status` is the HTTP status; `kind` one of `invalid_request`, `authentication`, `not_found`, `too_large`,
    `overloaded`, `context_length`, `engine`; `param` the field at fault, when one is.
    """

    def __init__(self, status: int, kind: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.message = message
        self.param = param


def invalid(message: str, param: str | None = None) -> ApiError:
    """The client's mistake."""
    return ApiError(400, "invalid_request", message, param=param)


@dataclass(frozen=True, slots=True)
class Transcript:
    """A request's conversation, decoded only as far as needed.

    `raw` is the JSON text of the message list as the client sent it, `decode` turns such a list into messages.
    `preface`: messages that the dialect carries outside the list (instructions). `prefill`: text that the answer must
    begin with.
    """

    dialect: str
    raw: bytes
    decode: Decode
    preface: tuple[Message, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    tools_raw: bytes = b""
    prefill: str = ""


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """Sampling as the client asked; None where it did not."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    n: int = 1


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request of any dialect. `tool_choice`: `auto`, `none`, `required`, or a tool's name after `tool:`."""

    transcript: Transcript
    sampling: SamplingRequest
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Plain completions: prompts as text or ids, no chat format. `echo`: the answer begins with the prompt, which then
    is text. `include_usage`: a stream ends with its token counts."""

    prompts: tuple[str | tuple[int, ...], ...]
    sampling: SamplingRequest
    echo: bool = False
    include_usage: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One sampled token as clients ask for it."""

    text: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `stop_string` is the one that ended it, if any. `logprobs` only when asked for."""

    index: int
    call_id: str
    turn: ParsedTurn
    finish: Finish
    stop_string: str | None
    sampled_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of a request; token counts for `usage`. `prefill`: what the client itself began the turn with."""

    answer_id: str
    created: int
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int | None
    prefill: str = ""

    @property
    def completion_tokens(self) -> int:
        """Sampled tokens of all choices."""
        return sum(choice.sampled_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a streamed answer gained: text to append to choice `index`."""

    index: int
    content: str = ""
    reasoning: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """A streamed answer begins."""

    answer_id: str
    created: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Nothing new for a while; the connection is kept alive."""


Piece = Started | Delta | Ping | Answer
