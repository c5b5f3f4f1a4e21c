"""Sampled tokens as text that only grows.

Invariant: what was handed out is never taken back; the pieces together are a prefix of the finished turn's text, or
exactly it once the turn is finished. Parsing costs O(tokens) in total up to a constant, because it is repeated at
geometrically growing lengths, and at most twice a second beyond that.
"""

from __future__ import annotations

import time

from gyre_tito.chat_format import ParsedTurn

_SMALL = 64
_SECONDS = 0.5
_HELD_BACK = 24


class GrowingText:
    """Text of one choice on its way to a client, who has written its beginning (`prefill`) itself and wants none of
    `stops` in it."""

    def __init__(self, prefill: str = "", stops: tuple[str, ...] = ()) -> None:
        self._prefill = prefill
        self._stops = stops
        self.content = prefill
        self.reasoning = ""
        self._parsed_at = 0
        self._parsed_when = 0.0

    def due(self, tokens: int) -> bool:
        """Whether parsing again is worth it at this length."""
        fresh = tokens - self._parsed_at
        if fresh <= 0:
            return False
        return tokens <= _SMALL or fresh * 8 >= tokens or time.monotonic() - self._parsed_when > _SECONDS

    def grow(self, turn: ParsedTurn, tokens: int) -> tuple[str, str]:
        """Take in an unfinished turn; returns (content, reasoning) that is new and certain."""
        self._parsed_at, self._parsed_when = tokens, time.monotonic()
        content = self.content
        if not turn.tool_calls and not turn.broken_calls:
            content = _without_begun(_certain(turn.content), self._stops)
        reasoning = _certain((turn.reasoning or "").lstrip())
        return self._emit(content, reasoning)

    def finish(self, turn: ParsedTurn) -> tuple[str, str, ParsedTurn]:
        """Take in the finished turn; returns the last pieces and the turn that the client has now seen.

        Should a parser have changed its mind about text that is already out, the seen turn keeps that text.
        """
        if self.content == self._prefill and not self.reasoning:
            return turn.content.removeprefix(self._prefill), turn.reasoning or "", turn
        content, reasoning = self._emit(turn.content, turn.reasoning or "")
        seen = ParsedTurn(
            self.content,
            self.reasoning if turn.reasoning is not None or self.reasoning else None,
            turn.tool_calls,
            turn.reasoning_open,
            turn.broken_calls,
        )
        return content, reasoning, seen

    def _emit(self, content: str, reasoning: str) -> tuple[str, str]:
        more = content[len(self.content) :] if content.startswith(self.content) else ""
        thought = reasoning[len(self.reasoning) :] if reasoning.startswith(self.reasoning) else ""
        self.content += more
        self.reasoning += thought
        return more, thought


def _certain(text: str) -> str:
    """Text without its end as far as more tokens could still change it: half characters, white space, markup."""
    text = text.rstrip("�")
    markup = text.rfind("<", max(0, len(text) - _HELD_BACK))
    if markup >= 0 and ">" not in text[markup:]:
        text = text[:markup]
    return text.rstrip()


def _without_begun(text: str, stops: tuple[str, ...]) -> str:
    """Text without an end that may be the beginning of a stop string."""
    begun = (
        size for stop in stops for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])
    )
    return text[: len(text) - max(begun, default=0)]
