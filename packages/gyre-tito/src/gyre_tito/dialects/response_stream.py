"""Response objects and the event stream of the OpenAI responses dialect.

Invariant: the items that the events build up are the items of the final response object, in the same order and with the
same ids. Writes only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from gyre_tito.dialects import common
from gyre_tito.dialects.chat import token_logprob
from gyre_tito.requests import Answer, ApiError, Choice, Delta, Started, TokenLogprob


def output_items(answer: Answer) -> list[dict[str, Any]]:
    """A turn as items: reasoning, message, function calls."""
    choice = answer.choices[0]
    turn, name = choice.turn, answer.answer_id
    items: list[dict[str, Any]] = []
    if turn.reasoning is not None:
        items.append(reasoning_item(name, turn.reasoning))
    if turn.content or not turn.tool_calls:
        told = tokens_of_text(choice.logprobs, turn.content, turn.reasoning or "")
        items.append(message_item(name, turn.content, _text_status(choice), told))
    for number, call in enumerate(turn.tool_calls):
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def reasoning_item(name: str, text: str) -> dict[str, Any]:
    """A reasoning item."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": content, "status": "completed"}


def _text_status(choice: Choice) -> str:
    return "incomplete" if choice.finish == "length" and not choice.turn.tool_calls else "completed"


def message_item(name: str, text: str, status: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    """A message item; without content while it is in progress."""
    content = [] if status == "in_progress" else [text_part(text, logprobs)]
    return {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": status, "content": content}


def _spelling(tokens: Sequence[TokenLogprob], text: str, after: str = "") -> tuple[int, int] | None:
    """First and end of the tokens that spell `text` once `after` was spelled: not the reasoning, nor markup around.
    None when no token begins it, but for space before: a character may lie over several tokens."""
    starts = [0, *accumulate(len(one.text) for one in tokens)]
    spelled = "".join(one.text for one in tokens)
    at = spelled.find(text, max(0, spelled.find(after)) + len(after) if after in spelled else 0)
    while at >= 0:
        first = bisect_right(starts, at) - 1
        if not spelled[starts[first] : at].strip():
            return first, bisect_left(starts, at + len(text))
        at = spelled.find(text, at + 1)
    return None


def tokens_of_text(tokens: Sequence[TokenLogprob], text: str, reasoning: str) -> Sequence[TokenLogprob]:
    """The tokens of a message's text; all that were sampled when it cannot be told which."""
    spelled = _spelling(tokens, text, reasoning)
    return tokens if spelled is None else tokens[slice(*spelled)]


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    """A part of a message item."""
    shown = [token_logprob(one) for one in logprobs]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": shown}


def response_object(
    echo: Mapping[str, Any],
    model: str,
    name: str,
    created: int,
    items: list[dict[str, Any]],
    answer: Answer | None,
) -> dict[str, Any]:
    """A response object; unfinished while `answer` is None."""
    cut = answer is not None and answer.choices[0].finish == "length"
    status = "in_progress" if answer is None else "incomplete" if cut else "completed"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "model": model,
        "output": items,
        "usage": None if answer is None else usage(answer),
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None},
        **echo,
    }


def usage(answer: Answer) -> dict[str, Any]:
    """Token counts."""
    return {
        "input_tokens": answer.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answer.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": answer.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }


class ResponseStream:
    """Events of one streamed response."""

    def __init__(self, echo: Mapping[str, Any], model: str) -> None:
        self._echo = echo
        self._model = model
        self._sequence = 0
        self._name = ""
        self._created = 0
        self._open: str | None = None
        self._text = ""
        self._logprobs: list[TokenLogprob] = []
        self._told = 0  # of the logprobs: those up to here are told or no part of the text
        self._reasoning = ""
        self._items: list[dict[str, Any]] = []

    def start(self, started: Started) -> bytes:
        """`response.created` and `response.in_progress`."""
        self._name, self._created = started.answer_id, started.created
        begun = response_object(self._echo, self._model, self._name, self._created, [], None)
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, delta: Delta) -> bytes:
        """Reasoning and text."""
        out = b""
        self._logprobs.extend(delta.logprobs)
        if delta.reasoning:
            out += self._switch("reasoning")
            self._text += delta.reasoning
            self._reasoning += delta.reasoning
            out += self._event("response.reasoning_text.delta", **self._place(), delta=delta.reasoning)
        if delta.content:
            out += self._switch("message")
            self._text += delta.content
            shown = [token_logprob(one) for one in self._untold(delta.content)]
            out += self._event("response.output_text.delta", **self._place(), delta=delta.content, logprobs=shown)
        return out

    def _untold(self, text: str) -> Sequence[TokenLogprob]:
        """The tokens of this further text; what can not be told now is told when the text is done."""
        new = self._logprobs[self._told :]
        spelled = _spelling(new, text, "" if self._told else self._reasoning)
        if spelled is None:
            return ()
        self._told += spelled[1]
        return new[slice(*spelled)]

    def ping(self) -> bytes:
        """A comment, which clients skip."""
        return b": still working\n\n"

    def error(self, error: ApiError) -> bytes:
        """An error event; the stream ends after it."""
        shown = common.openai_error(error)["error"]
        return self._event("error", code=shown["code"], message=shown["message"], param=shown["param"])

    def end(self, answer: Answer) -> bytes:
        """Function calls and the finished response."""
        out = b""
        if not self._items and self._open is None and not answer.choices[0].turn.tool_calls:
            out += self._switch("message")
        out += self._close(_text_status(answer.choices[0]))
        for item in output_items(answer):
            if item["type"] == "function_call":
                out += self._call(item)
        done = response_object(self._echo, self._model, self._name, self._created, self._items, answer)
        return out + self._event(f"response.{done['status']}", response=done)

    def _call(self, item: dict[str, Any]) -> bytes:
        begun = {**item, "arguments": "", "status": "in_progress"}
        place = {"item_id": item["id"], "output_index": len(self._items)}
        out = self._event("response.output_item.added", output_index=len(self._items), item=begun)
        out += self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        out += self._event(
            "response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"]
        )
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        return out

    def _switch(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        out = self._close()
        self._open, self._text = kind, ""
        if kind == "reasoning":
            item = {**reasoning_item(self._name, ""), "status": "in_progress"}
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        else:
            item = message_item(self._name, "", "in_progress")
            part = text_part("")
        out += self._event("response.output_item.added", output_index=len(self._items), item=item)
        return out + self._event("response.content_part.added", **self._place(), part=part)

    def _close(self, status: str = "completed") -> bytes:
        if self._open is None:
            return b""
        if self._open == "reasoning":
            item = reasoning_item(self._name, self._text)
            part: dict[str, Any] = {"type": "reasoning_text", "text": self._text}
            out = self._event("response.reasoning_text.done", **self._place(), text=self._text)
        else:
            told = tokens_of_text(self._logprobs, self._text, self._reasoning)
            item = message_item(self._name, self._text, status, told)
            part = item["content"][0]
            out = self._event("response.output_text.done", **self._place(), text=self._text, logprobs=part["logprobs"])
        out += self._event("response.content_part.done", **self._place(), part=part)
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return out

    def _place(self) -> dict[str, Any]:
        prefix = "rs" if self._open == "reasoning" else "msg"
        return {"item_id": f"{prefix}_{self._name}", "output_index": len(self._items), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return common.event(data, kind)
