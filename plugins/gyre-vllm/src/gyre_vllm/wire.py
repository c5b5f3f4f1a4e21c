"""What goes over the wire of one call: the request's body, the answer's server-sent events.

Invariant: pure; nothing that a server sends gets past `read_piece` unless it is well formed: ids inside the
vocabulary, one finite logprob a token, a reason that means something. Anything else is an InfrastructureError. Not
here: connections, versions, what a caller is given.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gyre_core import Array, FinishReason, InfrastructureError, SamplingParams

GENERATE = "/inference/v1/generate"
ID_PREFIX = "generate-tokens-"
"""vLLM puts this before the request id of a token-in token-out call."""
CLAMPED = -9999.0
"""What vLLM sends for a NaN or minus infinity."""
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to `end` of one answer were sampled under the server's weight version `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """One event of an answer. `cached` comes with the usage, after the last token."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: FinishReason | None = None
    spans: tuple[Span, ...] = ()
    prompt_tokens: int | None = None
    cached: int | None = None
    experts: Array | None = None
    done: bool = False


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)
_ENCODE = msgspec.json.Encoder().encode


def request_body(
    model: str,
    prompt: Sequence[int],
    sampling: SamplingParams,
    max_tokens: int,
    salt: str,
    *,
    every: int = 1,
    transfer: dict[str, Any] | None = None,
    routed_from: int | None = None,
) -> bytes:
    """JSON for `GENERATE`. `salt` keeps this prefix cache apart from those of other weights; with `routed_from` the
    experts of the passes from that position on are wanted."""
    how: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    if sampling.seed is not None:
        how["seed"] = sampling.seed & ((1 << 63) - 1)
    if every > 1:
        how["stream_interval"] = every
    if routed_from is not None:
        how["routed_experts_prompt_start"] = routed_from
    body: dict[str, Any] = {
        "model": model,
        "token_ids": prompt,
        "sampling_params": how,
        "cache_salt": salt,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if transfer is not None:
        body["kv_transfer_params"] = transfer
    return _ENCODE(body)


class EventSplitter:
    """Cuts a stream of bytes into the data of server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that are complete now; comments and other fields are left out."""
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        return [event[5:].strip() for event in whole if event.startswith(b"data:")]


def read_piece(data: bytes, vocab: int, doing: str) -> Piece:
    """One event's meaning. InfrastructureError for an error event and for anything that is not well formed."""
    if data == b"[DONE]":
        return Piece(done=True)
    try:
        event = _EVENT.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InfrastructureError(
            doing, got=f"{data[:200]!r} ({error})", expected="an event of vLLM's token-in token-out interface"
        ) from error
    if event.error is not None:
        raise InfrastructureError(doing, got=f"an error of the server: {_message(event.error)}")
    prompt = event.usage.prompt_tokens if event.usage else None
    details = event.usage.prompt_tokens_details if event.usage else None
    cached = details.cached_tokens if details else None
    if not event.choices:
        return Piece(prompt_tokens=prompt, cached=cached)
    choice = event.choices[0]
    ids = tuple(choice.token_ids or ())
    return Piece(
        ids,
        _checked(ids, choice.logprobs, vocab, doing),
        _finish(choice.finish_reason, doing),
        tuple(Span(s.version, s.start, s.end) for s in choice.weight_versions or ()),
        prompt,
        cached,
        _experts(choice.routed_experts, doing),
    )


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _finish(reason: str | None, doing: str) -> FinishReason | None:
    if reason is None:
        return None
    known = _FINISH.get(reason)
    if known is None:
        raise InfrastructureError(doing, got=f"the end {reason!r}", expected=f"one of {', '.join(_FINISH)}")
    return known


def _checked(ids: tuple[int, ...], logprobs: _LogProbs | None, vocab: int, doing: str) -> tuple[float, ...]:
    content = (logprobs.content if logprobs else None) or []
    if tuple(entry.token_id for entry in content) != ids:
        raise InfrastructureError(
            doing, got=f"logprobs of {[entry.token_id for entry in content][:8]}", expected=f"of tokens {list(ids)[:8]}"
        )
    for entry in content:
        if not 0 <= entry.token_id < vocab:
            raise InfrastructureError(
                doing,
                got=f"sampled token id {entry.token_id}",
                expected=f"an id in [0, {vocab}) of the vocabulary",
                fix="The server serves another model than the run's.",
            )
        if not math.isfinite(entry.logprob) or entry.logprob <= CLAMPED or entry.logprob > 1e-3:
            raise InfrastructureError(
                doing,
                got=f"logprob {entry.logprob} of token {entry.token_id}",
                expected="a finite number, 0 at most",
                fix="The model's logits hold NaN or infinity: look at the weights of this version.",
            )
    return tuple(entry.logprob for entry in content)


def _experts(text: str | None, doing: str) -> Array | None:
    """int32 [tokens, layers, top_k] out of base64 of a .npy file."""
    if text is None:
        return None
    try:
        rows = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InfrastructureError(doing, got=f"unreadable routed experts ({error})") from error
    return rows.astype(np.int32)  # type: ignore[no-any-return]
