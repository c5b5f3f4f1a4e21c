"""What a program asks of its model, and what the answer says that it took.

Invariant: what cannot be read here is not asked, so that nothing reads a request as more than was read of it; an answer
reaches the program as it came, but for the token counts of a stream that the program did not want. Pure: no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ASKING: Mapping[str, tuple[str, ...]] = {
    "/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/completions": ("max_tokens",),
    "/messages": ("max_tokens",),
    "/responses": ("max_output_tokens",),
}
"""Where answers are asked for, and by what fields their tokens; the first is set where there is none."""
_SEVERAL = ("/chat/completions", "/completions")
"""Where one request may ask for several answers, and streams tell their token counts only if asked to."""
_COUNTS = ("n", "best_of")
_BETWEEN = re.compile(rb"\r?\n\r?\n")
_DONE = (b"data: [DONE]", b"data:[DONE]")
_LAST = ("message_stop", "response.completed", "response.incomplete", "response.failed", "error")
_TELLING = (b"usage", b"error", b"message_stop", b"response.")
"""One of these is in every event that is looked at."""
_LARGEST_READ = 1 << 26
"""Bytes of an answer that is no stream; the counts of a larger one are not read."""


class UnreadableError(ValueError):
    """The body of a request says nothing that could be held to a limit; the text is for the program."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request for answers."""

    path: str
    body: bytes
    whole: Mapping[str, Any]
    answers: int
    """How many it wants."""
    hides_counts: bool
    """Its stream would not tell token counts, so they are asked for and kept from the program."""

    def tokens(self, most: int) -> int:
        """How long one answer may become if it has `most` tokens at most."""
        return max(self._allowed(most).values())

    def bounded(self, most: int) -> bytes:
        """The body, asking for at most `most` tokens an answer; the very same bytes when nothing has to change."""
        allowed: dict[str, Any] = {**self._allowed(most)}
        if self.path in _SEVERAL:
            allowed |= {name: 1 for name in _COUNTS if not isinstance(self.whole.get(name), int | None)}
        if self.hides_counts:
            options = self.whole.get("stream_options")
            allowed["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        asked = {name: self.whole[name] for name in allowed if name in self.whole}
        return self.body if allowed == asked else json.dumps({**self.whole, **allowed}).encode()

    def _allowed(self, most: int) -> dict[str, int]:
        names = ASKING[self.path]
        asked = {name: self.whole[name] for name in names if name in self.whole} or {names[0]: None}
        return {name: min(own, most) if isinstance(own, int) and own >= 0 else most for name, own in asked.items()}


def read_request(path: str, body: bytes) -> Asked:
    """A request's body as a reader of JSON takes it, in which the last of equal keys counts."""
    try:
        whole = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the request body is not JSON that can be read: {error}") from None
    if not isinstance(whole, dict):
        raise UnreadableError("the request body is not a JSON object")
    options = whole.get("stream_options")
    told = isinstance(options, dict) and options.get("include_usage") is True
    hides = path in _SEVERAL and whole.get("stream") is True and not told
    return Asked(path, body, whole, _answers(path, whole), hides)


def _answers(path: str, whole: Mapping[str, Any]) -> int:
    if path not in _SEVERAL:
        return 1
    each = max([1, *(own for name in _COUNTS if isinstance(own := whole.get(name), int))])
    prompts = whole.get("prompt") if path == "/completions" else None
    if isinstance(prompts, list) and not all(isinstance(part, int) for part in prompts):
        each *= len(prompts)
    return each


class AnswerReader:
    """Reads one answer with status 200 while it is passed on, chunk by chunk."""

    def __init__(self, asked: Asked, *, stream: bool) -> None:
        self._hides, self._stream = asked.hides_counts, stream
        self._held = bytearray()
        self._looked = 0
        self._counts: dict[str, int] = {}
        self.complete = False
        """A stream has said its last; the rest is the end of the connection."""
        self.error: Mapping[str, Any] | None = None
        """What a stream told instead of going on."""

    @property
    def sampled(self) -> int | None:
        """Tokens of its answers; None when it has not said so."""
        counts = self._counts
        return counts.get("completion_tokens", counts.get("output_tokens"))

    @property
    def prompt(self) -> int:
        """Tokens of its prompt. One dialect counts those that were cached apart."""
        counts = self._counts
        cached = counts.get("cache_read_input_tokens", 0) + counts.get("cache_creation_input_tokens", 0)
        return counts.get("prompt_tokens", counts.get("input_tokens", 0) + cached)

    def take(self, chunk: bytes) -> bytes:
        """What of the answer can be passed on, now that this came."""
        if not self._stream:
            if len(self._held) <= _LARGEST_READ:
                self._held += chunk
            return chunk
        self._held += chunk
        out = bytearray()
        begin = 0
        while found := _BETWEEN.search(self._held, max(begin, self._looked)):
            event = bytes(self._held[begin : found.end()])
            begin = found.end()
            if self._passes(event):
                out += event
        del self._held[:begin]
        self._looked = max(0, len(self._held) - 3)
        return bytes(out)

    def end(self) -> bytes:
        """What is left to be passed on at the end."""
        rest = bytes(self._held)
        if self._stream:
            return rest if self._passes(rest) else b""
        if len(rest) <= _LARGEST_READ:
            whole = _object(rest)
            if whole is not None:
                self._count(whole)
        return b""

    def _passes(self, event: bytes) -> bool:
        if event.lstrip().startswith(_DONE):
            self.complete = True
            return True
        if not any(word in event for word in _TELLING):
            return True
        data = b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
        told = _object(data)
        if told is None:
            return True
        self._count(told)
        if told.get("type") in _LAST:
            self.complete = True
        failed = told.get("response") if told.get("type") == "response.failed" else told
        error = failed.get("error") if isinstance(failed, dict) else None
        if error is not None or told.get("type") in ("error", "response.failed"):
            self.error, self.complete = error if isinstance(error, dict) else told, True
        return not (self._hides and told.get("choices") == [] and isinstance(told.get("usage"), dict))

    def _count(self, told: Mapping[str, Any]) -> None:
        for place in (told, told.get("message"), told.get("response")):
            usage = place.get("usage") if isinstance(place, Mapping) else None
            if isinstance(usage, Mapping):
                self._counts |= {name: own for name, own in usage.items() if isinstance(own, int)}


def said(body: bytes) -> str:
    """The message of an endpoint's error, in whatever dialect."""
    told = _object(body)
    error = None if told is None else told.get("error")
    message = error.get("message") if isinstance(error, dict) else None
    return (str(message) if message is not None else body.decode("utf-8", "replace"))[:300]


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None
