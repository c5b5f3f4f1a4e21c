"""One conversation of the agent: calls the model, uses tools, compacts, and ends.

Invariant: ends by an answer without a tool call, or by a limit; every mistake of the model costs it a turn and comes
back to it as text. All conversations of an execution share one `Budget`. Not here: HTTP, processes.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gyre_core import ExecutionJob, HarnessEvents

from gyre_harnesses.options import ShellOptions
from gyre_harnesses.shell import history
from gyre_harnesses.shell.chat import Answer, ChatClient, ContextFullError
from gyre_harnesses.shell.tools import FileTools, ToolCall, ToolMistakeError, parse_call, schemas


@dataclass(slots=True)
class Budget:
    """What an execution has used, over all of its sessions."""

    deadline: float | None
    """Of time.monotonic()."""
    sampled_left: int | None
    context_limit: int | None = None
    answered: int = 0
    sampled: int = 0
    longest_context: int = 0
    tool_calls: int = 0
    sub_agents: int = 0
    compactions: int = 0
    mistakes: int = 0

    began: float = field(default_factory=time.monotonic)

    def used(self) -> float:
        """Seconds since the execution began, its earlier lives included."""
        return time.monotonic() - self.began

    def go_on(self, counts: Mapping[str, int], seconds: float) -> None:
        """Count what an earlier life of the execution used."""
        for name in _COUNTED:
            setattr(self, name, counts[name])
        self.began -= seconds
        if self.deadline is not None:
            self.deadline -= seconds
        if self.sampled_left is not None:
            self.sampled_left -= self.sampled

    def seconds_left(self) -> float:
        """Until the deadline; a large number when there is none."""
        return 1e9 if self.deadline is None else self.deadline - time.monotonic()

    def note(self, answer: Answer) -> None:
        """Count an answer's tokens."""
        self.answered += 1
        self.sampled += answer.sampled_tokens
        self.longest_context = max(self.longest_context, answer.prompt_tokens + answer.sampled_tokens)
        if self.sampled_left is not None:
            self.sampled_left -= answer.sampled_tokens

    def counts(self) -> dict[str, int]:
        """What is counted, for another life of the execution."""
        return {name: getattr(self, name) for name in _COUNTED}

    def room(self, size: int) -> int | None:
        """Tokens that a conversation of `size` tokens may still grow by; None without a limit."""
        return None if self.context_limit is None else self.context_limit - size


_COUNTED = (
    "answered",
    "sampled",
    "longest_context",
    "tool_calls",
    "sub_agents",
    "compactions",
    "mistakes",
)


class LimitError(Exception):
    """A limit of the whole execution: `wall`, `context` or `sampled_tokens`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a conversation ended: `done`, or `turns` when its turn limit cut it."""

    how: str
    text: str


