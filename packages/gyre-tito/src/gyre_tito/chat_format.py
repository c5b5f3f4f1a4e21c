"""One model's chat format: messages to prompt ids, sampled ids to a message, and the bridge between turns.

Invariants. `extend` only appends: what was sampled is never decoded and encoded again. Its work is proportional to the
new messages and the last turn. When it cannot append honestly it returns None and the caller renders afresh (a branch).

Rendering and parsing are the `renderers` package's; this module decides what to ask of it. Models it has no renderer
for go through their own chat template: the bridge is then the template's text after the last assistant turn, used only
if a probe shows that this text does not depend on what came before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from renderers.base import ParsedToolCall, Renderer, ToolCallParseStatus  # type: ignore[import-untyped]

from gyre_tito.messages import Message, ToolCall, to_renderer
from gyre_tito.tokenizer import FastTokenizer

HistoryMode = Literal["exact", "template"]
Tools = Sequence[Mapping[str, Any]]
TAIL_TOKENS = 512
_SENTINEL = "gyre7f3a9c"


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A sampled turn as text. `broken_calls` counts tool calls that did not parse; their raw text is in `content`."""

    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    reasoning_open: bool
    broken_calls: int


class ChatFormat:
    """Rendering, parsing and bridging for one model. Build it with `gyre_tito.families.load_format`."""

    def __init__(
        self,
        tokenizer: FastTokenizer,
        renderer: Renderer,
        family: str,
        history: HistoryMode = "exact",
        marking: Renderer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self.history = history
        self._renderer = renderer
        self._marking = marking or renderer  # also says which tokens a turn's author sampled; slower
        self.stop_ids: tuple[int, ...] = tuple(renderer.get_stop_token_ids())
        self._text_bridge = family == "default" and _tail_is_local(tokenizer)

    # -- messages to ids -----------------------------------------------------------------------------------------

    def render(self, messages: Sequence[Message], tools: Tools) -> NDArray[np.int32]:
        """Prompt ids int32[P] of a whole conversation, up to where the next assistant turn begins."""
        ids = self._renderer.render_ids(
            [to_renderer(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=True,
        )
        return np.asarray(ids, dtype=np.int32)

    def extend(
        self, tail: NDArray[np.int32], sampled: NDArray[np.int32], new: Sequence[Message], tools: Tools
    ) -> NDArray[np.int32] | None:
        """Ids to append to a recorded path so that the next assistant turn can begin after `new` messages.

        `tail`: the last tokens of the last prompt (`TAIL_TOKENS` are enough); `sampled`: what was sampled after it.
        Returns int32[E], or None if this format cannot append here (the caller then renders everything afresh).
        """
        foreign = not new or any(message.role == "assistant" for message in new)
        if not foreign:
            bridged = self._bridge(tail, sampled, new, tools)
            if bridged is not None or self.history == "template":
                return bridged
        if self.history == "template":
            return None
        return self._anchor_tail(sampled, new, tools)

    def _bridge(
        self, tail: NDArray[np.int32], sampled: NDArray[np.int32], new: Sequence[Message], tools: Tools
    ) -> NDArray[np.int32] | None:
        before, after = tail.tolist(), sampled.tolist()
        rendered = self._renderer.bridge_to_next_turn(
            before,
            after,
            [to_renderer(message) for message in new],
            tools=[dict(tool) for tool in tools] or None,
        )
        if rendered is None:
            return None
        size = len(before) + len(after)
        if rendered.token_ids[:size] != before + after:
            return None
        return np.asarray(rendered.token_ids[size:], dtype=np.int32)

    def _anchor_tail(
        self, sampled: NDArray[np.int32], new: Sequence[Message], tools: Tools
    ) -> NDArray[np.int32] | None:
        """What the format puts after an assistant turn: rendered behind a stand-in turn, whose tokens are cut off."""
        closed = len(sampled) > 0 and int(sampled[-1]) in self.stop_ids
        if self.family == "default":
            return self._text_tail(sampled, new, tools, closed) if self._text_bridge else None
        stand_in = [Message("user", "x"), Message("assistant", "y")]
        rendered = self._marking.render(
            [to_renderer(message) for message in (*stand_in, *new)],
            tools=None,
            add_generation_prompt=True,
        )
        if len(rendered.sampled_mask) != len(rendered.token_ids):
            return None
        last = max(
            (
                place
                for place, (index, drawn) in enumerate(
                    zip(rendered.message_indices, rendered.sampled_mask, strict=True)
                )
                if index == 1 and drawn
            ),
            default=-1,
        )
        if last < 0 or rendered.token_ids[last] not in self.stop_ids:
            return None
        return np.asarray(rendered.token_ids[last + 1 if closed else last :], dtype=np.int32)

    def _text_tail(
        self, sampled: NDArray[np.int32], new: Sequence[Message], tools: Tools, closed: bool
    ) -> NDArray[np.int32] | None:
        text = _after_sentinel(self.tokenizer, (), [to_renderer(message) for message in new])
        if text is None:
            return None
        if closed:
            close = self.tokenizer.token_text(int(sampled[-1]))
            if not text.startswith(close):
                return None
            text = text[len(close) :]
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)

    # -- ids to a message ----------------------------------------------------------------------------------------

    def parse(
        self,
        sampled: Sequence[int],
        *,
        tools: Tools,
        prompt_tail: Sequence[int],
        call_id: str,
        read_calls: bool = True,
    ) -> ParsedTurn:
        """The turn that `sampled` ids say. Tool calls that do not parse stay in the content, as the model wrote them.

        `call_id` names the tool calls that the model itself gave no id. `read_calls=False`: leave calls as text.
        """
        try:
            parsed = self._renderer.parse_response(
                list(sampled),
                tools=[dict(tool) for tool in tools] or None,
                prompt_ids=list(prompt_tail),
            )
        except (ValueError, RecursionError):  # a model may write what no parser follows: too deep, too many digits
            return ParsedTurn(self._as_written(sampled), None, (), False, int(read_calls))
        good = [call for call in parsed.tool_calls if read_calls and _usable(call)]
        bad = [call for call in parsed.tool_calls if not (read_calls and _usable(call))]
        content = parsed.content
        for call in bad:
            raw = call.raw
            if call.token_span is not None:
                raw = self.tokenizer.decode(sampled[call.token_span[0] : call.token_span[1]])
            content = f"{content}\n{raw}" if content else raw
        calls = tuple(
            ToolCall(call.id or f"call_{call_id}_{number}", str(call.name), _argument_text(call.arguments))
            for number, call in enumerate(good)
        )
        open_reasoning = parsed.reasoning_complete is False
        return ParsedTurn(content, parsed.reasoning_content, calls, open_reasoning, len(bad) if read_calls else 0)

    def _as_written(self, sampled: Sequence[int]) -> str:
        """Text of a turn, as it stands before the token that ended it."""
        end = len(sampled)
        while end and int(sampled[end - 1]) in self.stop_ids:
            end -= 1
        return self.tokenizer.decode(sampled[:end])

    def call_opening(self, name: str | None) -> str | None:
        """Text that a turn must begin with to be a tool call (of tool `name`); None if the format has none."""
        if self.family not in ("qwen3", "default") or self.tokenizer.convert_tokens_to_ids("<tool_call>") is None:
            return None
        return "<tool_call>\n" if name is None else f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": '

    def encode(self, text: str) -> NDArray[np.int32]:
        """Ids of plain text."""
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode(ids)


def _usable(call: ParsedToolCall) -> bool:
    if not call.name or call.status not in (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL):
        return False
    try:
        _argument_text(call.arguments)
    except (ValueError, RecursionError):
        return False
    return _encodes(str(call.name)) and _encodes(call.id or "")


def _argument_text(arguments: Any) -> str:
    """Arguments as JSON; half a character, which no answer can carry, stays an escape."""
    if isinstance(arguments, str):
        return arguments
    text = json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)
    return text if _encodes(text) else json.dumps(arguments)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _after_sentinel(
    tokenizer: FastTokenizer, before: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> str | None:
    """The template's text between a stand-in assistant turn and the place where the next one begins."""
    stand_in = [*before, {"role": "user", "content": "x"}, {"role": "assistant", "content": _SENTINEL}]
    text = tokenizer.template_text([*stand_in, *new], add_generation_prompt=True)
    at = text.rfind(_SENTINEL)
    return None if at < 0 else text[at + len(_SENTINEL) :]


def _tail_is_local(tokenizer: FastTokenizer) -> bool:
    """Whether the template's text after an assistant turn is independent of the history before it."""
    history = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    for new in ([], [{"role": "user", "content": "n"}]):
        try:
            short, long = _after_sentinel(tokenizer, (), new), _after_sentinel(tokenizer, history, new)
        except ValueError:
            return False
        if short is None or short != long:
            return False
    return True
