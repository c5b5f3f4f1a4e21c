"""A running call: what was asked, what has come, and how it may be cut.

Invariant: `sampled` holds every token handed to the caller once and in order, across the answers ("segments") that
a call may need when weights change under it. A cut ends a segment; whether the call ends with it is the cut's meaning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import aiohttp
from gyre_core import Array, FinishReason, GenerateChunk, GenerateRequest, InfrastructureError

from gyre_vllm.client import ServerClient
from gyre_vllm.labels import VersionLabels
from gyre_vllm.transfers import FETCH_S
from gyre_vllm.wire import EventSplitter, Piece, Span, read_piece, request_body

log = logging.getLogger("gyre.vllm")


class Cut(Enum):
    """Why a segment was ended from here."""

    NONE = 0
    RESTART = 1
    """Goes on in another segment, from the tokens it has."""
    ABORT = 2
    """The call is over."""


class RunningCall:
    """One call on its way. `limit`: tokens it may sample at most."""

    def __init__(self, request: GenerateRequest, prompt: list[int], limit: int) -> None:
        self.request, self.prompt, self.limit = request, prompt, limit
        self.doing = f"call {request.request_id!r} of session {request.session!r}"
        self.sampled: list[int] = []
        self.labels = VersionLabels()
        self.server_id = ""
        self.salt = ""
        """Of the prefix cache that its present segment runs in."""
        self.first = 0
        """Index of the present segment's first token."""
        self.cut = Cut.NONE
        self.at_rest = asyncio.Event()
        """No segment of it runs on the server."""
        self.at_rest.set()
        self.stirred = asyncio.Event()
        """Something happened that a call waiting at the gate must see."""
        self.answer: aiohttp.ClientResponse | None = None
        self.patience: asyncio.Timeout | None = None
        """For its present answer to begin, while it has not."""
        self.dropped = False
        """Its present answer is to be closed, also one that has not begun."""
        self.transfer: dict[str, Any] | None = None
        """What its next segment is to fetch of its context's KV from another server."""
        self.taken = False
        """The server was asked to end it by its length, so that its KV can be held."""
        self.cached: int | None = None
        self.computed = 0
        self.over = False
        self.handing = False
        """Its caller has what came last, and has not asked for more."""

    @property
    def routed_from(self) -> int | None:
        """First position whose experts are asked for, if any: at the latest that of the first token's own pass."""
        if not self.request.routed_experts:
            return None
        last, wanted = len(self.prompt) - 1, self.request.routed_from
        return last if wanted is None else min(max(wanted, 0), last)

    def drop(self) -> None:
        """Close the present answer; its reader ends."""
        self.dropped = True
        if self.answer is not None:
            self.answer.close()
        elif self.patience is not None and not self.patience.expired():
            self.patience.reschedule(0.0)

    def abort(self) -> None:
        """Mark it as over from outside."""
        self.cut = Cut.ABORT
        self.stirred.set()


class Segment:
    """One answer of the server, read to its end."""

    def __init__(self, call: RunningCall, vocab: int) -> None:
        self._call, self._vocab = call, vocab
        self._splitter = EventSplitter()
        self._held: tuple[list[int], list[float]] = ([], [])
        self._hold = call.request.routed_experts
        self.finish: FinishReason | None = None
        self.spans: tuple[Span, ...] = ()
        self.experts: Array | None = None
        self.done = False
        self._began = False
        """It has brought a token: its prompt was computed, or found."""

    def take(self, data: bytes) -> GenerateChunk | None:
        """The chunk to hand out for these bytes, if any. The last tokens are held for `last`."""
        ids, logprobs = self._held if self._hold else ([], [])
        for event in self._splitter.feed(data):
            piece = read_piece(event, self._vocab, self._call.doing)
            ids.extend(piece.token_ids)
            logprobs.extend(piece.logprobs)
            self._note(piece)
        if self._hold or self.finish is not None:
            if not self._hold:
                self._held[0].extend(ids)
                self._held[1].extend(logprobs)
            return None
        return self._chunk(ids, logprobs) if ids else None

    def last(self) -> GenerateChunk:
        """What was held back; may be empty."""
        chunk = self._chunk(*self._held)
        self._held = ([], [])
        return chunk

    def _note(self, piece: Piece) -> None:
        call = self._call
        self.finish = piece.finish or self.finish
        self.spans = piece.spans or self.spans
        self.experts = piece.experts if piece.experts is not None else self.experts
        self.done = self.done or piece.done
        self._began = self._began or bool(piece.token_ids)
        if piece.prompt_tokens is not None and self.finish is not None and self._began:
            found = piece.cached or 0
            call.cached = found if call.cached is None else call.cached
            call.computed += piece.prompt_tokens - found

    def _chunk(self, ids: list[int], logprobs: list[float]) -> GenerateChunk:
        start = len(self._call.sampled)
        self._call.sampled.extend(ids)
        return GenerateChunk(tuple(ids), tuple(logprobs), self._call.labels.of(start, len(ids)))


