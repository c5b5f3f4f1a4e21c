"""The gate by itself, between a client and an endpoint that streams: what counts as a turn, as tokens, as a fault."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web
from gyre_core import Limits, ModelEndpoint
from gyre_core.testing.harnesses import RecordedEvents
from gyre_harnesses.command.asking import AnswerReader, read_request
from gyre_harnesses.command.gate import Gate
from gyre_harnesses.command.tally import AT_ONCE, Desk, Tally


def event(record):
    return b"data: " + (record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n\n"


def text(words):
    return event({"choices": [{"index": 0, "delta": {"content": words}}]})


def usage(sampled):
    return event({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": sampled}})


DONE = event(b"[DONE]")
PLAIN = {"model": "m", "messages": []}
STREAM = {**PLAIN, "stream": True}


@dataclass
class Endpoint:
    """Answers each request by `serve(request, body)`; by default one token for each one that was asked for."""

    serve: object = None
    bodies: list = field(default_factory=list)
    raw: list = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request):
        self.raw.append(request)
        body = await request.json() if request.can_read_body else None
        self.bodies.append(body)
        if self.serve is not None:
            return await self.serve(request, body)
        sampled = body["max_tokens"] * (body.get("n") or 1)
        return web.json_response({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": sampled}})


def streaming(*pieces):
    """A stream of these pieces, each by itself; an event is waited for, and at None the connection breaks."""

    async def serve(request, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            if isinstance(piece, bytes):
                await response.write(piece)
            elif isinstance(piece, asyncio.Event):
                await piece.wait()
            else:
                request.transport.abort()
        return response

    return serve


@contextlib.asynccontextmanager
async def gate(endpoint, limits=None):
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endpoint.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as upstream, aiohttp.ClientSession() as client:
        address = ModelEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "key", "m")
        made = Gate(upstream, address, limits or Limits(), RecordedEvents())
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        base = await made.serve(listener)

        async def post(body, path="/chat/completions", **more):
            async with client.post(base + path, data=json.dumps(body), **more) as answer:
                return answer.status, await answer.read()

        made.post, made.base, made.client = post, base, client
        try:
            yield made
        finally:
            endpoint.hold.set()
            await made.close()
            await runner.cleanup()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_flood_waits_here_and_not_in_the_queue_that_all_share():
    desk = Desk(Limits(max_turns=None), RecordedEvents())
    asked = read_request("/chat/completions", json.dumps(PLAIN).encode())
    begun = [asyncio.create_task(desk.begin(asked, "main")) for _ in range(2 * AT_ONCE + 1)]
    for done in (AT_ONCE, 2 * AT_ONCE, 2 * AT_ONCE + 1):
        for _ in range(10):
            await asyncio.sleep(0)
        through = [task.result() for task in begun if task.done()]
        assert len(through) == done
        assert desk.running <= AT_ONCE
        for call in through:
            call.left()
    assert desk.running == 0


async def test_a_streams_tokens_count_though_the_program_did_not_ask_for_them():
    endpoint = Endpoint(streaming(text("a"), text("b"), usage(7), DONE))
    async with gate(endpoint, Limits(max_sampled_tokens=20)) as made:
        assert await made.post(STREAM) == (200, text("a") + text("b") + DONE)
        assert endpoint.bodies[0]["stream_options"] == {"include_usage": True}
        asked = {**STREAM, "stream_options": {"include_usage": True}}
        assert await made.post(asked) == (200, text("a") + text("b") + usage(7) + DONE)
        assert (made.tally.sampled, made.tally.presumed, made.tally.longest_context) == (14, 0, 17)
        assert [body["max_tokens"] for body in endpoint.bodies] == [20, 13]
        await made.post(STREAM)
        assert (await made.post(STREAM))[0] == 403
        assert made.tally.refused == "sampled_tokens"


async def test_several_answers_in_one_call_share_what_is_left():
    endpoint = Endpoint()
    async with gate(endpoint, Limits(max_sampled_tokens=20, max_call_tokens=12)) as made:
        await made.post({**PLAIN, "n": 8})
        assert (endpoint.bodies[0]["max_tokens"], made.tally.sampled) == (2, 16)
        await made.post({"prompt": ["a", "b"], "n": 2}, "/completions")
        assert endpoint.bodies[1]["max_tokens"] == 1
    async with gate(endpoint, Limits(max_sampled_tokens=20)) as made:
        assert (await made.post({**PLAIN, "best_of": 21}))[0] == 403
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    ("path", "body", "answers"),
    [
        ("/chat/completions", {}, 1),
        ("/chat/completions", {"n": 3, "prompt": ["a", "b"]}, 3),
        ("/chat/completions", {"n": 3.0, "best_of": 4}, 4),
        ("/completions", {"prompt": "a"}, 1),
        ("/completions", {"prompt": [1, 2, 3], "n": 2}, 2),
        ("/completions", {"prompt": [[1], [2], [3]], "n": 2}, 6),
        ("/messages", {"n": 5}, 1),
    ],
    ids=str,
)
def test_how_many_answers_a_call_wants(path, body, answers):
    assert read_request(path, json.dumps(body).encode()).answers == answers


async def test_an_answer_without_a_count_counts_as_long_as_it_may_be():
    endpoint = Endpoint(streaming(text("a"), DONE))
    async with gate(endpoint, Limits(max_sampled_tokens=15, max_call_tokens=10)) as made:
        for _ in range(2):
            await made.post(STREAM)
        assert (made.tally.sampled, made.tally.presumed, made.tally.answered) == (0, 15, 2)
        assert (await made.post(STREAM))[0] == 403


async def test_counting_a_prompts_tokens_is_no_turn():
    async def serve(request, body):
        tokens = {"input_tokens": 12}
        return web.json_response(tokens if "count" in request.path else {"usage": {**tokens, "output_tokens": 3}})

    async with gate(Endpoint(serve), Limits(max_turns=2)) as made:
        for _ in range(2):
            assert (await made.post(PLAIN, "/messages/count_tokens"))[0] == 200
            assert (await made.post(PLAIN, "/messages"))[0] == 200
        assert (await made.post(PLAIN, "/messages/count_tokens"))[0] == 200
        assert (made.tally.answered, made.tally.sampled, made.tally.longest_context) == (2, 6, 15)
        assert (await made.post(PLAIN, "/messages"))[0] == 403


async def test_what_samples_by_another_road_is_not_behind_the_gate():
    endpoint = Endpoint()
    async with gate(endpoint) as made:
        for path in ("/messages/batches", "/embeddings", "/chat/completions/batch"):
            assert (await made.post(PLAIN, path))[0] == 404
        async with made.client.put(made.base + "/chat/completions", data=b"{}") as answer:
            assert answer.status == 404
    assert endpoint.bodies == []


async def test_a_call_that_the_program_gives_up_is_a_turn_and_as_long_as_it_may_be():
    endpoint = Endpoint()
    endpoint.serve = streaming(text("a"), endpoint.hold, usage(1), DONE)
    async with gate(endpoint, Limits(max_turns=1, max_call_tokens=9)) as made:
        async with made.client.post(made.base + "/chat/completions", json={**STREAM, "n": 2}) as answer:
            assert await answer.content.readany() == text("a")
        await until(lambda: made.tally.given_up)
        assert made.tally == Tally(given_up=1, presumed=18)
        assert (await made.post(PLAIN))[0] == 403
        assert made.tally.refused == "turns"


async def test_who_hangs_up_at_the_last_word_has_its_answer():
    endpoint = Endpoint()
    endpoint.serve = streaming(text("a"), usage(4), DONE, endpoint.hold)
    async with gate(endpoint) as made:
        async with made.client.post(made.base + "/chat/completions", json=STREAM) as answer:
            while await answer.content.readline() != DONE[:-1]:
                pass
            assert (made.tally.answered, made.tally.sampled) == (1, 4)
        endpoint.hold.set()
    assert made.tally == Tally(answered=1, sampled=4, longest_context=14)


async def test_calls_at_the_same_time_share_the_limits():
    endpoint = Endpoint()

    async def serve(request, body):
        await endpoint.hold.wait()
        return web.json_response({"usage": {"prompt_tokens": 1, "completion_tokens": body["max_tokens"] // 5}})

    endpoint.serve = serve
    async with gate(endpoint, Limits(max_sampled_tokens=25, max_call_tokens=10)) as made:
        calls = [asyncio.ensure_future(made.post(PLAIN)) for _ in range(4)]
        await until(lambda: len(endpoint.bodies) == 2)
        for _ in range(20):
            assert (await made.post({"messages": []}, "/messages/count"))[0] == 404  # the gate is not stuck
        assert len(endpoint.bodies) == 2
        endpoint.hold.set()
        assert [status for status, _ in await asyncio.gather(*calls)] == [200] * 4
        assert (made.tally.sampled, made.tally.refused) == (8, None)
    endpoint.hold.clear()
    endpoint.bodies.clear()
    async with gate(endpoint, Limits(max_turns=2)) as made:
        calls = [asyncio.ensure_future(made.post(PLAIN)) for _ in range(4)]
        await until(lambda: len(endpoint.bodies) == 2)
        endpoint.hold.set()
        assert sorted([status for status, _ in await asyncio.gather(*calls)]) == [200, 200, 403, 403]


@pytest.mark.parametrize(
    ("status", "ours"),
    [
        *((status, False) for status in (400, 404, 409, 413, 422)),
        *((status, True) for status in (401, 403, 408, 429, 500, 503, 529)),
    ],
)
async def test_which_refusals_are_faults(status, ours):
    async def serve(request, body):
        return web.json_response({"error": {"message": "why"}}, status=status)

    async with gate(Endpoint(serve), Limits(max_turns=1)) as made:
        for _ in range(3):
            assert (await made.post(PLAIN))[0] == status
        told = f"HTTP {status}: why"
        assert made.tally == (Tally(fault=told) if ours else Tally(turned_down=told))
        await made.post(PLAIN, "/messages/count_tokens")
        assert made.tally == (Tally(fault=told) if ours else Tally(turned_down=told))


async def test_an_answer_that_breaks_off_is_a_fault_and_not_taken_for_a_whole_one():
    endpoint = Endpoint(streaming(text("a"), None))
    async with gate(endpoint) as made:
        with pytest.raises(aiohttp.ClientError):
            await made.post(STREAM)
        assert made.tally.fault is not None
        assert (made.tally.answered, made.tally.given_up, made.tally.presumed) == (0, 0, 0)
        endpoint.serve = None
        await made.post(PLAIN)
        assert made.tally.fault is None


@pytest.mark.parametrize(
    "told",
    [
        event({"error": {"message": "cut", "type": "server_error"}}),
        b"event: error\n" + event({"type": "error", "error": {"type": "api_error", "message": "cut"}}),
        event({"type": "error", "code": None, "message": "cut", "param": None}),
        event({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "cut"}}}),
    ],
    ids=["chat", "messages", "responses", "a failed response"],
)
async def test_a_stream_that_tells_of_an_error_was_no_answer(told):
    async with gate(Endpoint(streaming(text("a"), told))) as made:
        assert await made.post(STREAM) == (200, text("a") + told)
        assert made.tally == Tally(fault="an answer broke off: cut")


async def test_a_body_comes_out_of_its_encoding_once():
    endpoint = Endpoint()
    async with gate(endpoint, Limits(max_call_tokens=5)) as made:
        packed = gzip.compress(json.dumps({**PLAIN, "max_tokens": 9000}).encode())
        headers = {"content-encoding": "gzip"}
        async with made.client.post(made.base + "/chat/completions", data=packed, headers=headers) as answer:
            assert answer.status == 200
    assert endpoint.bodies == [{**PLAIN, "max_tokens": 5}]


MESSAGES = (
    event({"type": "message_start", "message": {"usage": {"input_tokens": 7, "output_tokens": 0}}})
    + event({"type": "content_block_delta", "delta": {"partial_json": '{"output_tokens": 1}'}})
    + event({"type": "message_delta", "usage": {"input_tokens": 3, "output_tokens": 9, "cache_read_input_tokens": 40}})
    + event({"type": "message_stop"})
)
RESPONSES = (
    event({"type": "response.output_text.delta", "delta": '"usage": {"output_tokens": 1}'})
    + event({"type": "response.created", "response": {"error": None, "usage": None}})
    + event({"type": "response.completed", "response": {"usage": {"input_tokens": 43, "output_tokens": 9}}})
)
COUNTS = event({"choices": [], "usage": {"prompt_tokens": 43, "completion_tokens": 9}})
CHAT = text('"usage": {"completion_tokens": 1}') + COUNTS + DONE


@pytest.mark.parametrize("apart", [1, 2, 7, 100, 10_000])
@pytest.mark.parametrize(
    ("path", "stream", "hidden"),
    [
        ("/messages", MESSAGES, b""),
        ("/messages", MESSAGES.replace(b"\n", b"\r\n"), b""),
        ("/responses", RESPONSES, b""),
        ("/chat/completions", CHAT, COUNTS),
    ],
    ids=["messages", "messages with carriage returns", "responses", "chat"],
)
def test_a_stream_is_read_the_same_however_it_comes_apart(path, stream, hidden, apart):
    reader = AnswerReader(read_request(path, b'{"stream": true}'), stream=True)
    out = b"".join(reader.take(stream[at : at + apart]) for at in range(0, len(stream), apart)) + reader.end()
    assert out == (stream.replace(hidden, b"") if hidden else stream)
    assert (reader.sampled, reader.prompt, reader.complete, reader.error) == (9, 43, True, None)


def test_an_answer_in_one_piece_is_read_at_its_end():
    asked = read_request("/messages", b"{}")
    reader = AnswerReader(asked, stream=False)
    whole = {"usage": {"output_tokens": 9}, "content": [{"type": "tool_use", "input": {"output_tokens": 1}}]}
    assert reader.take(json.dumps(whole).encode()) == json.dumps(whole).encode()
    assert reader.end() == b""
    assert reader.sampled == 9
    for odd in (b"not json", b"[" * 100_000, b"[]"):
        reader = AnswerReader(asked, stream=False)
        reader.take(odd)
        assert (reader.end(), reader.sampled) == (b"", None)
