"""The other dialects over raw HTTP: completions, responses, Anthropic messages. Histories must stay one path."""

from __future__ import annotations

import gzip
import json

import pytest
from gyre_tito.dialects.response_stream import tokens_of_text
from gyre_tito.requests import TokenLogprob
from tito_bench import ANTHROPIC_TOOLS, RESPONSE_TOOLS, SCHEMA, Bench

CALL = '<tool_call>\n{"name": "read_file",  "arguments": {"path":"a.txt"}}\n</tool_call>'
THOUGHT = "<think>\nlook\n</think>\n\n"


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_conversation_is_one_path(tmp_path, stream):
    async with Bench(tmp_path, f"{THOUGHT}I read it.\n{CALL}", "It says 5.") as bench:
        body = {
            "model": "m",
            "max_tokens": 200,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "What is in a.txt?"}],
            "tools": ANTHROPIC_TOOLS,
        }
        if stream:
            content = assemble_anthropic(await bench.events("/v1/messages", body), "tool_use")
        else:
            status, answer = await bench.post("/v1/messages", body)
            assert status == 200
            assert answer["stop_reason"] == "tool_use"
            content = answer["content"]
        assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
        assert content[0]["thinking"] == "look"
        assert content[1]["text"] == "I read it."
        assert content[2]["input"] == {"path": "a.txt"}
        result = {"type": "tool_result", "tool_use_id": content[2]["id"], "content": [{"type": "text", "text": "5"}]}
        body["messages"] += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
        status, answer = await bench.post("/v1/messages", body)
        assert (status, answer["stop_reason"]) == (200, "end_turn")
        assert answer["content"] == [{"type": "text", "text": "It says 5."}]
        assert answer["usage"]["cache_read_input_tokens"] > 0
        bench.one_path()


def assemble_anthropic(events, stop_reason):
    assert events[0]["type"] == "message_start"
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-1]["type"] == "message_stop"
    assert events[-2]["delta"]["stop_reason"] == stop_reason
    blocks = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for kind, field in (("text_delta", "text"), ("thinking_delta", "thinking")):
                if delta["type"] == kind:
                    block[field] += delta[field]
            block["json"] += delta.get("partial_json", "")
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return blocks


async def test_anthropic_prefill_stop_and_count(tmp_path):
    async with Bench(tmp_path, " Paris END tail", "ok") as bench:
        messages = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "The answer is"}]
        body = {"model": "m", "max_tokens": 50, "messages": messages, "stop_sequences": ["END"]}
        status, answer = await bench.post("/v1/messages", body)
        assert status == 200
        assert answer["content"][0]["text"] == " Paris "
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
        prompt = bench.engine.books[0].prompt.tolist()
        assert bench.chat.decode(prompt).endswith("assistant\nThe answer is")
        follow = [
            messages[0],
            {"role": "assistant", "content": "The answer is Paris"},
            {"role": "user", "content": "?"},
        ]
        status, answer = await bench.post("/v1/messages", {**body, "messages": follow})
        assert status == 200
        bench.one_path()
        status, counted = await bench.post("/v1/messages/count_tokens", {"model": "m", "messages": messages[:1]})
        assert (status, counted["input_tokens"]) == (200, len(prompt) - len(bench.chat.encode("The answer is")))


