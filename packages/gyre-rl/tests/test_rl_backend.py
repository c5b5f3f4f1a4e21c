"""A call that moves between cells keeps every token once and in order. Real HTTP cells with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from gyre_core import ContextLengthError, FinishReason, GenerateChunk, GenerateRequest, InfrastructureError
from gyre_rl.cell.calls import answer_call
from gyre_rl.cell.host import ENGINE_GRACE_S
from gyre_rl.cell.messages import CallBody
from gyre_rl.procs.wire import authorised, serve, unpack
from gyre_rl.proxy import backend
from gyre_rl.proxy.backend import CallOver, CellBackend, Route, RouteAsk, first_prefix
from gyre_tito import BackendError, GenerateCall, PromptTooLongError, Sampling


class CountingEngine:
    """Samples `len(prompt) + i`, so that a token tells its own position; gives calls up after `abort_after` tokens."""

    def __init__(self, version: int, abort_after: int | None = None, die_after: int | None = None) -> None:
        self.version, self.abort_after, self.die_after = version, abort_after, die_after
        self.requests: list[GenerateRequest] = []
        self.closed = 0

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.requests.append(request)
        if len(request.prompt_ids) > 100:
            raise ContextLengthError("prefilling", got="101 tokens", expected="100")
        try:
            for i in range(request.sampling.max_tokens):
                if i == self.abort_after:
                    yield GenerateChunk(finish=FinishReason.ABORT)
                    return
                if i == self.die_after:
                    raise ConnectionResetError
                await asyncio.sleep(0.001)
                token = len(request.prompt_ids) + i
                last = i + 1 == request.sampling.max_tokens
                finish = FinishReason.LENGTH if last else None
                yield GenerateChunk((token,), (-0.5,), (self.version,), finish, 7 if i == 0 else None)
        finally:
            self.closed += 1


@asynccontextmanager
async def cell(engine: CountingEngine, refuse: int = 0) -> AsyncIterator[str]:
    left = refuse

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal left
        authorised(request, "secret")
        if left:
            left -= 1
            return web.Response(status=409, text="draining")
        body = unpack(await request.read(), CallBody)
        try:
            return await answer_call(request, engine, body)
        except ConnectionResetError:
            request.transport.abort()  # what a killed process looks like from outside
            raise

    app = web.Application()
    app.router.add_post("/generate", generate)
    runner, port = await serve(app, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


class ScriptedRouter:
    def __init__(self, *urls: str) -> None:
        self.urls = list(urls)
        self.asks: list[RouteAsk] = []
        self.overs: list[CallOver] = []

    async def route(self, ask: RouteAsk) -> Route:
        self.asks.append(ask)
        url = self.urls.pop(0) if len(self.urls) > 1 else self.urls[0]
        return Route(f"cell#{len(self.asks)}", url)

    async def over(self, event: CallOver) -> None:
        self.overs.append(event)


def call(prompt: int = 5, max_tokens: int = 8, new_from: int = 0) -> GenerateCall:
    ids = np.arange(prompt, dtype=np.int32)
    return GenerateCall("x#0", "x", "main", ids, new_from, Sampling(max_tokens=max_tokens))


async def collect(router: ScriptedRouter, what: GenerateCall):
    async with aiohttp.ClientSession() as http:
        backend = CellBackend(http, "secret", router)
        return [chunk async for chunk in backend.generate(what)]


def tokens(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_an_undisturbed_call():
    engine = CountingEngine(3)
    async with cell(engine) as url:
        router = ScriptedRouter(url)
        chunks = await collect(router, call())
    assert tokens(chunks) == list(range(5, 13))
    assert chunks[-1].finish_reason == "length"
    assert chunks[0].cached_tokens == 7
    assert router.overs == [CallOver("x/main", "x", 13, 7, 8, 1)]


async def test_a_call_given_up_goes_on_elsewhere_with_its_tokens_and_both_versions():
    first, second = CountingEngine(3, abort_after=3), CountingEngine(4)
    async with cell(first) as one, cell(second) as two:
        router = ScriptedRouter(one, two)
        chunks = await collect(router, call())
    assert tokens(chunks) == list(range(5, 13))
    assert [v for chunk in chunks for v in chunk.versions] == [3] * 3 + [4] * 5
    assert list(second.requests[0].prompt_ids) == list(range(8))
    assert second.requests[0].sampling.max_tokens == 5
    assert second.requests[0].sampling.seed is None
    assert [chunk.finish_reason for chunk in chunks][:-1] == [None] * (len(chunks) - 1)
    assert router.asks[1].prompt_tokens == 8
    assert router.overs[0].segments == 2


class FailingEngine(CountingEngine):
    """Its engine fails so often, each time after that many tokens."""

    def __init__(self, times: int, after: int = 0) -> None:
        super().__init__(3)
        self.times, self.after = times, after

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        if self.times <= 0:
            async for chunk in super().generate(request):
                yield chunk
            return
        self.times -= 1
        self.requests.append(request)
        for i in range(self.after):
            yield GenerateChunk((len(request.prompt_ids) + i,), (-0.5,), (3,))
        raise InfrastructureError("sampling", got="a dead server")


async def test_a_call_to_a_dead_engine_waits_for_another_cell(monkeypatch):
    """The run needs some seconds to see it; the agent's client might not try so long."""
    monkeypatch.setattr(backend, "FAULT_S", 0.001)
    dead, living = FailingEngine(times=99), CountingEngine(4)
    async with cell(dead) as one, cell(living) as two:
        chunks = await collect(router := ScriptedRouter(one, one, one, two), call())
    assert tokens(chunks) == list(range(5, 13))
    assert (len(dead.requests), len(living.requests), router.overs[0].segments) == (3, 1, 1)
    assert living.requests[0].sampling.seed is None, "nothing was sampled: the call is as it was"


