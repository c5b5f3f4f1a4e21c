"""What an execution's model calls took, which of them a limit lets through, and whose fault it is that one failed.

Invariant: a limit holds whatever a program does with its calls: those under way count as long as they may become, and
so do those that it does not wait for. A call that the endpoint failed costs nothing, and no other counts as a fault.
Not here: HTTP.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import Any

from gyre_core import HarnessEvents, Limits

from gyre_harnesses.command.asking import AnswerReader, Asked, said

_CONTEXT = re.compile(r"context.?(?:length|window)|maximum context|prompt is too long", re.IGNORECASE)
_FAULTS = (401, 403, 408, 429)
"""With 500 and more, the refusals that are not for what the program asked."""
AT_ONCE = 64
"""Calls of one program that may be under way; more wait here, and not in the endpoint's queue, which all share."""


@dataclass(slots=True)
class Tally:
    """What went through the gate."""

    answered: int = 0
    given_up: int = 0
    """Calls that the program did not wait for. They are turns too."""
    sampled: int = 0
    presumed: int = 0
    """Tokens that may have been sampled, but nobody told: of calls given up, and of answers without a count."""
    longest_context: int = 0
    refused: str | None = None
    """The limit that a call was refused for: `turns`, `sampled_tokens` or `context`."""
    fault: str | None = None
    """What is wrong with the endpoint since its last good answer."""
    turned_down: str | None = None
    """What the endpoint had against a request of the program, since its last good answer."""

    def evidence(self) -> dict[str, Any]:
        """For an execution's end."""
        return {
            "limit": self.refused,
            "sampled_tokens": self.sampled,
            "longest_context": self.longest_context,
            "presumed_tokens": self.presumed,
            "given_up": self.given_up,
            "turned_down": self.turned_down,
        }


class Desk:
    """Lets calls begin and counts how they end. `over` is set once a limit refused one; then no other begins."""

    def __init__(self, limits: Limits, events: HarnessEvents) -> None:
        self.limits, self.events = limits, events
        self.tally = Tally()
        self.over = asyncio.Event()
        self.running = self.reserved = 0
        self.idle_since: dict[str, float] = {}
        self._ended = asyncio.Event()

    async def begin(self, asked: Asked, session: str) -> Call | str:
        """The call, to be left in any case; or the limit that it is refused for.

        A limit that is only reached if calls under way become as long as they may is not reached yet: it waits. So does
        a call beside `AT_ONCE` others.
        """
        while True:
            limit, most = self._limit(asked)
            if limit is None:
                if self.running < AT_ONCE:
                    return Call(self, asked, most, session)
            elif limit == "context" or self.running == 0 or self.tally.refused is not None:
                self.refuse(limit)
                return limit
            await self._ended.wait()

    def refuse(self, limit: str) -> None:
        """Nothing goes on after this."""
        self.tally.refused = limit
        self.over.set()

    def ended(self, reserved: int) -> None:
        """A call is not under way any more: whoever waits looks again."""
        self.running -= 1
        self.reserved -= reserved
        self._ended.set()
        self._ended = asyncio.Event()

    def _limit(self, asked: Asked) -> tuple[str | None, int]:
        limits, tally = self.limits, self.tally
        most = asked.tokens(limits.max_call_tokens)
        if tally.refused is not None:
            return tally.refused, 0
        if limits.max_context_tokens is not None and tally.longest_context >= limits.max_context_tokens:
            return "context", 0
        if limits.max_turns is not None and tally.answered + tally.given_up + self.running >= limits.max_turns:
            return "turns", 0
        if limits.max_sampled_tokens is None:
            return None, most
        fits = (limits.max_sampled_tokens - tally.sampled - tally.presumed - self.reserved) // asked.answers
        if fits >= max(1, most) or (fits >= 1 and self.running == 0):
            return None, min(most, fits)
        return "sampled_tokens", 0


class Call:
    """One call under way. It ends once: answered, failed by the endpoint, turned down, or else given up."""

    def __init__(self, desk: Desk, asked: Asked, most: int, session: str) -> None:
        self.asked, self.most = asked, most
        self._desk, self._session = desk, session
        self._reserved = asked.answers * most
        self._over = False
        desk.running += 1
        desk.reserved += self._reserved
        since = desk.idle_since.pop(session, None)
        if since is not None:
            desk.events.tool_ended(session, "program", time.monotonic() - since)

    def answered(self, reader: AnswerReader) -> None:
        """It has its answer, as `reader` read it; a stream may have told of a failure instead."""
        if self._over:
            return
        desk, tally = self._desk, self._desk.tally
        if reader.error is not None:
            what = f"an answer broke off: {str(reader.error.get('message'))[:300]}"
            if "invalid_request" not in str(reader.error.get("type")):
                self.failed(what)
            else:
                tally.turned_down = what
                self.left()
            return
        self._end()
        tally.answered += 1
        tally.fault = tally.turned_down = None
        sampled = reader.sampled
        tally.sampled += sampled or 0
        tally.presumed += self._reserved if sampled is None else 0
        tally.longest_context = max(tally.longest_context, reader.prompt + (sampled or 0))
        desk.events.turn(self._session, tally.answered)
        desk.events.tool_started(self._session, "program")
        desk.idle_since[self._session] = time.monotonic()

    def refused(self, status: int, body: bytes) -> None:
        """The endpoint answered with a status other than 200, and sampled nothing."""
        tally = self._desk.tally
        why = fault(status, body)
        if why is not None:
            self.failed(why)
            return
        self._end()
        if status in (400, 413, 422) and _CONTEXT.search(body.decode("utf-8", "replace")):
            self._desk.refuse("context")
        else:
            tally.turned_down = f"HTTP {status}: {said(body)}"

    def failed(self, why: str) -> None:
        """The endpoint failed; unless its answer was whole already."""
        if not self._over:
            self._end()
            self._desk.tally.fault = why

    def left(self) -> None:
        """Nobody waits for it any more. What it sampled is not known, so it counts as long as it might have become."""
        if not self._over:
            self._end()
            self._desk.tally.given_up += 1
            self._desk.tally.presumed += self._reserved

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._desk.ended(self._reserved)


def fault(status: int, body: bytes) -> str | None:
    """What is wrong with an endpoint that answers with `status`; None when it is the request."""
    return f"HTTP {status}: {said(body)}" if status in _FAULTS or status >= 500 else None