async def test_anthropic_errors_have_its_shape(tmp_path):
    async with Bench(tmp_path) as bench:
        for body, text in (
            ({"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
            ({"max_tokens": 5}, "messages"),
            ({"max_tokens": 5, "messages": [{"role": "system", "content": "x"}]}, "role"),
            ({"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
            (
                {
                    "max_tokens": 5,
                    "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "z"}]}],
                },
                "no assistant turn",
            ),
            (
                {
                    "max_tokens": 5,
                    "messages": [{"role": "user", "content": "x"}],
                    "tools": [{"name": "web_search", "type": "web_search_20250305"}],
                },
                "custom tools",
            ),
        ):
            status, answer = await bench.post("/v1/messages", body)
            assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
            assert text in answer["error"]["message"]
        bench.key = "wrong"
        status, answer = await bench.post("/v1/messages", {})
        assert (status, answer["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_conversation_is_one_path(tmp_path, stream):
    async with Bench(tmp_path, f"{THOUGHT}I read it.\n{CALL}", "It says 5.") as bench:
        body = {"model": "m", "instructions": "Be brief.", "input": "What is in a.txt?", "tools": RESPONSE_TOOLS}
        if stream:
            events = await bench.events("/v1/responses", body)
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert events[-1]["type"] == "response.completed"
            response = events[-1]["response"]
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert done == response["output"]
            text = "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta")
            assert text == "I read it."
        else:
            status, response = await bench.post("/v1/responses", body)
            assert status == 200
        output = response["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert json.loads(output[2]["arguments"]) == {"path": "a.txt"}
        result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "5"}
        body["input"] = [{"role": "user", "content": "What is in a.txt?"}, *output, result]
        status, response = await bench.post("/v1/responses", body)
        assert (status, response["status"]) == (200, "completed")
        assert response["output"][0]["content"][0]["text"] == "It says 5."
        bench.one_path()


async def test_responses_refuses_what_it_cannot_do(tmp_path):
    async with Bench(tmp_path) as bench:
        for body, text in (
            ({}, "input is missing"),
            ({"input": "x", "previous_response_id": "r"}, "previous_response_id"),
            ({"input": "x", "tools": [{"type": "web_search"}]}, "cannot run here"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
            ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "no assistant turn"),
            ({"input": "x", "background": True}, "background"),
        ):
            status, answer = await bench.post("/v1/responses", body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert text in answer["error"]["message"]


async def test_completions_continue_text_without_encoding_it_again(tmp_path):
    async with Bench(tmp_path, " two three", " five", "x", "y", "z") as bench:
        status, first = await bench.post("/v1/completions", {"prompt": "one", "max_tokens": 40, "logprobs": 0})
        assert status == 200
        text = first["choices"][0]["text"]
        assert text == " two three"
        assert len(first["choices"][0]["logprobs"]["tokens"]) == len(bench.engine.books[0].sampled)
        await bench.post("/v1/completions", {"prompt": "one" + text + " four", "max_tokens": 40})
        tree = bench.store.load_tree("e")
        kept = bench.store.calls("e")[1]
        assert kept.parent == 0
        assert kept.prefix_len == tree.place(0).path_len - 1
        ids = bench.engine.books[1].prompt.tolist()
        body = {"prompt": [ids, "other"], "max_tokens": 5}
        status, both = await bench.post("/v1/completions", body)
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        assert both["choices"][1]["text"] == "y"
        assert bench.engine.books[2].prompt.tolist() == ids
        _, echoed = await bench.post("/v1/completions", {"prompt": "other", "max_tokens": 5, "echo": True})
        assert echoed["choices"][0]["text"] == "otherz"
        for bad in ({}, {"prompt": []}, {"prompt": [10**6]}, {"prompt": ["a", 1]}, {"prompt": "a", "best_of": 3}):
            status, answer = await bench.post("/v1/completions", bad)
            assert (status, "error" in answer) == (400, True)


async def test_completions_stream(tmp_path):
    async with Bench(tmp_path, "a b c", "d e f") as bench:
        events = await bench.events("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 40})
        texts = {0: "", 1: ""}
        for event in events:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {0: "a b c", 1: "d e f"}


async def test_a_forced_tool_call_is_context_and_not_sampled(tmp_path):
    async with Bench(tmp_path, '{"path": "b.txt"}}\n</tool_call>', "done") as bench:
        tool = {"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}
        choice = {"type": "function", "function": {"name": "read_file"}}
        messages = [{"role": "user", "content": "u"}]
        body = {"messages": messages, "tools": [tool], "tool_choice": choice}
        status, answer = await bench.post("/v1/chat/completions", body)
        assert status == 200
        call = answer["choices"][0]["message"]["tool_calls"][0]
        assert json.loads(call["function"]["arguments"]) == {"path": "b.txt"}
        sampled = bench.chat.decode(bench.store.calls("e")[0].sampled_ids.tolist())
        assert sampled.startswith('{"path"')
        messages += [answer["choices"][0]["message"], {"role": "tool", "tool_call_id": call["id"], "content": "5"}]
        assert (await bench.post("/v1/chat/completions", {"messages": messages, "tools": [tool]}))[0] == 200
        bench.one_path()


async def test_tool_choice_none_leaves_calls_as_text(tmp_path):
    async with Bench(tmp_path, CALL) as bench:
        tool = {"type": "function", "function": {"name": "read_file"}}
        body = {"messages": [{"role": "user", "content": "u"}], "tools": [tool], "tool_choice": "none"}
        _, answer = await bench.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == CALL
        assert "tool_calls" not in answer["choices"][0]["message"]


async def test_a_broken_tool_call_is_shown_as_the_model_wrote_it(tmp_path):
    broken = '<tool_call>\n{"name": "read_file", oops}\n</tool_call>'
    async with Bench(tmp_path, "Hm. " + broken, "ok") as bench:
        tool = {"type": "function", "function": {"name": "read_file"}}
        messages = [{"role": "user", "content": "u"}]
        _, answer = await bench.post("/v1/chat/completions", {"messages": messages, "tools": [tool]})
        content = answer["choices"][0]["message"]["content"]
        assert broken in content
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "again"}]
        await bench.post("/v1/chat/completions", {"messages": messages, "tools": [tool]})
        bench.one_path()


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_tell_logprobs_when_asked(tmp_path, stream):
    async with Bench(tmp_path, f"{THOUGHT}one two\n{CALL}", "x") as bench:
        include = ["message.output_text.logprobs"]
        body = {"input": "u", "tools": RESPONSE_TOOLS, "include": include}
        if stream:
            events = await bench.events("/v1/responses", body)
            response = events[-1]["response"]
            told = [one for e in events if e["type"] == "response.output_text.delta" for one in e["logprobs"]]
            done = next(e for e in events if e["type"] == "response.output_text.done")
            assert told == done["logprobs"][: len(told)]
            assert told
        else:
            _, response = await bench.post("/v1/responses", body)
        shown = response["output"][1]["content"][0]["logprobs"]
        assert "".join(one["token"] for one in shown).strip() == "one two", "neither the reasoning nor the call"
        book = bench.engine.books[0]
        sampled = list(zip(book.sampled, book.logprobs, strict=True))
        spans = [sampled[at : at + len(shown)] for at in range(len(sampled))]
        assert [(one["token_id"], one["logprob"]) for one in shown] in spans
        _, plain = await bench.post("/v1/responses", {"input": "v"})
        assert plain["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("tokens", "text", "reasoning", "expected"),
    [
        (["hm", "</think>", "\n\n", "k", "<end>"], "k", "hm", ["k"]),
        (["ok", "</think>", " ok", " so", "<end>"], "ok so", "ok", [" ok", " so"]),
        (["hm", "</think>", "<end>"], "", "hm", []),
        (["a", "\ufffd", "\ufffd", "<end>"], "a\u00e9", "", ["a", "\ufffd", "\ufffd", "<end>"]),
    ],
)
def test_the_tokens_of_a_text_are_those_that_spell_it(tokens, text, reasoning, expected):
    sampled = [TokenLogprob(one, number, -0.5) for number, one in enumerate(tokens)]
    assert [one.text for one in tokens_of_text(sampled, text, reasoning)] == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_was_cut_says_so(tmp_path, stream):
    async with Bench(tmp_path, "one two three four") as bench:
        body = {"input": "u", "max_output_tokens": 2}
        if stream:
            events = await bench.events("/v1/responses", body)
            assert events[-1]["type"] == "response.incomplete"
            assert events[-2]["item"]["status"] == "incomplete"
            response = events[-1]["response"]
        else:
            _, response = await bench.post("/v1/responses", body)
        assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
        assert response["output"][0]["content"][0]["text"]


async def test_what_cannot_be_honoured_is_refused(tmp_path):
    async with Bench(tmp_path, "a", "b") as bench:
        messages = [{"role": "user", "content": "u"}]
        for field, value in (
            ("functions", [{"name": "f"}]),
            ("function_call", "auto"),
            ("chat_template_kwargs", {"enable_thinking": False}),
            ("guided_json", {}),
            ("structured_outputs", {"regex": "a"}),
            ("response_format", {"type": "json_object"}),
        ):
            status, answer = await bench.post("/v1/chat/completions", {"messages": messages, field: value})
            assert (status, answer["error"]["param"]) == (400, field)
        for more in ({"prompt": [5], "echo": True}, {"prompt": "x", "echo": True, "logprobs": 1}):
            status, answer = await bench.post("/v1/completions", more)
            assert (status, answer["error"]["param"]) == (400, "echo")
        fine = {"functions": [], "chat_template_kwargs": {}, "guided_json": None, "response_format": {"type": "text"}}
        assert (await bench.post("/v1/chat/completions", {"messages": messages, **fine}))[0] == 200


async def test_a_stream_holds_nothing_of_its_stop_string(tmp_path):
    async with Bench(tmp_path, *["an ENTRY\nEND or so"] * 3, delay=0.001) as bench:
        stop = ["never", "\nEND"]
        asked = {"messages": [{"role": "user", "content": "u"}], "stop": stop}
        events = await bench.events("/v1/chat/completions", asked)
        chat = [event["choices"][0]["delta"].get("content") or "" for event in events]
        events = await bench.events("/v1/completions", {"prompt": "u", "stop": stop, "max_tokens": 40})
        plain = [choice["text"] for event in events for choice in event["choices"]]
        asked = {"messages": asked["messages"], "max_tokens": 40, "stop_sequences": stop}
        events = await bench.events("/v1/messages", asked)
        anthropic = [event["delta"]["text"] for event in events if event.get("delta", {}).get("text")]
        assert ["".join(one) for one in (chat, plain, anthropic)] == ["an ENTRY"] * 3
        assert all(sum(map(bool, one)) > 1 for one in (chat, plain, anthropic))


async def test_token_counts_end_a_stream_when_asked(tmp_path):
    async with Bench(tmp_path, "a", "b", "c", "d") as bench:
        for path, body in (
            ("/v1/completions", {"prompt": "u"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "u"}]}),
        ):
            plain = await bench.events(path, body)
            assert all(event["choices"] and "usage" not in event for event in plain)
            asked = await bench.events(path, {**body, "stream_options": {"include_usage": True}})
            assert (asked[-1]["choices"], asked[-1]["usage"]["completion_tokens"]) == ([], 2)


async def test_paths_and_methods_that_do_not_exist_are_told_in_the_dialect(tmp_path):
    async with Bench(tmp_path) as bench:
        for method, path, status, words in (
            ("POST", "/v1/embeddings", 404, "no route /v1/embeddings"),
            ("GET", "/v1/chat/completions", 405, "takes POST, not GET"),
            ("POST", f"/x/{bench.key}/v1/nothing", 404, "no route"),
            ("DELETE", "/v1/messages", 405, "takes POST, not DELETE"),
            ("POST", "/v1/messages/batches", 404, "no route"),
        ):
            async with bench.http.request(method, bench.server.base_url + path) as answer:
                told = await answer.json()
                assert (answer.status, words in told["error"]["message"]) == (status, True)
                assert ("type" in told) == ("messages" in path)
                assert answer.headers.get("Allow") == ("POST" if status == 405 else None)


async def test_a_body_that_cannot_be_unpacked_is_refused_and_hurts_nobody(tmp_path, caplog):
    async with Bench(tmp_path, "a") as bench:
        url = bench.server.base_url + "/v1/messages"
        headers = {"x-api-key": bench.key, "Content-Encoding": "gzip"}
        async with bench.http.post(url, data=b"hello", headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")
        good = {"max_tokens": 5, "messages": [{"role": "user", "content": "u"}]}
        async with bench.http.post(url, data=gzip.compress(json.dumps(good).encode()), headers=headers) as answer:
            assert answer.status == 200
        assert not caplog.records


async def test_models(tmp_path):
    async with Bench(tmp_path) as bench:
        headers = {"Authorization": f"Bearer {bench.key}"}
        async with bench.http.get(bench.server.base_url + "/v1/models", headers=headers) as answer:
            assert (await answer.json())["data"][0]["id"] == "policy"
        async with bench.http.get(bench.server.base_url + "/v1/models/other", headers=headers) as answer:
            assert answer.status == 404
