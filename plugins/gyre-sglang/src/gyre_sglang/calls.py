"""Calls in flight: what was sampled, under which version, and what the caller has not taken yet.

Invariants: a token is handed out once, in order, with the version that sampled it; a call ends once. At its end the
server's own account of versions is compared with ours, so a token is never recorded under a version that it does not
have. Not here: HTTP and when weights change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from gyre_core import (
    Array,
    CapabilityError,
    ContextLengthError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InfrastructureError,
)

from gyre_sglang.client import Pace
from gyre_sglang.facts import ModelFacts, ServerFacts
from gyre_sglang.wire import Span


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens on their way to the caller."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    finish: FinishReason | None = None
    routed: Array | None = None


@dataclass(slots=True, eq=False)
class Segment:
    """One request to the server. A call is one segment, unless it had to be taken up again."""

    rid: str
    start: int
    """Tokens of the call sampled before."""
    borders: list[tuple[int, int]]
    """(tokens of this segment before it, version from there), ascending."""
    sampled: int = 0
    pace: Pace | None = None
    """Of reading its answer."""

    def version_at(self, index: int) -> int:
        """The version we gave token `index` of this segment."""
        return next(version for at, version in reversed(self.borders) if at <= index)


@dataclass(slots=True, eq=False)
class Call:
    """A call from `generate` to its end."""

    request: GenerateRequest
    max_tokens: int
    """After clipping to the context."""
    _items: list[Sampled] = field(default_factory=list)
    _error: Exception | None = None
    _news: asyncio.Future[None] | None = None
    """Set while the caller waits: for the first item, or for the end."""
    sampled_ids: list[int] = field(default_factory=list)
    segment: Segment | None = None
    cached_tokens: int | None = None
    running: bool = False
    """Has sampled a token and goes on."""
    _held: list[Sampled] = field(default_factory=list)
    """Tokens of a call with routed experts, which come at its end: it is handed out whole."""
    cut: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is to end with ABORT."""
    restart: bool = False
    """Its segment is being ended so that it goes on under new weights."""
    lost_loads: int = 0
    """How often the server ended a segment because cached pages that it had found could not be read after all."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    finish: FinishReason | None = None

    @property
    def doing(self) -> str:
        """What an error of this call says was being done."""
        return f"sampling call {self.request.request_id!r} of session {self.request.session!r}"

    @property
    def context(self) -> Sequence[int]:
        """Prompt and what was sampled so far."""
        return [*self.request.prompt_ids, *self.sampled_ids] if self.sampled_ids else self.request.prompt_ids

    @property
    def routed_from(self) -> int:
        """First position whose experts are asked for: at the latest that of the pass that samples the first token."""
        last, wanted = len(self.request.prompt_ids) - 1, self.request.routed_from
        return last if wanted is None else min(max(wanted, 0), last)

    def add(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> None:
        """Tokens came under the segment's present version."""
        assert self.segment is not None
        self.segment.sampled += len(token_ids)
        self.sampled_ids.extend(token_ids)
        if token_ids:
            self.running = True
            sampled = Sampled(token_ids, logprobs, self.segment.borders[-1][1])
            if self.request.routed_experts:
                self._held.append(sampled)
            else:
                self._items.append(sampled)
                self._tell()

    def turn(self, version: int) -> None:
        """What comes from now on is of `version`."""
        if self.segment is not None and self.segment.borders[-1][1] != version:
            self.segment.borders.append((self.segment.sampled, version))

    def check(self, spans: Sequence[Span]) -> None:
        """Compare with the server's account; InfrastructureError when a token bears another version than we gave."""
        assert self.segment is not None
        for span in spans:
            for at in {span.start, max(span.start, span.end - 1)} if span.end > span.start else ():
                ours = self.segment.version_at(at)
                if str(ours) != span.version:
                    raise InfrastructureError(
                        self.doing,
                        got=f"token {at} sampled under version {span.version}, by the server's account",
                        expected=f"version {ours}, under which it was handed out",
                        fix="Weights were changed by somebody else, or tokens were late; use on_update = 'recompute'.",
                    )

    def end(self, finish: FinishReason, routed: Array | None = None) -> None:
        """It is over; InfrastructureError when experts were asked for and none came, but for an aborted call."""
        if self.request.routed_experts and routed is None and finish is not FinishReason.ABORT:
            raise InfrastructureError(
                self.doing, got="an answer without routed experts", expected="those of its passes",
                fix="Start the server with --enable-return-routed-experts, for a model with experts.",
            )  # fmt: skip
        if not self.over.is_set():
            self.finish, self.running = finish, False
            self.over.set()
            self._items += [*self._held, Sampled((), (), 0, finish, routed)]
            self._tell()

    def fail(self, error: Exception) -> None:
        """It is over, with an error."""
        if not self.over.is_set():
            self.running = False
            self.over.set()
            self._error = error
            self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def take(self) -> list[Sampled]:
        """What there is, at least one item; raises the call's error once all tokens before it are taken."""
        if not self._items and self._error is None:
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        items, self._items = self._items, []
        if not items and self._error is not None:
            raise self._error
        return items


def chunk_of(items: Sequence[Sampled], cached_tokens: int | None, routed_from: int) -> GenerateChunk:
    """One chunk of what was taken."""
    last = items[-1]
    return GenerateChunk(
        token_ids=tuple(token for item in items for token in item.token_ids),
        logprobs=tuple(value for item in items for value in item.logprobs),
        versions=tuple(item.version for item in items for _ in item.token_ids),
        finish=last.finish,
        cached_tokens=cached_tokens,
        routed_experts=last.routed,
        routed_from=None if last.routed is None else routed_from,
    )


def checked(
    request: GenerateRequest, model: ModelFacts, facts: ServerFacts, context_length: int
) -> tuple[GenerateRequest, int]:
    """The request with its prompt as plain ints, and how many tokens it may sample; ContextLengthError for a prompt
    that can never fit, ValueError or CapabilityError for a request that would harm the server or be misunderstood."""
    doing = f"call {request.request_id!r}"
    if request.routed_experts and not facts.routed_experts:
        raise CapabilityError(
            doing, got="a wish for routed experts", expected="none: the server does not record them",
            fix="Set engine.routed_experts, for a model with experts.",
        )  # fmt: skip
    prompt = np.asarray(request.prompt_ids, dtype=np.int64)
    if prompt.ndim != 1 or not len(prompt):
        raise ValueError(f"{doing}: got a prompt of shape {list(prompt.shape)}, expected at least one token id")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= model.vocab:
        bad = low if low < 0 else high
        raise ValueError(f"{doing}: got token id {bad}, expected ids in [0, {model.vocab}) of the vocabulary")
    total = min(context_length or facts.max_total, facts.max_total)
    longest = min(total - 1, facts.max_prompt)
    if len(prompt) > longest:
        raise ContextLengthError(
            doing, got=f"a prompt of {len(prompt)} tokens", expected=f"{longest} or fewer",
            fix="The model's positions, engine.context_length and the KV pool limit it.",
        )  # fmt: skip
    return replace(request, prompt_ids=prompt.tolist()), min(request.sampling.max_tokens, total - len(prompt))
