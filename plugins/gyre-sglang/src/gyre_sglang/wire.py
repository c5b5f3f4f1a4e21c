"""The server's generate interface in plain data: request bodies out, stream events in. Pure.

Invariant: an event becomes tokens only if it is whole: as many finite logprobs as ids, each of the very token it stands
beside, every id inside the vocabulary. Anything else is an InfrastructureError that says what came.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from gyre_core import Array, GenerateRequest, InfrastructureError

NAN_FINISH = "NaN happened"
"""What the server gives as the matched stop of a call whose logits were not numbers."""

LOAD_FAILED = "External KV cache load failed"
"""How the server's fault begins when a cache linker could not bring what it had promised."""


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens [start, end) of a call come from one policy version, by the server's own account."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a block of events brought: new tokens, and at the end why it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int
    finish: str | None = None
    """The server's word: stop, length or abort."""
    matched: int | None = None
    """The stop token that ended it."""
    spans: tuple[Span, ...] = ()
    """On the last piece only."""
    routed: Array | None = None
    """int32 [positions, layers, top_k] for positions routed_from .. prompt + sampled - 2, on the last piece."""
    fault: str = ""
    """Why the server itself ended the call, when nobody asked it to."""

    @property
    def lost_load(self) -> bool:
        """Whether it was because cached pages that it had found could not be read."""
        return self.fault.startswith(LOAD_FAILED)


_Pair = tuple[float | None, int, Any]
"""Logprob, token id and its text, which is not asked for."""


class _Finish(msgspec.Struct):
    type: str
    matched: Any = None
    message: str | None = None
    status_code: int | str | None = None


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


class _Meta(msgspec.Struct):
    output_token_logprobs: list[_Pair] | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: _Finish | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None


class _Event(msgspec.Struct):
    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: Any = None


_EVENT = msgspec.json.Decoder(_Event)


def generate_body(
    request: GenerateRequest, *, rid: str, prompt: Sequence[int], max_tokens: int, cache_key: str,
    seeded: bool, version: int, stream_interval: int = 1, routed_from: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """The body of POST /generate. `cache_key` keeps cached prefixes of other weights out; `version` is of the
    weights in use; experts are wanted from position `routed_from` on."""
    how = request.sampling
    sampling: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "top_k": how.top_k or -1,
        "stop_token_ids": list(how.stop_token_ids),
        "ignore_eos": not how.stop_token_ids,  # it would ignore our own stop tokens too
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "stream_interval": stream_interval,
    }
    if how.seed is not None and seeded:
        sampling["sampling_seed"] = how.seed & 0x7FFFFFFF
    body = {
        "rid": rid,
        "session_id": f"{request.session}@{version}",
        "input_ids": prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
        "extra_key": cache_key,
    }
    routed = {"return_routed_experts": True, "routed_experts_start_len": routed_from}
    return body | (routed if request.routed_experts else {})


