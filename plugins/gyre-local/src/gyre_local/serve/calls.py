"""One call inside the engine: its tokens, its blocks, what was sampled and what was handed out.

Invariant: tokens [0, computed) have KV in `blocks` and in the slot; `kv_version` names the one version they were
all computed under, or is None once an update came in between ("mixed": fit to go on with, never to be shared).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np
from gyre_core import FinishReason, GenerateChunk, SamplingParams

from gyre_local.kv.prefix import Tokens

Outcome = GenerateChunk | Exception


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Where a call's chunks go: a queue of the event loop that asked. Put into it on that loop only."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Outcome]


@dataclass(slots=True, eq=False)
class Call:
    """A running or waiting call. Made by `new_call`."""

    id: str
    session: str
    sampling: SamplingParams
    mailbox: Mailbox
    seed: int
    limit: int
    """Tokens at which it ends with LENGTH, prompt included."""
    buffer: Tokens
    length: int
    """Tokens known: prompt and sampled."""
    prompt: int
    stops: frozenset[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    slot: int = -1
    kv_version: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens found at the first admission; None before it."""
    out_ids: list[int] = field(default_factory=list)
    out_logprobs: list[float] = field(default_factory=list)
    out_versions: list[int] = field(default_factory=list)
    handed_at: float = field(default_factory=time.monotonic)
    """When the last chunk went out, or the call came in."""
    announced: bool = False

    @property
    def tokens(self) -> Tokens:
        """int32 [length]."""
        return self.buffer[: self.length]

    @property
    def sampled(self) -> int:
        """Tokens sampled so far."""
        return self.length - self.prompt

    @property
    def missing(self) -> int:
        """Tokens whose KV must be computed before the next one can be sampled (at least 1)."""
        return self.length - self.computed

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Take a sampled token; the reason when the call is over with it."""
        if self.length == len(self.buffer):
            self.buffer = np.concatenate([self.buffer, np.zeros_like(self.buffer)])
        self.buffer[self.length] = token
        self.length += 1
        self.out_ids.append(token)
        self.out_logprobs.append(logprob)
        self.out_versions.append(version)
        if token in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.length >= self.limit else None

    def chunk(self, finish: FinishReason | None) -> GenerateChunk:
        """What was sampled since the last chunk."""
        made = GenerateChunk(
            tuple(self.out_ids),
            tuple(self.out_logprobs),
            tuple(self.out_versions),
            finish,
            None if self.announced else (self.cached_tokens or 0),
        )
        self.announced = True
        self.out_ids, self.out_logprobs, self.out_versions = [], [], []
        return made


def new_call(
    call_id: str, session: str, prompt: Tokens, sampling: SamplingParams, *, seed: int, limit: int, mailbox: Mailbox
) -> Call:
    """A call that has not run yet; `limit` is the engine's own bound on tokens."""
    limit = min(limit, len(prompt) + sampling.max_tokens)
    room = min(limit, len(prompt) + 256)
    buffer = np.zeros(room, np.int32)
    buffer[: len(prompt)] = prompt
    return Call(
        call_id,
        session,
        sampling,
        mailbox,
        seed,
        limit,
        buffer,
        len(prompt),
        len(prompt),
        frozenset(sampling.stop_token_ids),
    )
