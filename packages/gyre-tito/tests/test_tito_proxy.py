"""The proxy end to end over real HTTP, held against the engine's own books."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import numpy as np
import pytest
from gyre_tito import ExecutionSpec, Limits, ProxyServer, Score, Status, Store, TitoService
from gyre_tito.client import AdminClient
from gyre_tito.records import Link
from gyre_tito.testing import BookkeepingEngine, rambling, scripted, tiny_format

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]
CALL = '<tool_call>\n{"name": "read_file",  "arguments": {"path":"a.txt"}}\n</tool_call>'


class Bench:
    """A proxy on a free port, with its engine and store."""

    def __init__(self, tmp_path, reply=None, *texts, history="exact", family="qwen3", limits=None, **engine):
        self.chat = tiny_format(family, history)
        self.engine = BookkeepingEngine(reply or scripted(self.chat, *texts), **engine)
        self.store = Store.open(tmp_path / "s.db", writable=True, durability="process")
        self.service = TitoService(self.engine, self.store, self.chat, limits=limits)
        self.server = ProxyServer(self.service, admin_token="admin")

    async def __aenter__(self):
        await self.server.start()
        self.http = aiohttp.ClientSession()
        self.opened = await self.service.open_execution(ExecutionSpec("e", "t", "g", 1))
        return self

    async def __aexit__(self, *_):
        await self.http.close()
        await self.server.stop()
        self.store.close()

    async def post(self, path, body, key=None, headers=None, base=None):
        headers = {"Authorization": f"Bearer {key or self.opened.api_key}", **(headers or {})}
        async with self.http.post((base or self.server.base_url) + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def chat_call(self, messages, **more):
        status, body = await self.post("/v1/chat/completions", {"messages": messages, **more})
        assert status == 200, body
        return body

    def check_law_one(self):
        """Every recorded path is what the engine consumed and produced, with its logprobs and versions."""
        tree = self.store.load_tree("e")
        assert len(tree.calls) == len(self.engine.books)
        for entry in self.engine.books:
            view = tree.path(int(entry.call.call_id.rpartition("#")[2]))
            prompt = len(entry.prompt)
            assert view.token_ids.tolist() == entry.prompt.tolist() + entry.sampled
            assert view.logprobs[prompt:].tolist() == entry.logprobs
            assert view.versions[prompt:].tolist() == entry.versions
        assert tree.sampled_count == sum(len(entry.sampled) for entry in self.engine.books)
        return tree


async def test_a_conversation_with_tools_is_one_path(tmp_path):
    async with Bench(tmp_path, None, f"<think>\nlook\n</think>\n\nI read it.\n{CALL}", "It says 5.") as bench:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is in a.txt?"}]
        first = await bench.chat_call(messages, tools=TOOLS)
        choice = first["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I read it."
        assert choice["message"]["reasoning_content"] == "look"
        call = choice["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"path": "a.txt"}
        messages += [
            {"role": "assistant", "content": "I read it.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "5"},
        ]
        second = await bench.chat_call(messages, tools=TOOLS)
        assert second["choices"][0]["message"]["content"] == "It says 5."
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(bench.engine.books[0].prompt) + len(
            bench.engine.books[0].sampled
        )
        tree = bench.check_law_one()
        assert len(tree.leaves()) == 1
        calls = bench.store.calls("e")
        assert [one.link for one in calls] == [Link.START, Link.EXTEND]
        text = bench.chat.decode(tree.path_ids(1).tolist())
        assert '<tool_call>\n{"name": "read_file",  "arguments": {"path":"a.txt"}}' in text


@pytest.mark.parametrize("family", ["qwen3", "default"])
async def test_a_long_random_conversation_is_exact(tmp_path, family):
    """Ids that do not survive decoding and encoding; the history comes back re-spelled by the client."""
    chat = tiny_format(family)
    async with Bench(tmp_path, rambling(chat, seed=7), family=family) as bench:
        messages = [{"role": "user", "content": "go"}]
        for turn in range(12):
            body = await bench.chat_call(messages, max_tokens=20)
            message = body["choices"][0]["message"]
            messages.append({"role": "assistant", "content": (message["content"] or "") + "  ", "name": "x"})
            messages.append({"role": "user", "content": f"turn {turn} \n<b>"})
        tree = bench.check_law_one()
        assert len(tree.leaves()) == 1
        assert {one.link for one in bench.store.calls("e")} == {Link.START, Link.EXTEND}


async def test_rewritten_history_branches_from_the_longest_true_prefix(tmp_path):
    async with Bench(tmp_path, None, "one", "two", "three", "four") as bench:
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        one = (await bench.chat_call(messages))["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": one}, {"role": "user", "content": "more"}]
        two = (await bench.chat_call(messages))["choices"][0]["message"]["content"]
        assert two == "two"
        edited = [*messages, {"role": "assistant", "content": "EDITED"}, {"role": "user", "content": "on"}]
        await bench.chat_call(edited)
        compacted = [messages[0], {"role": "user", "content": "Summary: all fine. Go on."}]
        await bench.chat_call(compacted)
        tree = bench.check_law_one()
        calls = bench.store.calls("e")
        assert [one.link for one in calls] == [Link.START, Link.EXTEND, Link.REWRITE, Link.COMPACTION]
        assert calls[2].parent == 0
        assert calls[2].prefix_len == calls[0].path_len
        assert "EDITED" in bench.chat.decode(calls[2].context_ids.tolist())
        assert calls[3].prefix_len > 0
        assert len(tree.leaves()) == 3
        assert {one.session for one in calls} == {"main"}


async def test_folding_the_last_steps_is_a_compaction_and_asking_otherwise_is_a_rewrite(tmp_path):
    async with Bench(tmp_path, None, *"abcdef") as bench:
        messages = [{"role": "user", "content": "u"}]
        for _ in range(4):
            said = (await bench.chat_call(messages))["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
        await bench.chat_call([*messages[:2], {"role": "user", "content": "summary of the steps since"}])
        await bench.chat_call([*messages[:2], {"role": "user", "content": "another summary"}])
        bench.check_law_one()
        calls = bench.store.calls("e")
        assert [one.link for one in calls[3:]] == [Link.EXTEND, Link.COMPACTION, Link.REWRITE]
        assert {(one.parent, one.prefix_len) for one in calls[4:]} == {(0, calls[0].path_len)}


async def test_dropped_reasoning_branches_and_absent_reasoning_does_not(tmp_path):
    thought = "<think>\ndeep\n</think>\n\nyes"
    async with Bench(tmp_path, None, thought, "a", "b") as bench:
        start = [{"role": "user", "content": "u"}]
        await bench.chat_call(start)
        await bench.chat_call([*start, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "v"}])
        dropped = {"role": "assistant", "content": "yes", "reasoning_content": ""}
        await bench.chat_call([*start, dropped, {"role": "user", "content": "w"}])
        bench.check_law_one()
        assert [one.link for one in bench.store.calls("e")] == [Link.START, Link.EXTEND, Link.REWRITE]


async def test_template_mode_does_what_the_template_does(tmp_path):
    thought = "<think>\ndeep\n</think>\n\nyes"
    async with Bench(tmp_path, None, thought, "no", history="template") as bench:
        start = [{"role": "user", "content": "u"}]
        await bench.chat_call(start)
        await bench.chat_call([*start, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "v"}])
        bench.check_law_one()
        calls = bench.store.calls("e")
        assert calls[1].link is Link.TEMPLATE
        prompt = bench.chat.decode(bench.engine.books[1].prompt.tolist())
        assert "deep" not in prompt


async def test_retry_n_and_sub_agents(tmp_path):
    chat = tiny_format()
    async with Bench(tmp_path, rambling(chat)) as bench:
        start = [{"role": "user", "content": "u"}]
        body = await bench.chat_call(start, n=3)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        await bench.chat_call(start)
        await bench.service.open_session("e", "helper", "sub_agent", "main")
        status, _ = await bench.post("/s/helper/v1/chat/completions", {"messages": start})
        assert status == 200
        status, _ = await bench.post("/v1/chat/completions", {"messages": start}, headers={"x-gyre-session": "other"})
        assert status == 200
        bench.check_law_one()
        calls = bench.store.calls("e")
        assert [one.session for one in calls] == ["main"] * 4 + ["helper", "other"]
        assert calls[3].link is Link.RETRY
        assert {one.session: one.kind for one in bench.store.sessions("e")} == {
            "main": "main",
            "helper": "sub_agent",
            "other": "sub_agent",
        }
        status, _ = await bench.post("/v1/chat/completions", {"messages": start}, base=bench.opened.keyed_base_url[:-3])
        assert status == 200


async def test_a_request_can_say_whose_sub_agent_it_is(tmp_path):
    chat = tiny_format()
    async with Bench(tmp_path, rambling(chat)) as bench:
        start = {"messages": [{"role": "user", "content": "u"}]}
        for session, parent in (("a", None), ("b", "a"), ("c", None), ("d", "b"), ("d", "a")):
            headers = {"x-gyre-session": session} | ({"x-gyre-parent": parent} if parent else {})
            assert (await bench.post("/v1/chat/completions", start, headers=headers))[0] == 200
        known = {one.session: one for one in bench.store.sessions("e")}
        assert [(one.kind, one.parent, one.inferred) for one in known.values()] == [
            ("main", None, True),
            ("sub_agent", "a", False),
            ("sub_agent", "b", True),
            ("sub_agent", "b", False),
        ]


async def test_new_from_counts_what_the_session_itself_has_sent(tmp_path):
    async with Bench(tmp_path, None, "one", "two", "three", "four") as bench:
        start = [{"role": "system", "content": "shared words"}, {"role": "user", "content": "u"}]
        await bench.chat_call(start)
        await bench.post("/s/helper/v1/chat/completions", {"messages": start})
        follow = [*start, {"role": "assistant", "content": "one"}, {"role": "user", "content": "v"}]
        await bench.chat_call(follow)
        await bench.chat_call([start[0], {"role": "user", "content": "another"}])
        known = [entry.call.new_from for entry in bench.engine.books]
        first, second = bench.store.calls("e")[0], bench.store.calls("e")[3]
        assert known[:3] == [0, 0, first.path_len]
        assert known[3] == second.prefix_len > 0


async def read_stream(answer):
    events = []
    async for line in answer.content:
        text = line.decode().strip()
        if text.startswith("data: "):
            events.append(text[6:])
    return events


async def test_streaming_says_the_same_as_not_streaming(tmp_path):
    reply = f"<think>\nlook\n</think>\n\nI read <it>.\n{CALL}"
    async with Bench(tmp_path, None, reply, "ok", chunk=1) as bench:
        body = {
            "messages": [{"role": "user", "content": "u"}],
            "tools": TOOLS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
        }
        headers = {"Authorization": f"Bearer {bench.opened.api_key}"}
        url = bench.server.base_url + "/v1/chat/completions"
        async with bench.http.post(url, json=body, headers=headers) as answer:
            events = await read_stream(answer)
        assert events[-1] == "[DONE]"
        chunks = [json.loads(one) for one in events[:-1]]
        deltas = [one["choices"][0]["delta"] for one in chunks if one["choices"]]
        content = "".join(one.get("content", "") for one in deltas)
        assert content == "I read <it>."
        assert "".join(one.get("reasoning_content", "") for one in deltas) == "look"
        calls = [one["tool_calls"][0] for one in deltas if "tool_calls" in one]
        assert json.loads(calls[0]["function"]["arguments"]) == {"path": "a.txt"}
        assert len([one for one in deltas if one.get("content")]) > 1
        logprobs = [
            t for one in chunks if one["choices"] for t in (one["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert [one["token_id"] for one in logprobs] == bench.engine.books[0].sampled
        assert chunks[-1]["usage"]["completion_tokens"] == len(bench.engine.books[0].sampled)
        again = [*body["messages"], {"role": "assistant", "content": content, "tool_calls": calls}]
        await bench.chat_call([*again, {"role": "tool", "tool_call_id": calls[0]["id"], "content": "5"}], tools=TOOLS)
        tree = bench.check_law_one()
        assert len(tree.leaves()) == 1


async def test_stop_string_cuts_the_answer_but_keeps_what_was_sampled(tmp_path):
    async with Bench(tmp_path, None, "alpha END beta gamma delta", "next", chunk=1) as bench:
        start = [{"role": "user", "content": "u"}]
        body = await bench.chat_call(start, stop=["END"])
        assert body["choices"][0]["message"]["content"] == "alpha "
        assert body["choices"][0]["finish_reason"] == "stop"
        sampled = bench.store.calls("e")[0].sampled_ids
        assert "END" in bench.chat.decode(sampled.tolist())
        assert bench.engine.cancelled == 1
        follow = [*start, {"role": "assistant", "content": "alpha"}, {"role": "user", "content": "v"}]
        await bench.chat_call(follow)
        tree = bench.check_law_one()
        assert len(tree.leaves()) == 1


async def test_version_changes_inside_a_call_are_kept(tmp_path):
    async with Bench(tmp_path, None, "a b c d e f g h", chunk=2) as bench:
        bench.engine.bump_after = 4
        await bench.chat_call([{"role": "user", "content": "u"}])
        bench.check_law_one()
        versions = bench.store.calls("e")[0].versions.tolist()
        assert versions == [0] * 4 + [1] * (len(versions) - 4)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_stops_the_engine_and_leaves_a_record(tmp_path, stream):
    async with Bench(tmp_path, None, "word " * 50, "ok", chunk=1) as bench:
        body = {"messages": [{"role": "user", "content": "u"}], "stream": stream}
        bench.engine.gate, bench.engine.gate_after = asyncio.Event(), 3
        request = asyncio.create_task(bench.post("/v1/chat/completions", body))
        while not bench.engine.books or len(bench.engine.books[0].sampled) < 3:
            await asyncio.sleep(0.001)
        request.cancel()
        while not bench.store.calls("e"):
            await asyncio.sleep(0.01)
        bench.engine.gate = None
        (call,) = bench.store.calls("e")
        assert call.finish == "disconnect"
        assert len(call.sampled_ids) == 3
        assert bench.engine.cancelled == 1
        bench.check_law_one()
        await bench.chat_call(body["messages"])
        assert bench.store.calls("e")[1].link is Link.RETRY


async def test_engine_failure_is_recorded_and_told(tmp_path):
    async with Bench(tmp_path, None, "word " * 20, fail_after=4, chunk=1) as bench:
        status, body = await bench.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "u"}]})
        assert status == 502
        assert "told to fail" in body["error"]["message"]
        (call,) = bench.store.calls("e")
        assert (call.finish, len(call.sampled_ids)) == ("error", 4)


async def test_keys_and_closing(tmp_path):
    async with Bench(tmp_path, None, "x", "y") as bench:
        start = {"messages": [{"role": "user", "content": "u"}]}
        assert (await bench.post("/v1/chat/completions", start, key="wrong"))[0] == 401
        await bench.chat_call(start["messages"])
        info = await bench.service.close_execution("e", Status.TIMEOUT, Score(0.5, {"a": 1.0}), "clock")
        assert (info.status, info.score.value, info.calls) == (Status.TIMEOUT, 0.5, 1)
        status, body = await bench.post("/v1/chat/completions", start)
        assert status == 401
        assert "has ended (timeout)" in body["error"]["message"]
        info = await bench.service.close_execution("e", Status.COMPLETED, Score(1.0))
        assert info.score == Score(1.0)


async def test_admin_over_http(tmp_path):
    async with Bench(tmp_path, None, "x", "y") as bench:
        assert (await bench.post("/admin/v1/executions", {"execution": "f"}, key="no"))[0] == 401
        status, opened = await bench.post("/admin/v1/executions", {"execution": "f", "step": 2}, key="admin")
        assert status == 200
        assert (await bench.post("/admin/v1/executions", {"execution": "f"}, key="admin"))[0] == 409
        status, _ = await bench.post(
            "/admin/v1/executions/f/sessions", {"session": "h", "kind": "sub_agent"}, key="admin"
        )
        assert status == 200
        start = {"messages": [{"role": "user", "content": "u"}]}
        assert (await bench.post("/v1/chat/completions", start, key=opened["api_key"]))[0] == 200
        async with AdminClient(bench.server.base_url, "admin") as admin:
            again = await admin.reopen_execution("f")
        assert again.keyed_base_url.endswith(f"/x/{again.api_key}/v1")
        assert (await bench.post("/v1/chat/completions", start, key=opened["api_key"]))[0] == 401
        assert (await bench.post("/v1/chat/completions", start, key=again.api_key))[0] == 200
        done = {"status": "completed", "score": {"value": 1.0, "milestones": {"m": 1.0}}}
        status, info = await bench.post("/admin/v1/executions/f/close", done, key="admin")
        assert (status, info["status"], info["score"]["value"], info["calls"]) == (200, "completed", 1.0, 2)
        assert (await bench.post("/admin/v1/executions/zz/close", done, key="admin"))[0] == 404
        for name, refused in (("f", 409), ("zz", 404)):
            assert (await bench.post(f"/admin/v1/executions/{name}/reopen", {}, key="admin"))[0] == refused
        async with bench.http.get(bench.server.base_url + "/metrics") as answer:
            text = await answer.text()
        assert 'gyre_tito_calls_total{kind="stop"} 2' in text


async def test_a_restarted_proxy_goes_on_where_it_was(tmp_path):
    async with Bench(tmp_path, None, "one") as bench:
        start = [{"role": "user", "content": "u"}]
        await bench.chat_call(start)
        key = bench.opened.api_key
    chat = tiny_format()
    store = Store.open(tmp_path / "s.db", writable=True)
    server = ProxyServer(TitoService(BookkeepingEngine(scripted(chat, "two")), store, chat))
    await server.start()
    follow = [*start, {"role": "assistant", "content": "one"}, {"role": "user", "content": "v"}]
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            server.base_url + "/v1/chat/completions",
            json={"messages": follow},
            headers={"Authorization": f"Bearer {key}"},
        ) as answer,
    ):
        assert answer.status == 200
    await server.stop()
    calls = store.calls("e")
    assert [(one.index, one.link, one.parent) for one in calls] == [(0, Link.START, -1), (1, Link.EXTEND, 0)]
    store.close()


async def test_context_limit_and_back_pressure(tmp_path):
    limits = Limits(context_limit=40, max_in_flight=1, max_waiting=1)
    async with Bench(tmp_path, None, "a", "b", "c", "d", limits=limits) as bench:
        status, body = await bench.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "u" * 200}]})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        start = {"messages": [{"role": "user", "content": "u"}]}
        bench.engine.gate = asyncio.Event()
        first = asyncio.create_task(bench.post("/v1/chat/completions", start))
        while bench.service.metrics.gauges["in_flight"] < 1:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(bench.post("/v1/chat/completions", start))
        while bench.service.metrics.gauges["waiting"] < 1:
            await asyncio.sleep(0.001)
        status, body = await bench.post("/v1/chat/completions", start)
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        bench.engine.gate.set()
        assert [(await one)[0] for one in (first, second)] == [200, 200]
        assert all(len(e.prompt) + e.call.sampling.max_tokens <= 40 for e in bench.engine.books)


async def test_the_prompt_is_a_view_that_nobody_can_write(tmp_path):
    async with Bench(tmp_path, None, "a", "b") as bench:
        await bench.chat_call([{"role": "user", "content": "u"}])
        prompt = bench.engine.books[0].call.prompt_ids
        assert prompt.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            prompt[0] = 1


BAD = [
    ({}, "messages is missing"),
    ({"messages": []}, "empty"),
    ({"messages": "hello"}, "messages is missing or no list"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "no assistant turn with tool calls"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": 5}]}, "Expected"),
    ({"messages": [{"role": "user", "content": "x"}], "temperature": -1}, "temperature"),
    ({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "user", "content": "x"}], "n": 1000}, "n must be"),
    ({"messages": [{"role": "user", "content": "x"}], "stop": ""}, "stop string is empty"),
    ({"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}, "no tools"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "web"}]}, "tools[0]"),
    ({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}, "response_format"),
]


async def test_bad_requests_get_a_400_that_helps(tmp_path):
    async with Bench(tmp_path) as bench:
        for body, expected in BAD:
            status, answer = await bench.post("/v1/chat/completions", body)
            assert status == 400, (body, answer)
            assert expected in answer["error"]["message"]
            assert answer["error"]["type"] == "invalid_request_error"
        headers = {"Authorization": f"Bearer {bench.opened.api_key}"}
        for raw in (b"{", b"\xff\xfe", b"[1]", b"null", b'{"messages": [' + b"[" * 2000):
            async with bench.http.post(
                bench.server.base_url + "/v1/chat/completions", data=raw, headers=headers
            ) as answer:
                assert answer.status == 400
                assert "error" in await answer.json()
        assert bench.store.calls("e") == []
