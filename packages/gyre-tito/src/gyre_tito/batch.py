"""The calls of one request: waiting for them, streaming them, and making the answer of them.

Invariant: `Answer` is made only when every call is on disk. What a client saw of a streamed turn is what its history
will be matched against. If the last reader goes away, all calls of the request are cancelled (and still recorded);
those of a request that its client named are given `grace` seconds first, in which it may be asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from gyre_tito.backend import BackendOverloadedError, PromptTooLongError
from gyre_tito.calls import CallRun
from gyre_tito.chat_format import ParsedTurn
from gyre_tito.execution import Execution
from gyre_tito.requests import Answer, ApiError, Choice, Delta, Finish, Piece, Ping, SamplingRequest, Started
from gyre_tito.schema import StoreError
from gyre_tito.streaming import GrowingText

_FIRST_WAIT = 10.0
_QUIET = 15.0
_ANSWERED = ("stop", "length", "stop_string")


@dataclass(slots=True, eq=False)
class Batch:
    """The calls of one request, in the order of its choices.

    `watchers`: readers that wait for it. `repeated`: it only tells again what was recorded before.
    """

    execution: Execution
    requested: SamplingRequest
    prefill: str = ""
    grace: float = 0.0
    repeated: bool = False
    watchers: int = 1
    runs: list[CallRun] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    turns: dict[int, ParsedTurn] = field(default_factory=dict)
    _texts: list[GrowingText] = field(default_factory=list)
    _last: dict[int, tuple[str, str]] = field(default_factory=dict)
    _left: bool = False

    def seen_turn(self, run: CallRun, turn: ParsedTurn) -> ParsedTurn:
        """The finished turn as the client will have seen it, which is what its next request repeats."""
        number = self.runs.index(run)
        content, reasoning, seen = self._texts[number].finish(turn)
        self._last[number] = (content, reasoning)
        self.turns[number] = seen
        return seen

    def add(self, run: CallRun) -> None:
        """One more call of this request."""
        self.runs.append(run)
        self._texts.append(GrowingText(self.prefill, run.reading.stop))

    async def finish(self) -> Answer:
        """Wait for every call. Error: `ApiError` if one was cut."""
        try:
            await self.wait()
        finally:
            self.leave()
        return self.answer()

    async def wait(self) -> None:
        """Until every call is recorded, however it ended."""
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def stream(self, *, begin: bool = True) -> AsyncGenerator[Piece]:
        """`Started` with the first token (or after a while), `Delta`s, at last the `Answer`. Error: `ApiError`.

        `begin=False`: the reader has been told that it started.
        """
        sent = [0] * len(self.runs)
        ended = asyncio.gather(*self.tasks, return_exceptions=True)
        ended.add_done_callback(lambda _: self.changed.set())
        started = not begin
        try:
            while not ended.done():
                try:
                    await asyncio.wait_for(self.changed.wait(), _QUIET if started else _FIRST_WAIT)
                except TimeoutError:
                    yield Ping() if started else self.started()
                    started = True
                    continue
                self.changed.clear()
                for number, run in enumerate(self.runs):
                    if run.outcome != "running" or not self._texts[number].due(len(run.ids)):
                        continue
                    if not started:
                        started = True
                        yield self.started()
                    content, reasoning = self._texts[number].grow(run.turn(), len(run.ids))
                    if delta := self._delta(number, content, reasoning, sent):
                        yield delta
            answer = self.answer()
            if not started:
                yield self.started()
            for number in range(len(self.runs)):
                if delta := self._delta(number, *self._last[number], sent):
                    yield delta
            yield answer
        finally:
            self.leave()

    def again(self) -> Batch:
        """These calls for another reader, once they have ended."""
        other = Batch(self.execution, self.requested, self.prefill, repeated=True)
        for run in self.runs:
            other.add(run)
        for number, turn in self.turns.items():
            other.seen_turn(self.runs[number], turn)
        return other

    def leave(self) -> None:
        """The first reader is gone, with or without its answer."""
        if not self._left:
            self._left = True
            self.unwatched()

    def unwatched(self) -> None:
        """A reader is gone; with the last one go the calls that still run."""
        self.watchers -= 1
        if self.watchers or all(task.done() for task in self.tasks):
            return
        if self.grace:
            asyncio.get_running_loop().call_later(self.grace, self._expire)
        else:
            self.cancel()

    def _expire(self) -> None:
        if not self.watchers:
            self.cancel()

    @property
    def answerable(self) -> bool:
        """Whether every call ended so that a client can be answered."""
        return len(self.turns) == len(self.runs) and all(
            run.error is None and run.outcome in _ANSWERED for run in self.runs
        )

    def cancel(self) -> None:
        """Stop what still runs."""
        for task in self.tasks:
            task.cancel()

    def _delta(self, number: int, content: str, reasoning: str, sent: list[int]) -> Delta | None:
        logprobs = self.runs[number].token_logprobs(sent[number]) if self.requested.logprobs else ()
        sent[number] += len(logprobs)
        if not (content or reasoning or logprobs):
            return None
        return Delta(number, content, reasoning, logprobs)

    def started(self) -> Started:
        """The head of a streamed answer."""
        first = self.runs[0]
        return Started(self._name(), int(first.started_at), len(first.plan.prompt_ids))

    def _name(self) -> str:
        return self.runs[0].call.call_id.replace("#", "-")

    def answer(self) -> Answer:
        """All choices, once every call is recorded. Error: `ApiError` if one was cut."""
        for run in self.runs:
            if run.error is not None or run.outcome not in _ANSWERED:
                raise _failure(run)
        choices = []
        for number, run in enumerate(self.runs):
            turn = self.turns[number]
            finish: Finish = "length" if run.outcome == "length" else "stop"
            if run.stop_string is not None:
                finish = "stop_string"
            if turn.tool_calls and finish == "stop":
                finish = "tool_calls"
            logprobs = run.token_logprobs() if self.requested.logprobs else ()
            choices.append(Choice(number, run.call.call_id, turn, finish, run.stop_string, len(run.ids), logprobs))
        first = self.runs[0]
        return Answer(
            self._name(),
            int(first.started_at),
            tuple(choices),
            len(first.plan.prompt_ids),
            first.cached_tokens,
            self.prefill,
        )


@dataclass(slots=True, eq=False)
class Joined:
    """A second reader of a running request: waits for its end, then tells all of it."""

    batch: Batch
    repeated: bool = True
    _watching: bool = field(default=False, init=False)

    async def finish(self) -> Answer:
        """The same answer that the first reader gets. Error: `ApiError`, the same too."""
        try:
            self._watch()
            await self.batch.wait()
            return self.batch.answer()
        finally:
            self.leave()

    async def stream(self) -> AsyncGenerator[Piece]:
        """The answer in one piece, with signs of life before it."""
        waiting = asyncio.ensure_future(self.batch.wait())
        try:
            self._watch()
            started = False
            while not (await asyncio.wait({waiting}, timeout=_QUIET))[0]:
                yield Ping() if started else self.batch.started()
                started = True
            again = self.batch.again()
        finally:
            waiting.cancel()
            self.leave()
        async for piece in again.stream(begin=not started):
            yield piece

    def _watch(self) -> None:
        self._watching = True
        self.batch.watchers += 1

    def leave(self) -> None:
        """This reader is gone."""
        if self._watching:
            self._watching = False
            self.batch.unwatched()


Reader = Batch | Joined


def _failure(run: CallRun) -> ApiError:
    error = run.error
    if isinstance(error, PromptTooLongError):
        return ApiError(400, "context_length", str(error) or "the prompt does not fit the model's context")
    if isinstance(error, BackendOverloadedError):
        return ApiError(503, "overloaded", str(error) or "the engine has no room now; try again shortly")
    if isinstance(error, StoreError):
        return ApiError(503, "engine", f"the answer could not be recorded: {error}")
    what = f"{type(error).__name__}: {error}" if error is not None else f"the call ended as {run.outcome!r}"
    return ApiError(502, "engine", f"call {run.call.call_id} was cut after {len(run.ids)} tokens ({what})")