async def test_waits_for_a_dead_engine_outlast_its_cells_patience_with_it():
    waits = [min(backend.FAULT_S * 2**n, backend.LONGEST_S) for n in range(backend.FAULTS - 1)]
    assert sum(waits) > ENGINE_GRACE_S + 5  # its load is asked for every now and then, and it ends in order


async def test_an_engine_that_fails_again_and_again_is_named(monkeypatch):
    monkeypatch.setattr(backend, "FAULT_S", 0.001)
    async with cell(engine := FailingEngine(times=99)) as url:
        with pytest.raises(BackendError, match="a dead server"):
            await collect(ScriptedRouter(url), call())
    assert len(engine.requests) == backend.FAULTS


async def test_a_long_prompt_is_not_computed_again_and_again(monkeypatch):
    monkeypatch.setattr(backend, "FAULT_S", 0.001)
    monkeypatch.setattr(backend, "QUICK_S", 0.0)
    async with cell(engine := FailingEngine(times=99)) as url:
        with pytest.raises(BackendError, match="a dead server"):
            await collect(ScriptedRouter(url), call())
    assert len(engine.requests) == 2


async def test_what_a_failed_engine_sampled_is_not_continued(monkeypatch):
    """Its last word may be that the weights were not those it told."""
    async with cell(engine := FailingEngine(times=1, after=2)) as url:
        with pytest.raises(BackendError, match="a dead server"):
            await collect(router := ScriptedRouter(url), call())
    assert (len(engine.requests), router.overs[0].sampled_tokens) == (1, 2)


async def test_a_call_that_goes_on_draws_other_random_numbers_than_before():
    """An engine counts from a request's first token: under the call's own seed it would draw the first ones again."""
    seeds = []
    for _ in range(2):
        cut = [CountingEngine(3, abort_after=3), CountingEngine(3, die_after=2), CountingEngine(3)]
        async with cell(cut[0]) as one, cell(cut[1]) as two, cell(cut[2]) as three:
            what = call()
            chunks = await collect(
                ScriptedRouter(one, two, three), replace(what, sampling=replace(what.sampling, seed=7))
            )
        assert tokens(chunks) == list(range(5, 13))
        seeds.append([engine.requests[0].sampling.seed for engine in cut])
    assert seeds[0][0] == 7
    assert len(set(seeds[0])) == 3
    assert seeds[0] == seeds[1], "the same cuts give the same numbers"


async def test_a_cell_that_dies_in_mid_call_loses_no_token_that_was_yielded():
    dying, healthy = CountingEngine(3, die_after=4), CountingEngine(3)
    async with cell(dying) as one, cell(healthy) as two:
        router = ScriptedRouter(one, two)
        chunks = await collect(router, call())
    assert tokens(chunks) == list(range(5, 13))
    assert router.asks[1].lost == "cell#1"


async def test_a_call_cut_exactly_at_its_limit_ends_as_length():
    engine = CountingEngine(3, abort_after=8)
    engine.generate_more = True

    async def generate(request):
        for i in range(8):
            yield GenerateChunk((5 + i,), (-0.5,), (3,))
        yield GenerateChunk(finish=FinishReason.ABORT)

    engine.generate = generate
    async with cell(engine) as url:
        chunks = await collect(ScriptedRouter(url), call())
    assert tokens(chunks) == list(range(5, 13))
    assert chunks[-1].finish_reason == "length"