@asynccontextmanager
async def _begun(call: RunningCall, limit_s: float | None) -> AsyncIterator[asyncio.Timeout]:
    """TimeoutError when the call's answer brings nothing in this time, or is dropped before it begins."""
    async with asyncio.timeout(limit_s) as patience:
        call.patience = patience
        try:
            yield patience
        finally:
            call.patience = None


async def run_segment(
    call: RunningCall,
    client: ServerClient,
    model: str,
    vocab: int,
    salt: str,
    every: int,
    progress: Callable[[], None],
) -> AsyncIterator[GenerateChunk]:
    """Send what is left of the call and hand out its tokens. The last chunk has `finish` unless the call must go on in
    another segment. Raises InfrastructureError when the answer breaks off and nobody cut it."""
    segment = Segment(call, vocab)
    call.dropped, call.handing, done = False, False, len(call.sampled)
    body = request_body(
        model, [*call.prompt, *call.sampled], call.request.sampling.rest(done), call.limit - done, salt,
        every=every, transfer=call.transfer, routed_from=call.routed_from,
    )  # fmt: skip
    fetching, call.transfer = call.transfer is not None, None
    try:
        async with (
            _begun(call, FETCH_S if fetching else None) as patience,
            client.stream(body, call.server_id, call.doing) as answer,
        ):
            call.answer, call.patience = answer, None
            if call.dropped:  # what it would bring was sampled under weights that are not the ones it is told for
                answer.close()
                raise ConnectionAbortedError("dropped before its answer began")
            async for data in answer.content.iter_any():
                patience.reschedule(None)
                progress()
                chunk = segment.take(data)
                if chunk is not None:
                    call.handing = True
                    yield chunk
                    call.handing = False
                    progress()
                if segment.done:
                    break
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        if call.cut is Cut.NONE and patience.expired() and not call.dropped:
            log.warning("%s: no KV from another server in %g s; it is computed here", call.doing, FETCH_S)
            call.cut = Cut.RESTART
        elif call.cut is Cut.NONE:
            raise InfrastructureError(
                call.doing, got=f"{type(error).__name__}: {error}", expected="an answer to its end"
            ) from error
    finally:
        call.answer, call.handing = None, False
    last, call.handing = _end(call, segment), True
    yield last


def _end(call: RunningCall, segment: Segment) -> GenerateChunk:
    """The segment's last chunk."""
    if not segment.done and call.cut is Cut.NONE:
        raise InfrastructureError(
            call.doing, got=f"an answer that broke off after {len(call.sampled)} tokens", expected="its end"
        )
    last = segment.last()
    finish = segment.finish  # said with the last token; an answer that was cut behind it has nothing left to go on with
    call.labels.check(segment.spans, call.first, len(call.sampled) - call.first, call.doing)
    if finish is FinishReason.STOP and call.sampled[-1:] != [
        token for token in call.sampled[-1:] if token in call.request.sampling.stop_token_ids
    ]:
        raise InfrastructureError(
            call.doing, got=f"a stop after token {call.sampled[-1:]}", expected="a stop token as the last token"
        )
    cut_short = call.taken and finish is FinishReason.LENGTH and len(call.sampled) < call.limit
    if cut_short or (call.cut is Cut.ABORT and finish is None):
        finish = FinishReason.ABORT
    if call.cut is Cut.RESTART and finish in (None, FinishReason.ABORT):
        return last
    if call.routed_from is not None and segment.experts is None and finish is not FinishReason.ABORT:
        raise InfrastructureError(
            call.doing, got="an answer without routed experts", expected="those of its passes",
            fix="Start the server with --enable-return-routed-experts, for a model with experts.",
        )  # fmt: skip
    known = None if segment.experts is None else call.routed_from
    return GenerateChunk(last.token_ids, last.logprobs, last.versions, finish, call.cached or 0, segment.experts, known)
