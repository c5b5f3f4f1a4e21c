"""A request that its client named is sampled once, however often it is sent, also across restarts of the proxy."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from gyre_tito import ExecutionSpec, Limits, ProxyServer, Status, Store, TitoService
from gyre_tito.records import Link
from gyre_tito.requests import ApiError
from gyre_tito.testing import BookkeepingEngine, rambling, scripted, tiny_format

USER = [{"role": "user", "content": "u"}]
BODIES = {
    "chat/completions": {"messages": USER, "max_tokens": 16},
    "messages": {"messages": USER, "max_tokens": 16},
    "responses": {"input": "u", "max_output_tokens": 16},
    "completions": {"prompt": "u", "max_tokens": 16},
}


class Bench:
    """A proxy that can be started again over the same store."""

    def __init__(self, tmp_path, reply=None, *, grace=0.2, **engine):
        self.path = tmp_path / "s.db"
        self.chat = tiny_format()
        self.engine = BookkeepingEngine(reply or rambling(self.chat), **engine)
        self.grace = grace

    async def __aenter__(self):
        self.http = aiohttp.ClientSession()
        await self.up()
        self.key = (await self.service.open_execution(ExecutionSpec("e"))).api_key
        return self

    async def up(self):
        self.store = Store.open(self.path, writable=True, durability="process")
        limits = Limits(retry_grace_s=self.grace)
        self.service = TitoService(self.engine, self.store, self.chat, limits=limits)
        self.server = ProxyServer(self.service)
        await self.server.start()

    async def down(self):
        await self.server.stop()
        self.store.close()

    async def __aexit__(self, *_):
        await self.http.close()
        await self.down()

    def send(self, path, body, name="k", session=None, key=None):
        headers = {"Authorization": f"Bearer {key or self.key}"}
        headers |= {"Idempotency-Key": name} if name else {}
        headers |= {"x-gyre-session": session} if session else {}
        return self.http.post(f"{self.server.base_url}/v1/{path}", json=body, headers=headers)

    async def ask(self, path, body, name="k", **more):
        async with self.send(path, body, name, **more) as answer:
            return answer.status, await answer.read(), answer.headers.get("Idempotent-Replayed")

    @property
    def calls(self):
        return len(self.engine.books)


MORE = [
    ("chat/completions", {}, 1),
    ("chat/completions", {"n": 3}, 3),
    ("chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2}, 2),
    ("chat/completions", {"stop": ["e", "a"]}, 1),
    ("messages", {}, 1),
    ("messages", {"stop_sequences": ["e"]}, 1),
    ("responses", {}, 1),
    ("responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 1),
    ("completions", {"prompt": ["u", "v"], "n": 2, "logprobs": 1}, 4),
    ("completions", {"prompt": ["u", "v"], "n": 2, "echo": True}, 4),
]


@pytest.mark.parametrize(("path", "more", "calls"), MORE)
async def test_the_same_request_gets_the_same_bytes_now_and_after_a_restart(tmp_path, path, more, calls):
    async with Bench(tmp_path) as bench:
        body = BODIES[path] | more
        first = await bench.ask(path, body)
        assert (first[0], first[2]) == (200, None)
        assert await bench.ask(path, body) == (200, first[1], "true")
        await bench.down()
        await bench.up()
        assert await bench.ask(path, body) == (200, first[1], "true")
        assert bench.calls == calls == len(bench.store.calls("e"))
        assert (await bench.ask(path, body, "another"))[2] is None
        assert bench.calls == 2 * calls


def told(stream):
    """What a chat stream says, apart from how it is cut into pieces: texts and finish reasons by choice, and its id."""
    texts, finish, ids = {}, {}, set()
    for line in stream.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        chunk = json.loads(line[6:])
        ids.add(chunk["id"])
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            finish[choice["index"]] = choice["finish_reason"]
    assert stream.endswith(b"data: [DONE]\n\n")
    return texts, finish, ids


async def test_a_stream_is_told_again(tmp_path):
    async with Bench(tmp_path, chunk=2, delay=0.002) as bench:
        body = BODIES["chat/completions"] | {"stream": True, "n": 2, "stream_options": {"include_usage": True}}
        first = await bench.ask("chat/completions", body)
        again = await bench.ask("chat/completions", body)
        await bench.down()
        await bench.up()
        later = await bench.ask("chat/completions", body)
        assert told(first[1]) == told(again[1]) == told(later[1])
        assert (again[2], later[2], bench.calls) == ("true", "true", 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_call_is_joined(tmp_path, stream):
    async with Bench(tmp_path, chunk=2) as bench:
        bench.engine.gate, bench.engine.gate_after = asyncio.Event(), 2
        body = BODIES["chat/completions"] | {"stream": stream}
        asked = [asyncio.create_task(bench.ask("chat/completions", body)) for _ in range(3)]
        while not bench.engine.books or not bench.engine.books[0].sampled:
            await asyncio.sleep(0.01)
        other = await bench.ask("chat/completions", body | {"seed": 1})
        assert other[0] == 422
        bench.engine.gate.set()
        got = [await one for one in asked]
        assert {one[0] for one in got} == {200}
        said = [told(one[1]) if stream else one[1] for one in got]
        assert said[0] == said[1] == said[2]
        assert sorted(str(one[2]) for one in got) == ["None", "true", "true"]
        assert bench.calls == 1


async def hang_up(bench, body, name):
    """Send a request and go away once the engine has begun."""
    task = asyncio.create_task(bench.ask("chat/completions", body, name))
    while not bench.engine.books or not bench.engine.books[-1].sampled:
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_comes_back_finds_its_call_running(tmp_path, stream):
    async with Bench(tmp_path, grace=60, chunk=2) as bench:
        bench.engine.gate, bench.engine.gate_after = asyncio.Event(), 2
        body = BODIES["chat/completions"] | {"stream": stream}
        await hang_up(bench, body, "k")
        again = asyncio.create_task(bench.ask("chat/completions", body))
        await asyncio.sleep(0.05)
        bench.engine.gate.set()
        assert (await again)[0] == 200
        assert bench.calls == 1
        assert [one.finish for one in bench.store.calls("e")] in (["stop"], ["length"])


@pytest.mark.parametrize(("name", "grace"), [("k", 0.05), ("", 60)])
async def test_a_client_that_does_not_come_back_stops_the_engine(tmp_path, name, grace):
    async with Bench(tmp_path, grace=grace, chunk=2) as bench:
        bench.engine.gate, bench.engine.gate_after = asyncio.Event(), 2
        await hang_up(bench, BODIES["chat/completions"], name)
        while not bench.store.calls("e"):
            await asyncio.sleep(0.01)
        assert [one.finish for one in bench.store.calls("e")] == ["disconnect"]
        bench.engine.gate.set()
        assert (await bench.ask("chat/completions", BODIES["chat/completions"], name))[0] == 200
        assert bench.calls == 2


@pytest.mark.parametrize("path", BODIES)
async def test_another_body_under_a_name_is_refused_in_the_dialects_shape(tmp_path, path):
    async with Bench(tmp_path) as bench:
        assert (await bench.ask(path, BODIES[path]))[0] == 200
        async with bench.send(path, BODIES[path] | {"temperature": 0.5}) as answer:
            error = (await answer.json())["error"]
            assert answer.status == 422
            assert error["type"] == "invalid_request_error"
            assert "idempotency-key" in error["message"]
        assert (await bench.ask(path, BODIES[path], "k" * 256))[0] == 400
        assert bench.calls == 1


async def test_names_belong_to_an_execution_and_a_session(tmp_path):
    async with Bench(tmp_path) as bench:
        other = (await bench.service.open_execution(ExecutionSpec("f"))).api_key
        body = BODIES["chat/completions"]
        for more in ({}, {"session": "helper"}, {"key": other}):
            assert (await bench.ask("chat/completions", body, **more))[2] is None
        assert bench.calls == 3


async def test_what_failed_is_made_again(tmp_path):
    async with Bench(tmp_path, fail_after=0) as bench:
        body = BODIES["chat/completions"]
        assert (await bench.ask("chat/completions", body))[0] == 502
        bench.engine.fail_after = None
        assert (await bench.ask("chat/completions", body))[::2] == (200, None)
        assert (await bench.ask("chat/completions", body))[::2] == (200, "true")
        assert (await bench.ask("chat/completions", {"messages": []}, "bad"))[0] == 400
        assert (await bench.ask("chat/completions", {"messages": []}, "bad"))[0] == 400
        assert (await bench.ask("chat/completions", body, "bad"))[0] == 200


async def test_a_request_of_which_a_crash_left_only_some_choices_is_made_again(tmp_path):
    async with Bench(tmp_path) as bench:
        body = BODIES["chat/completions"] | {"n": 3}
        first = await bench.ask("chat/completions", body)
        await bench.down()
        with Store.open(bench.path, writable=True) as store:
            store.writer.submit(lambda db, _: db.execute("DELETE FROM calls WHERE idx=1")).result()
        await bench.up()
        again = await bench.ask("chat/completions", body)
        assert again[::2] == (200, None)
        assert again[1] != first[1]
        assert await bench.ask("chat/completions", body) == (200, again[1], "true")
        assert bench.calls == 6


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_a_conversation_goes_on_from_an_answer_that_was_told_again(tmp_path, path):
    chat = tiny_format()
    async with Bench(tmp_path, scripted(chat, "<think>\nhm\n</think>\n\none  two", "three")) as bench:
        import json

        await bench.ask(path, BODIES[path])
        await bench.down()
        await bench.up()
        said = json.loads((await bench.ask(path, BODIES[path]))[1])["choices"][0]
        if path == "completions":
            body = {"prompt": "u" + said["text"] + " more", "max_tokens": 16}
        else:
            body = {"messages": [*USER, said["message"], {"role": "user", "content": "v"}], "max_tokens": 16}
        assert (await bench.ask(path, body, "next"))[0] == 200
        first, second = bench.store.calls("e")
        without_stop = path == "completions"  # plain text that goes on does not hold the stop token
        assert second.prefix_len == first.path_len - without_stop
        assert without_stop or second.link is Link.EXTEND


async def test_an_agent_that_goes_on_after_a_restart_is_told_again_what_it_was_told(tmp_path):
    """With a new key for the same execution: named requests are not sampled again, the old key is refused."""
    async with Bench(tmp_path) as bench:
        body = BODIES["chat/completions"]
        told = [await bench.ask("chat/completions", body | {"seed": n}, f"turn-{n}") for n in range(3)]
        await bench.down()
        await bench.up()
        old, bench.key = bench.key, (await bench.service.reopen_execution("e")).api_key
        for n in (1, 2):
            assert await bench.ask("chat/completions", body | {"seed": n}, f"turn-{n}") == (200, told[n][1], "true")
        assert bench.calls == 3
        assert (await bench.ask("chat/completions", body, "turn-0"))[0] == 422, "another request by that name"
        assert (await bench.ask("chat/completions", body, "turn-0/2"))[0] == 200
        assert (await bench.ask("chat/completions", body, "new", key=old))[0] == 401
        old, bench.key = bench.key, (await bench.service.reopen_execution("e")).api_key
        assert (await bench.ask("chat/completions", body, "new", key=old))[0] == 401, "also within one life"
        await bench.service.close_execution("e", Status.COMPLETED)
        for name, status in (("e", 409), ("nobody", 404)):
            with pytest.raises(ApiError) as refused:
                await bench.service.reopen_execution(name)
            assert refused.value.status == status