async def test_a_refusal_asks_for_another_route():
    engine = CountingEngine(3)
    async with cell(engine, refuse=2) as url:
        router = ScriptedRouter(url)
        chunks = await collect(router, call())
    assert tokens(chunks) == list(range(5, 13))
    assert len(router.asks) == 3
    assert not router.asks[1].lost


async def test_a_prompt_that_is_too_long_is_the_agents_limit():
    async with cell(CountingEngine(3)) as url:
        with pytest.raises(PromptTooLongError, match="101 tokens"):
            await collect(ScriptedRouter(url), call(prompt=101))


async def test_sampling_that_would_not_train_is_refused():
    odd = GenerateCall("x#0", "x", "main", np.arange(3, dtype=np.int32), 0, Sampling(4, presence_penalty=0.5))
    with pytest.raises(BackendError, match="presence_penalty"):
        await collect(ScriptedRouter("http://127.0.0.1:9"), odd)


async def test_a_client_that_goes_away_stops_the_generation():
    engine = CountingEngine(3)
    async with cell(engine) as url, aiohttp.ClientSession() as http:
        router = ScriptedRouter(url)
        stream = CellBackend(http, "secret", router).generate(call(max_tokens=10_000))
        async for _ in stream:
            break
        await stream.aclose()
        for _ in range(6000):
            if engine.closed:
                break
            await asyncio.sleep(0.01)
    assert engine.closed == 1
    assert len(router.overs) == 1


def test_only_a_new_session_is_hashed():
    assert first_prefix(call(prompt=200, new_from=10)) == ()
    same = first_prefix(call(prompt=200))
    assert len(same) == 3
    assert same == first_prefix(call(prompt=200))
    assert first_prefix(call(prompt=63)) == ()


class StreamingExperts(CountingEngine):
    """Tells for each pass the position that it read, as its expert; prompt rows with the first chunk, if asked for."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        first = True
        async for chunk in super().generate(request):
            if not request.routed_experts or not chunk.token_ids:
                yield chunk
                continue
            read = chunk.token_ids[0] - 1
            begin = request.routed_from if first and request.routed_from is not None else read
            rows = np.arange(begin, read + 1, dtype=np.int32).reshape(-1, 1, 1)
            yield replace(chunk, routed_experts=rows, routed_from=begin if begin < read else None)
            first = False


class HeldExperts(CountingEngine):
    """Tells the same of all its passes with its last chunk, as servers do; nothing when it is cut."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        async for chunk in super().generate(request):
            if not request.routed_experts or chunk.finish in (None, FinishReason.ABORT):
                yield chunk
                continue
            begin, read = request.routed_from or 0, chunk.token_ids[-1] - 1
            rows = np.arange(begin, read + 1, dtype=np.int32).reshape(-1, 1, 1)
            yield replace(chunk, routed_experts=rows, routed_from=begin)


@pytest.mark.parametrize(
    ("first", "second", "asked"),
    [
        (StreamingExperts, StreamingExperts, [1, 7]),
        (HeldExperts, HeldExperts, [1, 1]),
        (HeldExperts, StreamingExperts, [1, 1]),
        (StreamingExperts, HeldExperts, [1, 7]),
    ],
)
async def test_experts_are_asked_for_from_the_first_position_without_and_stay_at_their_positions(first, second, asked):
    cut, whole = first(3, abort_after=3), second(4)
    async with cell(cut) as one, cell(whole) as two, aiohttp.ClientSession() as http:
        backend = CellBackend(http, "secret", ScriptedRouter(one, two), experts=True)
        chunks = [chunk async for chunk in backend.generate(call(new_from=2))]
    assert [request.routed_from for request in (*cut.requests, *whole.requests)] == asked
    told = {}
    for chunk in chunks:
        if chunk.routed_experts is not None:
            told |= {chunk.routed_from + i: int(row[0, 0]) for i, row in enumerate(chunk.routed_experts)}
    assert told == {position: position for position in range(1, 12)}, "all but the last token, which nothing has read"


async def test_experts_are_not_asked_for_otherwise():
    engine = StreamingExperts(3)
    async with cell(engine) as url:
        chunks = await collect(ScriptedRouter(url), call())
    assert not engine.requests[0].routed_experts
    assert all(chunk.routed_experts is None for chunk in chunks)
