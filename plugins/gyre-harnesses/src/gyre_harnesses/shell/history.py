"""A conversation's messages and how they are made shorter.

Invariant: messages are only appended, except by `elide` and `restart`, which both give another list and so a new branch
from the longest prefix that stayed. Pure: no I/O, no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


def opening(system: str | None, prompt: str) -> list[Message]:
    """How a conversation starts."""
    first: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": prompt}]


def elide(messages: Sequence[Message], keep: int, text: str) -> list[Message] | None:
    """The messages with all tool results but the last `keep` replaced by `text`; None when that changes nothing."""
    results = [index for index, message in enumerate(messages) if message["role"] == "tool"]
    old = [index for index in results[: max(0, len(results) - keep)] if messages[index]["content"] != text]
    if not old:
        return None
    shortened = list(messages)
    for index in old:
        shortened[index] = {**messages[index], "content": text}
    return shortened


def restart(system: str | None, prompt: str, summary: str) -> list[Message]:
    """A conversation that goes on from a summary of the one before."""
    return opening(system, f"{prompt}\n\nYour notes on the work so far:\n{summary}")
