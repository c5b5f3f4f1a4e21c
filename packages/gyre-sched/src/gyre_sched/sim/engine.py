"""A simulated inference engine: calls share a cell, faster when there are fewer.

Decoding is processor sharing in virtual time: all decoding calls advance by the same number of tokens, so one number
per cell and one heap say who ends next, however the speed changes. Prefills are served one after another and take a
fixed share of the cell while others decode (chunked prefill), all of it otherwise. Invariants: at most ``slots`` calls
are in the batch; running and resident contexts fit the cache (paused ones are evicted, oldest first). Knows no
scheduler.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from .models import Hardware

__all__ = ["Engine", "Job"]

PREFILL_SHARE = 0.5
_EPS_TOKENS = 1e-6
_EPS_S = 1e-9


@dataclass(slots=True)
class Job:
    """A call: ``context`` cached or to be recomputed, ``fed`` new tokens, ``sampled`` tokens to be decoded."""

    session: str
    context: int
    fed: int
    sampled: float
    fill_s: float = 0.0
    """Prefill time still needed, in seconds of the whole cell."""
    ends_at: float = 0.0
    """On the cell's virtual clock, once it decodes."""
    decoding: bool = False


class Engine:
    """One cell's engine."""

    __slots__ = (
        "_clock",
        "_fill_rate",
        "_heap",
        "_held",
        "_hw",
        "_seq",
        "_speed",
        "_stalled",
        "batch",
        "busy_s",
        "context",
        "decoding",
        "fills",
        "queue",
        "resident",
        "since",
    )

    def __init__(self, hw: Hardware) -> None:
        self._hw = hw
        self._clock = 0.0
        """Tokens that every decoding call has advanced since the beginning."""
        self._seq = 0
        self._speed = 0.0
        self._fill_rate = 0.0
        self._stalled = False
        self._heap: list[tuple[float, int, Job]] = []
        self.since = 0.0
        self.busy_s = 0.0
        """Seconds in which at least one call was in the batch."""
        self.batch: dict[str, Job] = {}
        self.decoding = 0
        self.fills: deque[Job] = deque()
        self.queue: deque[Job] = deque()
        self.resident: OrderedDict[str, int] = OrderedDict()
        """Contexts in the cache whose sessions pause, least recently used first."""
        self._held = 0
        self.context = 0
        """Context tokens of the calls in the batch."""

    # --- time ----------------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Let time pass up to ``now``."""
        passed = now - self.since
        if self.batch and passed > 0 and not self._stalled:
            self._clock += passed * self._speed
            if self.fills:
                self.fills[0].fill_s -= passed * self._fill_rate
            self.busy_s += passed
        self.since = now

    def _pace(self) -> None:
        """How fast everything goes from now on."""
        share = 1.0
        if self.fills:
            share = 1.0 - PREFILL_SHARE
            self._fill_rate = PREFILL_SHARE if self.decoding else 1.0
        if self.decoding:
            self._speed = share / self._hw.decode_step_s(self.decoding, self.context)
        else:
            self._speed = 0.0

    def next_due(self) -> float | None:
        """When a prefill or a call ends if nothing else happens."""
        heap = self._heap
        while heap and self.batch.get(heap[0][2].session) is not heap[0][2]:
            heapq.heappop(heap)
        if self._stalled:
            return None
        due = None
        if heap:
            due = self.since + max(0.0, heap[0][0] - self._clock) / self._speed
        if self.fills:
            fill = self.since + max(0.0, self.fills[0].fill_s) / self._fill_rate
            due = fill if due is None else min(due, fill)
        return due

    def stall(self, still: bool, now: float) -> None:
        """The engine stands still from now on (weights are being exchanged), or goes on."""
        self.advance(now)
        self._stalled = still

    # --- calls ---------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """A call arrives; what is resident of its context need not be prefilled."""
        self.advance(now)
        self.queue.append(job)
        self._start()
        self._pace()

    def _start(self) -> None:
        """Put queued calls into the batch while there is room."""
        hw = self._hw
        while self.queue and len(self.batch) < hw.slots:
            job = self.queue[0]
            total = job.context + job.fed
            room = hw.kv_tokens - self.context - total
            if room < 0 and self.batch:
                return
            self.queue.popleft()
            cached = min(self.forget(job.session), job.context)
            while self.resident and self._held > room:
                self._held -= self.resident.popitem(last=False)[1]
            job.fill_s = hw.prefill_s(total - cached, cached)
            job.context, job.fed = total, 0
            self.batch[job.session] = job
            self.context += total
            self.fills.append(job)

    def take_due(self, now: float) -> list[Job]:
        """Let prefills that are done decode, and return the calls that have ended by ``now``."""
        self.advance(now)
        while self.fills and self.fills[0].fill_s <= _EPS_S:
            job = self.fills.popleft()
            job.decoding = True
            job.ends_at = self._clock + job.sampled
            self.decoding += 1
            self._seq += 1
            heapq.heappush(self._heap, (job.ends_at, self._seq, job))
        ended = []
        heap = self._heap
        while heap:
            at, _, job = heap[0]
            if self.batch.get(job.session) is job:
                if at > self._clock + _EPS_TOKENS:
                    break
                self._leave(job, job.context + int(job.sampled))
                ended.append(job)
            heapq.heappop(heap)
        if ended:
            self._start()
        self._pace()
        return ended

    def _leave(self, job: Job, context: int) -> None:
        """A call leaves the batch; its context of now ``context`` tokens stays resident."""
        del self.batch[job.session]
        self.context -= job.context
        if job.decoding:
            self.decoding -= 1
        else:
            self.fills.remove(job)
        job.context = context
        self.keep(job.session, context)

    def abort(self, session: str, now: float) -> tuple[float, int, int] | None:
        """Stop a call at a token border: (tokens still to sample, context, tokens still to feed), if there is one."""
        self.advance(now)
        job = self.batch.get(session)
        if job is not None:
            # A token that is half done at this moment is done again: contexts have whole tokens.
            left = (
                min(float(math.ceil(max(1.0, job.ends_at - self._clock))), job.sampled) if job.decoding else job.sampled
            )
            self._leave(job, job.context + int(job.sampled - left))
            self._start()
            self._pace()
            return left, job.context, 0
        for queued in self.queue:
            if queued.session == session:
                self.queue.remove(queued)
                return queued.sampled, queued.context, queued.fed
        return None

    # --- cache ---------------------------------------------------------------------------------------------

    def keep(self, session: str, tokens: int) -> None:
        """A paused session's context of ``tokens`` is in the cache."""
        self.forget(session)
        self.resident[session] = tokens
        self._held += tokens

    def forget(self, session: str) -> int:
        """Drop a resident context; returns its tokens."""
        tokens = self.resident.pop(session, 0)
        self._held -= tokens
        return tokens

    def clear(self) -> None:
        """The engine sleeps: its cache is gone."""
        self.resident.clear()
        self._held = 0