@dataclass(slots=True)
class Conversation:
    """One session of an execution."""

    job: ExecutionJob
    options: ShellOptions
    chat: ChatClient
    files: FileTools
    events: HarnessEvents
    budget: Budget
    session: str
    parent: str | None
    prompt: str
    max_turns: int | None
    depth: int = 0
    turns: int = 0
    _since: int = 0
    _children: int = 0
    _size: int = 0
    _messages: list[history.Message] = field(default_factory=list)

    @property
    def system(self) -> str | None:
        """The task's system message, or else the recipe's."""
        return self.job.task.system if self.job.task.system is not None else self.options.system

    @property
    def offered(self) -> Sequence[str]:
        """Tools of this depth."""
        deep = self.depth >= self.options.sub_agent_depth
        return [name for name in self.options.tools if not (deep and name == "task")]

    async def run(self) -> Outcome:
        """To its end; LimitError and InfrastructureError pass through."""
        text = ""
        if self.parent is None and self.job.state:
            text = self._go_on(self.job.state)
        else:
            self._messages = history.opening(self.system, self.prompt)
        while self.max_turns is None or self.turns < self.max_turns:
            answer = await self._call(self._messages)
            text = answer.text or text
            self._messages.append(answer.message)
            if answer.calls:
                for raw in answer.calls:
                    self._messages.append(await self._use(raw))
            else:
                problem = self._spoilt(answer)
                if problem is None:
                    return Outcome("done", answer.text)
                self.budget.mistakes += 1
                self._messages.append({"role": "user", "content": problem})
            await self._compact()
            if self.parent is None:
                await self.events.resting(partial(self._state, text))
        return Outcome("turns", text)

    def _state(self, text: str) -> bytes:
        """All that this conversation needs to go on, while no sub-agent runs."""
        return json.dumps(
            {
                "messages": self._messages,
                "text": text,
                "turns": self.turns,
                "since": self._since,
                "children": self._children,
                "size": self._size,
                "seconds": self.budget.used(),
                "counts": self.budget.counts(),
            }
        ).encode()

    def _go_on(self, state: bytes) -> str:
        """Take up what `_state` put down; returns the last answer's text."""
        told = json.loads(state)
        self._messages = list(told["messages"])
        self.turns, self._since = told["turns"], told["since"]
        self._children, self._size = told["children"], told["size"]
        self.budget.go_on(told["counts"], told["seconds"])
        return str(told["text"])

    async def _call(self, messages: Sequence[history.Message]) -> Answer:
        budget = self.budget
        most = self.job.limits.max_call_tokens
        for room, limit in ((budget.sampled_left, "sampled_tokens"), (budget.room(self._size), "context")):
            if room is not None:
                if room <= 0:
                    raise LimitError(limit)
                most = min(most, room)
        number = self.turns + 1
        body: dict[str, Any] = {
            "messages": list(messages),
            "temperature": self.job.temperature,
            "top_p": self.job.top_p,
            "max_tokens": most,
            **self.options.extra_body,
        }
        if self.offered:
            body["tools"] = schemas(self.offered, self.options.descriptions)
        if self.options.send_seed:
            body["seed"] = zlib.crc32(f"{self.job.seed}/{self.session}/{number}".encode()) & 0x7FFFFFFF
        try:
            async with asyncio.timeout(max(0.0, budget.seconds_left())):
                answer = await self.chat.call(
                    body, session=self.session, parent=self.parent, key=f"{self.job.execution}/{self.session}/{number}"
                )
        except TimeoutError:
            if self.chat.trouble:
                raise self.chat.failed() from None
            raise LimitError("wall") from None
        except ContextFullError:
            raise LimitError("context") from None
        self.turns = number
        self._since += 1
        self._size = answer.prompt_tokens + answer.sampled_tokens
        budget.note(answer)
        self.events.turn(self.session, number)
        return answer

    def _spoilt(self, answer: Answer) -> str | None:
        """What to tell the model when its answer is not an end, though it holds no readable call."""
        if answer.finish_reason == "length":
            return f"[cut: an answer has at most {self.job.limits.max_call_tokens} tokens]"
        if any(marker in answer.text for marker in self.options.call_markers):
            return "error: the tool call could not be read"
        return None

    async def _use(self, raw: Mapping[str, Any]) -> history.Message:
        """Use one tool; the message that tells the model what came of it."""
        call_id = str(raw.get("id") or "")
        try:
            call = parse_call(raw, self.offered)
        except ToolMistakeError as mistake:
            self.budget.mistakes += 1
            return {"role": "tool", "tool_call_id": call_id, "content": str(mistake)}
        left = self.budget.seconds_left()
        if left <= 0:
            raise LimitError("wall")
        self.budget.tool_calls += 1
        began = time.monotonic()
        self.events.tool_started(self.session, call.name)
        try:
            if call.name == "task":
                text = await self._delegate(call)
            else:
                text = await self.files.use(call, min(self.job.limits.tool_s, left))
        finally:
            self.events.tool_ended(self.session, call.name, time.monotonic() - began)
        return {"role": "tool", "tool_call_id": call_id, "content": text}

    async def _delegate(self, call: ToolCall) -> str:
        self._children += 1
        self.budget.sub_agents += 1
        number = (
            f"{self._children}" if self.parent is None else f"{self.session.removeprefix('task-')}.{self._children}"
        )
        child = Conversation(
            self.job,
            self.options,
            self.chat,
            self.files,
            self.events,
            self.budget,
            session=f"task-{number}",
            parent=self.session,
            prompt=call.arguments["prompt"].encode("utf-8", "replace").decode(),
            max_turns=self.options.sub_agent_turns,
            depth=self.depth + 1,
        )
        try:
            outcome = await child.run()
        except LimitError as limit:
            if str(limit) != "context":
                raise
            outcome = Outcome("context", "")
        text = outcome.text.encode("utf-8", "replace")[: self.job.limits.tool_output_bytes].decode("utf-8", "ignore")
        if outcome.how != "done":
            return f"{text}\n[sub-agent stopped: {outcome.how}]".lstrip("\n")
        return text.strip() or "(no output)"

    def _due(self) -> bool:
        options = self.options
        by_turns = options.compact_after_turns is not None and self._since >= options.compact_after_turns
        by_tokens = options.compact_tokens is not None and self._size >= options.compact_tokens
        return options.compact != "none" and (by_turns or by_tokens)

    async def _compact(self) -> None:
        if not self._due():
            return
        if self.options.compact == "elide":
            shorter = history.elide(self._messages, self.options.compact_keep, self.options.elided_text)
            if shorter is None:
                return
        else:
            if self.max_turns is not None and self.turns >= self.max_turns:
                return
            asked = [*self._messages, {"role": "user", "content": self.options.summary_prompt}]
            summary = (await self._call(asked)).text.strip()
            shorter = history.restart(self.system, self.prompt, summary)
        self._messages = shorter
        self._since = self._size = 0
        self.budget.compactions += 1
        self.events.compacted(self.session)
