"""The server's generate interface in plain data: request bodies out, stream events in. Pure.

Invariant: an event becomes tokens only if it is whole: as many finite logprobs as ids, each of the very token it stands
beside, every id inside the vocabulary. Anything else is an InfrastructureError that says what came.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gyre_core import Array, GenerateRequest, InfrastructureError

NAN_FINISH = "NaN happened"
"""What the server gives as the matched stop of a call whose logits were not numbers."""


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens [start, end) of a call come from one policy version, by the server's own account."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event brought: new tokens, and at the end why it ended."""

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
    """int32 [positions, layers, top_k] for positions 0 .. prompt + sampled - 2, on the last piece."""
    fault: str = ""
    """Why the server itself ended the call, when nobody asked it to."""


def generate_body(
    request: GenerateRequest, *, rid: str, prompt: Sequence[int], max_tokens: int, cache_key: str,
    seeded: bool, version: int, stream_interval: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The body of POST /generate. `cache_key` keeps cached prefixes of other weights out; `version` is of the
    weights in use."""
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
        "input_ids": list(map(int, prompt)),
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": True,
        "extra_key": cache_key,
    }
    return body | ({"return_routed_experts": True} if request.routed_experts else {})


class StreamReader:
    """Turns one call's events into pieces; knows how many tokens came before."""

    def __init__(
        self, doing: str, vocab: int, prompt_tokens: int, *, incremental: bool, experts_per_token: int = 0
    ) -> None:
        self.sampled = 0
        self._experts = experts_per_token
        self._doing, self._vocab, self._prompt, self._incremental = doing, vocab, prompt_tokens, incremental

    def feed(self, line: bytes) -> Piece | None:
        """A line of the answer; None for the empty ones between events and for the closing mark."""
        if not line.startswith(b"data:"):
            if line.strip():
                raise self._broken(f"the line {line[:120]!r}", "server-sent events")
            return None
        text = line[5:].strip()
        if text == b"[DONE]":
            return None
        try:
            event = json.loads(text)
        except ValueError as error:
            raise self._broken(f"an event that is no JSON: {text[:120]!r}", "whole events") from error
        if not isinstance(event, dict):
            raise self._broken(f"an event that is no object: {text[:120]!r}", "an object")
        if "error" in event:
            raise self._refused(event["error"])
        try:
            return self._piece(event)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            what = f"an event that cannot be read ({type(error).__name__}: {error})"
            raise self._broken(what, "whole events") from error

    def _piece(self, event: Mapping[str, Any]) -> Piece:
        meta = event.get("meta_info")
        if not isinstance(meta, dict) or not isinstance(event.get("output_ids"), list):
            raise self._broken(f"an event with {sorted(event)}", "output_ids and meta_info")
        ids, pairs = event["output_ids"], meta.get("output_token_logprobs") or []
        if not self._incremental:
            ids, pairs = ids[self.sampled :], pairs[self.sampled :]
        finish = meta.get("finish_reason") or {}
        total = meta.get("completion_tokens")
        logprobs = self._checked(ids, pairs)
        self.sampled += len(ids)
        if total is not None and total != self.sampled:
            raise self._broken(f"{self.sampled} tokens by now", f"the {total} that the server counts")
        if finish.get("matched") == NAN_FINISH:
            raise self._broken("logits that are not numbers (the server sampled NaN)", "finite logits")
        kind = finish.get("type")
        return Piece(
            token_ids=tuple(ids), logprobs=logprobs, cached_tokens=int(meta.get("cached_tokens") or 0),
            finish=kind, matched=finish.get("matched") if isinstance(finish.get("matched"), int) else None,
            spans=tuple(Span(str(s["version"]), s["start"], s["end"]) for s in meta.get("weight_versions") or ()),
            routed=self._routed(meta.get("routed_experts"), self._prompt + self.sampled - 1),
            fault=_fault(finish) if kind == "abort" else "",
        )  # fmt: skip

    def _checked(self, ids: Sequence[Any], pairs: Sequence[Any]) -> tuple[float, ...]:
        """The logprobs that belong to `ids`."""
        if len(pairs) != len(ids):
            raise self._broken(f"{len(pairs)} logprobs for {len(ids)} tokens", "one each")
        found: list[float] = []
        for token, pair in zip(ids, pairs, strict=True):
            value = pair[0]
            if type(token) is not int or not 0 <= token < self._vocab or pair[1] != token:
                raise self._broken(
                    f"token {token!r} with a logprob of {pair[1]!r} at {self.sampled + len(found)}",
                    f"one id in [0, {self._vocab})", "Is it the model that config.json describes?",
                )  # fmt: skip
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise self._broken(
                    f"logprob {value!r} of token {token} at {self.sampled + len(found)}", "a finite number",
                    "The weights hold NaN or infinity, or the forward pass made some.",
                )  # fmt: skip
            found.append(value)
        return tuple(found)

    def _routed(self, text: Any, positions: int) -> Array | None:
        if not text:
            return None
        flat = np.frombuffer(base64.b64decode(text), "<i4")
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


def _fault(finish: Mapping[str, Any]) -> str:
    """An abort with an HTTP status is the server's own doing: out of memory, time-out, bad state."""
    status = finish.get("status_code")
    return f"{finish.get('message', '')} (status {status})".strip() if status else ""
