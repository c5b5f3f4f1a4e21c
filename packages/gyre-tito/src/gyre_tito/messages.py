"""Messages in one shape for all dialects, and digests that say when two histories are the same.

Invariant: the digest of a chain of messages depends on what they mean to the model's history, not on how a client
spells them: an assistant turn that comes back with re-formatted tool arguments, trimmed white space or other ids is
still the same turn. User, system and tool text count letter for letter. Pure functions; no model knowledge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an assistant turn; `arguments` is JSON text (or whatever text the model wrote)."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `reasoning` None: the client did not carry it (it may or may not have existed)."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


def to_renderer(message: Message) -> dict[str, Any]:
    """The message as the mapping that renderers and chat templates take."""
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        out["name"] = message.name
    return out


def chain(previous: bytes, message: Message) -> bytes:
    """Digest (16 bytes) of a history that ends with `message`, from the digest of what came before."""
    if message.role == "assistant":
        calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
        meaning: list[Any] = ["assistant", message.content.strip(), calls]
    else:
        meaning = [message.role, message.content, message.tool_call_id, message.name]
    text = json.dumps(meaning, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_SIZE, key=previous).digest()


def chain_start(tools: Sequence[Mapping[str, Any]]) -> bytes:
    """Digest of the empty history under these tools (they are part of every prompt)."""
    text = json.dumps(list(tools), ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_SIZE).digest()


def reasoning_digest(reasoning: str | None) -> bytes:
    """Digest of a turn's reasoning, white space at its ends aside; None counts as empty."""
    return hashlib.blake2b((reasoning or "").strip().encode(), digest_size=8).digest()


def canonical_arguments(arguments: str) -> str:
    """Tool arguments with key order, spacing and number spelling taken out; text that is no JSON only stripped."""
    try:
        return json.dumps(_plain(json.loads(arguments)), sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return arguments.strip()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


class HistoryError(ValueError):
    """The messages cannot be a conversation; the message names the place and says what to change."""


def validate(messages: Iterable[Message], first_index: int = 0) -> None:
    """Refuse tool results that answer nothing.

    `first_index` is where `messages` begin in the whole list, for the error text. A tool result must come right after
    an assistant turn with tool calls (or another result), and its id, when given, must be one of that turn's.
    """
    open_ids: set[str] | None = None
    for position, message in enumerate(messages, start=first_index):
        if message.role == "assistant":
            open_ids = {call.id for call in message.tool_calls} if message.tool_calls else None
        elif message.role == "tool":
            if open_ids is None:
                raise HistoryError(
                    f"message {position} is a tool result, but no assistant turn with tool calls comes right before "
                    "it; put the assistant's tool call before its result"
                )
            if message.tool_call_id is not None and message.tool_call_id not in open_ids:
                known = ", ".join(sorted(open_ids)) or "none"
                raise HistoryError(
                    f"message {position} answers tool call {message.tool_call_id!r}, which the assistant turn before "
                    f"it did not make (its calls: {known})"
                )
        else:
            open_ids = None
