"""Runs calls against a server: admits them through a gate, follows their streams, takes them up again, ends them.

Invariants: a call is counted as running until the server itself says that it is over, so that an idle engine is idle;
no call begins while the gate is closed; the server's request ids are of one length, because it aborts by prefix. Not
here: when the gate closes and when weights change (`engine`, `weights`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from gyre_core import FinishReason, InfrastructureError

from gyre_sglang.calls import Call, Segment
from gyre_sglang.client import Client, Pace
from gyre_sglang.facts import ModelFacts, ServerFacts
from gyre_sglang.options import SGLangOptions
from gyre_sglang.wire import Piece, StreamReader, generate_body

log = logging.getLogger("gyre.sglang")

ABORT_EVERY_S = 0.25
"""The server forgets an abort that comes before the call it means; so it is asked again until the call is over."""
END_PATIENCE_S = 60.0
LOADS = 3
"""How often a call goes on from what it has when shared pages that were found have gone or are damaged. The server does
not look up a page that failed again, so the next time it computes the rest."""


@dataclass(slots=True)
class Counters:
    """Tokens since the engine was made."""

    prefilled: int = 0
    cached: int = 0
    sampled: int = 0


class Driver:
    """The calls of one server from its start to its end."""

    def __init__(
        self, client: Client, facts: ServerFacts, model: ModelFacts, options: SGLangOptions, counters: Counters
    ) -> None:
        self.client, self.facts, self.counters = client, facts, counters
        self.version = -1
        """Policy version of the weights in use."""
        self.cache_key = ""
        """Names the weights in use for the prefix cache."""
        self.gate = asyncio.Event()
        self.calls: set[Call] = set()
        self.closing = False
        self._model, self._options = model, options
        self._tasks: set[asyncio.Task[None]] = set()
        self._progress = asyncio.get_running_loop().time()
        self._watchdog = asyncio.create_task(self._watch())

    # Calls

    def submit(self, call: Call) -> None:
        """Take a call; its items come from now on."""
        if not self.calls:
            self._progress = asyncio.get_running_loop().time()
        self.calls.add(call)
        self._spawn(self._drive(call))

    def find(self, request_id: str) -> Call | None:
        """The call of that id that is not over."""
        mine = (call for call in self.calls if call.request.request_id == request_id and not call.over.is_set())
        return next(mine, None)

    def cut(self, call: Call) -> None:
        """End a call with ABORT as soon as the server lets it go."""
        if not call.cut.is_set():
            call.cut.set()
            self._end_segment(call)

    async def cut_all(self) -> None:
        """End every call with ABORT; returns when the server has let all go."""
        calls = list(self.calls)
        for call in calls:
            self.cut(call)
        await self._all_over(calls, "ending all calls")

    def unsampled(self) -> list[Call]:
        """Those that have no token yet: none would say that their prompt was computed by other weights."""
        return [call for call in self.live() if not call.sampled_ids]

    async def restart(self, live: Sequence[Call]) -> None:
        """End the segments of these calls; they go on, from what they have, when the gate opens. A paused server
        ends none."""
        for call in live:
            call.restart = True
            self._end_segment(call)
        for _ in range(int(END_PATIENCE_S / 0.01)):
            if not any(call.segment is not None and not call.over.is_set() for call in live):
                return
            await asyncio.sleep(0.01)
        raise self._stuck("ending the running segments")

    def live(self) -> list[Call]:
        """Calls that the server has."""
        return [call for call in self.calls if call.segment is not None and not call.over.is_set()]

    async def catch_up(self) -> None:
        """Return when every token that has arrived is with its call."""
        await asyncio.sleep(0)  # readers that have been woken come first
        for segment in [call.segment for call in self.live()]:
            if segment is not None and segment.pace is not None:
                await segment.pace.catch_up()

    def turn(self, version: int, cache_key: str) -> None:
        """The weights in use are others now; nothing of the old ones is still on its way."""
        self.version, self.cache_key = version, cache_key
        for call in self.calls:
            call.turn(version)

    def fail(self, error: InfrastructureError) -> None:
        """End every call with an error, without asking the server: it sees that nobody reads any more."""
        for call in self.calls:
            call.fail(error)
        for task in list(self._tasks):
            task.cancel()

    def open(self) -> None:
        """Let calls in."""
        self._progress = asyncio.get_running_loop().time()
        self.gate.set()

    async def close(self) -> None:
        """End what is left without asking the server, which is gone: with ABORT, and all that was sampled."""
        self.closing = True
        self._watchdog.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._watchdog, *self._tasks, return_exceptions=True)
        await self.client.close()

    # Inside

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drive(self, call: Call) -> None:
        try:
            while not call.over.is_set():
                await _first_of(self.gate, call.cut)
                if call.cut.is_set():
                    call.end(FinishReason.ABORT)
                elif self.gate.is_set():  # it may have been closed since, before this task's turn
                    await self._run_segment(call)
        except InfrastructureError as error:
            if self.closing:
                call.end(FinishReason.ABORT)
            call.fail(error)
        finally:
            call.end(FinishReason.ABORT)  # cancelled by `close`; does nothing to a call that is over
            call.segment = None
            self.calls.discard(call)

    async def _run_segment(self, call: Call) -> None:
        """One request to the server, to its end."""
        context = call.context
        segment = call.segment = Segment(secrets.token_hex(12), len(call.sampled_ids), [(0, self.version)])
        body = generate_body(
            call.request, rid=segment.rid, prompt=context, max_tokens=call.max_tokens - segment.start,
            cache_key=self.cache_key, seeded=self.facts.deterministic, version=self.version,
            routed_from=call.routed_from,
        )  # fmt: skip
        reader = StreamReader(
            call.doing, self._model.vocab, len(context), incremental=self.facts.incremental,
            experts_per_token=self._model.experts_per_token, routed_from=call.routed_from,
        )  # fmt: skip
        last: Piece | None = None
        first = True
        loop = asyncio.get_running_loop()
        pace = segment.pace = Pace(self._options.chunk_s)
        async with aclosing(self.client.stream("/generate", body, call.doing, pace)) as blocks:
            async for block in blocks:
                self._progress = loop.time()
                piece = reader.feed(block)
                if piece is None:
                    continue
                if first and not piece.lost_load:
                    self._count_prompt(call, len(context), piece)
                    first = False
                self.counters.sampled += len(piece.token_ids)
                call.add(piece.token_ids, piece.logprobs)
                if piece.finish is not None:
                    last = piece
        if last is None:
            raise InfrastructureError(
                call.doing, got=f"an answer that breaks off after {segment.sampled} tokens",
                expected="one that says why it ends", fix="The server may be going down; look at its output.",
            )  # fmt: skip
        call.check(last.spans)
        self._after(call, last)

    def _count_prompt(self, call: Call, prompt: int, piece: Piece) -> None:
        if call.cached_tokens is None:
            call.cached_tokens = piece.cached_tokens
        self.counters.cached += piece.cached_tokens
        self.counters.prefilled += prompt - piece.cached_tokens

    def _after(self, call: Call, last: Piece) -> None:
        """The segment is over: so is the call, or it goes on with another."""
        call.segment, call.running = None, False
        restarted, call.restart = call.restart, False
        if restarted and not call.sampled_ids:
            call.cached_tokens = None  # it begins anew
        full = len(call.sampled_ids) >= call.max_tokens
        if last.finish == "stop" and last.matched in call.request.sampling.stop_token_ids:
            call.end(FinishReason.STOP, last.routed)
        elif last.finish == "length" or full:
            call.end(FinishReason.LENGTH, last.routed)
        elif last.finish == "stop" or (restarted and not call.cut.is_set()):
            return  # the model's own end token, which was not asked for; or new weights: it goes on
        elif last.lost_load and not call.cut.is_set() and call.lost_loads < LOADS:
            call.lost_loads += 1
            log.warning("%s: shared KV pages could not be read; they are computed", call.doing)
        elif last.fault and not call.cut.is_set():
            raise InfrastructureError(
                call.doing, got=f"a call the server ended itself: {last.fault}", expected="one it runs to its end",
                fix="Its KV pool or memory may be too small for the calls it is given.",
            )  # fmt: skip
        else:
            call.end(FinishReason.ABORT, last.routed)

    def _end_segment(self, call: Call) -> None:
        if call.segment is not None:
            self._spawn(self._abort_until_over(call, call.segment))

    async def _abort_until_over(self, call: Call, segment: Segment) -> None:
        """The server passes one abort of a call on, even to a scheduler that does not know the call, because it waits
        for the end of a pause: a call that has no token is not ended before that."""
        while call.segment is segment:
            if segment.sampled or not self.client.paused:
                with contextlib.suppress(InfrastructureError):  # the stream says what is wrong with the server
                    await self.client.post("/abort_request", {"rid": segment.rid}, self._options.request_timeout_s)
            await asyncio.sleep(ABORT_EVERY_S)

    async def _all_over(self, calls: Iterable[Call], doing: str) -> None:
        try:
            async with asyncio.timeout(END_PATIENCE_S):
                for call in calls:
                    await call.over.wait()
        except TimeoutError as error:
            raise self._stuck(doing) from error

    def _stuck(self, doing: str) -> InfrastructureError:
        return InfrastructureError(
            f"{doing} on SGLang of {self.client.name}", got=f"calls that still run after {END_PATIENCE_S:g} s",
            expected="none", fix="The server may hang; look at its output.",
        )  # fmt: skip

    async def _watch(self) -> None:
        """Fail the calls of a server that says nothing any more."""
        patience = self._options.stall_s
        while True:
            await asyncio.sleep(min(1.0, patience / 4))
            silent = asyncio.get_running_loop().time() - self._progress
            if not self.gate.is_set() or not self.live() or silent < patience:
                continue
            error = InfrastructureError(
                f"running {len(self.live())} calls on SGLang of {self.client.name}",
                got=f"not a word in {silent:.0f} s", expected="a token now and then",
                fix="The server hangs; look at its output. Raise engine.stall_s if it was only slow.",
            )  # fmt: skip
            self.fail(error)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
