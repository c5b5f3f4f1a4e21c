"""The engines as the proxy sees them: one backend that finds the cell for each call and follows it when it moves.

Invariant: the tokens of a call are yielded once and in order, whichever cells sampled them. A call that a cell gives up
(drain, move, role switch, death) goes on on the next cell from what was sampled; the agent sees one answer. A call that
fails on a living cell before it sampled there is tried again, until the run has seen that the cell's engine is dead and
routes it elsewhere; what was sampled on a cell whose engine then failed is not continued, for nobody vouches for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol, cast

import aiohttp
import numpy as np
from gyre_core import (
    CellLostError,
    ContextLengthError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GyreError,
    InfrastructureError,
    SamplingParams,
)
from gyre_tito import BackendError, GenerateCall, PromptTooLongError, Sampling
from gyre_tito import GenerateChunk as TitoChunk
from gyre_tito.backend import FinishReason as TitoFinish

from gyre_rl.cell.calls import CellRefusesError, call_cell

MAX_TRIES = 60
"""Routes a call may take without sampling a token before it fails; drains and restarts cost a few each."""
RETRY_S = 0.05
FAULTS = 8
"""Failures of engines before they sampled anything that end a call."""
FAULT_S = 0.25
LONGEST_S = 4.0
"""Waits between them: `FAULT_S`, doubled each time up to this; together longer than a cell keeps a dead engine."""
QUICK_S = 2.0
"""A failure that took longer counts half of `FAULTS`: a long prompt is not computed again and again."""


@dataclass(frozen=True, slots=True)
class RouteAsk:
    """Which cell shall take this call? `resumed` when an earlier cell gave it up."""

    session: str
    execution: str
    prompt_tokens: int
    prefix: tuple[int, ...] = ()
    lost: str = ""
    """Cell (name#incarnation) that could not be reached, if that is why it is asked again."""


@dataclass(frozen=True, slots=True)
class Route:
    """The answer: the cell and its address."""

    cell: str
    base_url: str


@dataclass(frozen=True, slots=True)
class CallOver:
    """Event: the session's call was answered and its context has this many tokens."""

    session: str
    execution: str
    context_tokens: int
    cached_tokens: int
    sampled_tokens: int
    segments: int
    """Cells that took part."""


class Router(Protocol):
    """Where routes come from."""

    async def route(self, ask: RouteAsk) -> Route:
        """Wait for a cell."""

    async def over(self, event: CallOver) -> None:
        """Tell that a call ended."""


def sampling_of(sampling: Sampling) -> SamplingParams:
    """The proxy's sampling settings as an engine takes them; BackendError names what engines here cannot do."""
    odd = {
        "min_p": sampling.min_p != 0,
        "frequency_penalty": sampling.frequency_penalty != 0,
        "presence_penalty": sampling.presence_penalty != 0,
        "repetition_penalty": sampling.repetition_penalty != 1,
        "logit_bias": bool(sampling.logit_bias),
    }
    if any(odd.values()):
        named = ", ".join(name for name, used in odd.items() if used)
        raise BackendError(
            f"sampling with {named}: the policy that is trained would not be the one that sampled. Leave it out."
        )
    return SamplingParams(
        sampling.max_tokens,
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.stop_token_ids,
        sampling.seed,
    )


class CellBackend:
    """gyre-tito's backend over the cells of the run."""

    def __init__(self, http: aiohttp.ClientSession, token: str, router: Router, *, experts: bool = False) -> None:
        self._http, self._token, self._router, self._experts = http, token, router, experts

    async def generate(self, call: GenerateCall) -> AsyncIterator[TitoChunk]:
        """Sample `call` on whatever cells it is routed to; see the module's invariant."""
        session = f"{call.execution}/{call.session}"
        # The pass that reads the last token sampled before is this call's first: experts are wanted from it on.
        request = GenerateRequest(
            call.call_id,
            session,
            cast("Sequence[int]", call.prompt_ids),
            sampling_of(call.sampling),
            routed_experts=self._experts,
            routed_from=max(0, call.new_from - 1) if self._experts else None,
        )
        ask = RouteAsk(session, call.execution, len(call.prompt_ids), first_prefix(call))
        sampled: list[int] = []
        start = len(call.prompt_ids)
        cached, segments, tries, faults = 0, 0, 0, _Faults()
        try:
            while True:
                route = await self._router.route(replace(ask, prompt_tokens=len(call.prompt_ids) + len(sampled)))
                ask = replace(ask, lost="", prefix=())
                had = len(sampled)
                faults.begin()
                try:
                    async for chunk in call_cell(self._http, route.base_url, self._token, _continued(request, sampled)):
                        before = len(sampled)
                        request = _without_rows(request, chunk, start + before)
                        sampled.extend(chunk.token_ids)
                        if segments == 0 and chunk.cached_tokens is not None:
                            cached = chunk.cached_tokens
                        if chunk.finish is FinishReason.ABORT:
                            if chunk.token_ids or chunk.routed_experts is not None:
                                yield _tito(replace(chunk, finish=None), start + before)
                            break
                        yield _tito(chunk, start + before)
                        if chunk.finish is not None:
                            segments += 1
                            return
                except CellLostError:
                    ask = replace(ask, lost=route.cell)
                except CellRefusesError:
                    pass  # it began to drain after the route was given; the next route knows
                except InfrastructureError:
                    if len(sampled) > had or not await faults.borne():
                        raise
                    continue
                segments += len(sampled) > had
                tries = 0 if len(sampled) > had else tries + 1
                if len(sampled) >= request.sampling.max_tokens:
                    yield TitoChunk((), (), (), "length")
                    return
                if tries >= MAX_TRIES:
                    raise BackendError(f"call {call.call_id}: no cell could take it in {tries} tries")
                if tries:
                    await asyncio.sleep(RETRY_S)
        except ContextLengthError as error:
            raise PromptTooLongError(str(error)) from error
        except GyreError as error:
            raise BackendError(str(error)) from error
        finally:
            context = len(call.prompt_ids) + len(sampled)
            await self._router.over(CallOver(session, call.execution, context, cached, len(sampled), segments))


@dataclass(slots=True)
class _Faults:
    """How an engine fails one call."""

    count: int = 0
    _began: float = 0.0

    def begin(self) -> None:
        """The call is sent."""
        self._began = time.monotonic()

    async def borne(self) -> bool:
        """It failed: whether it may be sent again, after a while."""
        self.count += 1 if time.monotonic() - self._began < QUICK_S else FAULTS // 2
        if self.count >= FAULTS:
            return False
        await asyncio.sleep(min(FAULT_S * 2 ** (self.count - 1), LONGEST_S))
        return True


def _continued(request: GenerateRequest, sampled: list[int]) -> GenerateRequest:
    if not sampled:
        return request
    prompt = np.concatenate([np.asarray(request.prompt_ids, np.int32), np.asarray(sampled, np.int32)])
    rest = request.sampling.rest(len(sampled))
    return replace(request, prompt_ids=cast("Sequence[int]", prompt), sampling=rest)


def _without_rows(request: GenerateRequest, chunk: GenerateChunk, at: int) -> GenerateRequest:
    """The request with `routed_from` at the first position whose experts are not known after this chunk, whose first
    token is at `at`. An engine that keeps them for its last chunk loses them when it is cut: the next cell is asked."""
    if request.routed_from is None or chunk.routed_experts is None:
        return request
    first, rows = _first_row(chunk, at), len(np.asarray(chunk.routed_experts))
    return replace(request, routed_from=first + rows) if first <= request.routed_from < first + rows else request


_FINISH: dict[FinishReason, TitoFinish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


def _tito(chunk: GenerateChunk, at: int) -> TitoChunk:
    """The chunk as the proxy takes it; `at` is the position of its first token."""
    finish = _FINISH[chunk.finish] if chunk.finish else None
    if chunk.routed_experts is None:
        return TitoChunk(chunk.token_ids, chunk.logprobs, chunk.versions, finish, chunk.cached_tokens)
    rows, first = np.asarray(chunk.routed_experts), _first_row(chunk, at)
    return TitoChunk(
        chunk.token_ids, chunk.logprobs, chunk.versions, finish, chunk.cached_tokens, rows, routed_from=first
    )


def _first_row(chunk: GenerateChunk, at: int) -> int:
    """Where the chunk's rows of experts begin. The pass that sampled its first token, at `at`, read the one before."""
    return at - 1 if chunk.routed_from is None else chunk.routed_from


PREFIX_BLOCK = 64


def first_prefix(call: GenerateCall) -> tuple[int, ...]:
    """Hashes of a new session's leading blocks, so that executions of one task meet on one cell.

    Only for a session's first call: afterwards its own KV decides, and hashing a long context at each call would cost
    work in its length.
    """
    if call.new_from > 0:
        return ()
    ids = np.ascontiguousarray(call.prompt_ids, np.int32)
    ends = range(PREFIX_BLOCK, min(len(ids), 16 * PREFIX_BLOCK) + 1, PREFIX_BLOCK)
    return tuple(int.from_bytes(blake2b(ids[:end].tobytes(), digest_size=7).digest()) for end in ends)