class StreamReader:
    """Turns one call's events into pieces; knows how many tokens came before."""

    def __init__(
        self, doing: str, vocab: int, prompt_tokens: int, *, incremental: bool, experts_per_token: int = 0,
        routed_from: int = 0,
    ) -> None:  # fmt: skip
        self.sampled = 0
        self._experts = experts_per_token
        self._doing, self._vocab, self._incremental = doing, vocab, incremental
        self._before = prompt_tokens - 1 - routed_from

    def feed(self, block: bytes) -> Piece | None:
        """Whole lines of the answer; None when there is nothing in them but empty ones and the closing mark."""
        ids: list[int] = []
        logprobs: list[float] = []
        last: _Meta | None = None
        for line in block.split(b"\n"):
            if line.startswith(b"data: {"):
                last = self._event(line[6:], ids, logprobs)
            elif line.strip() and line.rstrip() != b"data: [DONE]":
                raise self._broken(f"the line {line[:120]!r}", "server-sent events that are objects")
        return None if last is None else self._piece(last, ids, logprobs)

    def _event(self, text: bytes, ids: list[int], logprobs: list[float]) -> _Meta:
        """Read one event into `ids` and `logprobs`; what else it says of the call."""
        try:
            event = _EVENT.decode(text)
        except msgspec.DecodeError as error:
            raise self._broken(f"an event that cannot be read ({error}): {text[:120]!r}", "whole events") from error
        if event.error is not None:
            raise self._refused(event.error)
        meta, new = event.meta_info, event.output_ids
        if meta is None or new is None:
            raise self._broken(f"an event without tokens: {text[:120]!r}", "output_ids and meta_info")
        pairs, finish = meta.output_token_logprobs or [], meta.finish_reason
        if not self._incremental:
            new, pairs = new[self.sampled :], pairs[self.sampled :]
        elif finish is not None and finish.type == "abort" and meta.completion_tokens is not None:
            # A call that ends in the server's queue, put back there for want of KV, repeats its last token and has the
            # logprobs of all.
            unheard = meta.completion_tokens - self.sampled
            new, pairs = (new[-unheard:], pairs[-unheard:]) if unheard > 0 else ([], [])
        self._check(new, pairs, logprobs)
        ids += new
        self.sampled += len(new)
        if meta.completion_tokens is not None and meta.completion_tokens != self.sampled:
            raise self._broken(f"{self.sampled} tokens by now", f"the {meta.completion_tokens} that the server counts")
        return meta

    def _check(self, ids: Sequence[int], pairs: Sequence[_Pair], logprobs: list[float]) -> None:
        """Add to `logprobs` those that belong to `ids`."""
        if len(pairs) != len(ids):
            raise self._broken(f"{len(pairs)} logprobs for {len(ids)} tokens", "one each")
        for token, (value, of, _) in zip(ids, pairs, strict=True):
            if of != token or not 0 <= token < self._vocab:
                raise self._broken(
                    f"token {token} with a logprob of {of} after {self.sampled} tokens",
                    f"one id in [0, {self._vocab})", "Is it the model that config.json describes?",
                )  # fmt: skip
            if value is None or not math.isfinite(value):
                raise self._broken(
                    f"logprob {value!r} of token {token} after {self.sampled} tokens", "a finite number",
                    "The weights hold NaN or infinity, or the forward pass made some.",
                )  # fmt: skip
            logprobs.append(value)

    def _piece(self, meta: _Meta, ids: Sequence[int], logprobs: Sequence[float]) -> Piece:
        """All tokens of a block, with what its last event says."""
        finish, cached = meta.finish_reason, meta.cached_tokens or 0
        if finish is None:
            return Piece(tuple(ids), tuple(logprobs), cached)
        if finish.matched == NAN_FINISH:
            raise self._broken("logits that are not numbers (the server sampled NaN)", "finite logits")
        return Piece(
            tuple(ids), tuple(logprobs), cached,
            finish=finish.type, matched=finish.matched if isinstance(finish.matched, int) else None,
            spans=tuple(Span(str(span.version), span.start, span.end) for span in meta.weight_versions or ()),
            routed=self._routed(meta.routed_experts, self._before + self.sampled),
            fault=_fault(finish) if finish.type == "abort" else "",
        )  # fmt: skip

    def _routed(self, text: str | None, positions: int) -> Array | None:
        if not text:
            return None
        try:
            flat = np.frombuffer(base64.b64decode(text), "<i4")
        except ValueError as error:
            raise self._broken(f"routed experts that cannot be read ({error})", "base64 of int32") from error
        if positions < 1 or not self._experts or len(flat) % (positions * self._experts):
            raise self._broken(
                f"{len(flat)} routed experts for {positions} positions", f"a multiple of {self._experts} for each"
            )
        return flat.reshape(positions, -1, self._experts)

    def _refused(self, error: Any) -> Exception:
        message = error.get("message", error) if isinstance(error, dict) else error
        return InfrastructureError(self._doing, got=f"a refusal by the server: {message}", expected="an answer")

    def _broken(self, got: str, expected: str, fix: str = "") -> InfrastructureError:
        return InfrastructureError(self._doing, got=got, expected=expected, fix=fix)


def _fault(finish: _Finish) -> str:
    """An abort with an HTTP status is the server's own doing: out of memory, time-out, bad state."""
    status = finish.status_code
    return f"{finish.message or ''} (status {status})".strip() if status else ""
