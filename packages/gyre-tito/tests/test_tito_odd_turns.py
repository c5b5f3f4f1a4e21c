"""What a model may write that no parser follows: it is an answer in every dialect, never the endpoint's failure."""

from __future__ import annotations

import json

import pytest
from gyre_tito.testing import tiny_format
from tito_bench import ANTHROPIC_TOOLS, RESPONSE_TOOLS, SCHEMA, Bench


def call(arguments: str, name: str = "read_file") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ODD = {
    "open and deep": call("[" * 3000),
    "closed and deep": call("[" * 3000 + "]" * 3000),
    "many digits": call('{"path": ' + "1" * 5000 + "}"),
    "half a character": call('{"path": "\\ud800"}'),
    "half a character as a key": call('{"\\ud800": 1}'),
    "half a name": call("{}", "\\udfff"),
    "no number": call('{"path": NaN}'),
    "deep, in a thought": f"<think>\n{call('[' * 3000)}\n</think>\n\nok",
}
CHAT_TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
async def test_an_odd_turn_is_an_answer_that_the_next_request_may_hold(tmp_path, text, stream):
    async with Bench(tmp_path, text, "fine", chunk=500) as bench:
        messages = [{"role": "user", "content": "u"}]
        body = {"messages": messages, "tools": CHAT_TOOLS, "max_tokens": 20_000}
        status, answer = await bench.post("/v1/chat/completions", body)
        assert status == 200, answer
        turn = {key: value for key, value in answer["choices"][0]["message"].items() if value is not None}
        calls = turn.get("tool_calls", [])
        assert calls or turn["content"].strip(), "nothing that was sampled is lost"
        for each in calls:
            json.loads(each["function"]["arguments"])
        messages += [turn, *({"role": "tool", "tool_call_id": each["id"], "content": "r"} for each in calls)]
        if stream:
            events = await bench.events("/v1/chat/completions", body)
            assert not [event for event in events if "error" in event]
        else:
            status, answer = await bench.post("/v1/chat/completions", body)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "fine"), answer
        bench.one_path()


@pytest.mark.parametrize("text", ODD.values(), ids=ODD.keys())
async def test_an_odd_turn_streams_in_every_dialect(tmp_path, text):
    requests = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "u"}], "tools": CHAT_TOOLS},
        "/v1/messages": {"messages": [{"role": "user", "content": "u"}], "tools": ANTHROPIC_TOOLS},
        "/v1/responses": {"input": "u", "tools": RESPONSE_TOOLS},
    }
    most = {"/v1/responses": "max_output_tokens"}
    async with Bench(tmp_path, *[text] * 6, chunk=500) as bench:
        for path, body in requests.items():
            body = {"model": "m", most.get(path, "max_tokens"): 20_000, **body}
            events = await bench.events(path, body)
            assert events
            assert not [
                event for event in events if event.get("error") or event.get("type") in ("error", "response.failed")
            ]
            status, answer = await bench.post(path, body)
            assert status == 200, (path, answer)


def test_a_turn_that_cannot_be_read_is_told_as_it_was_written():
    chat = tiny_format()
    text = "Hm. " + ODD["open and deep"]
    turn = chat.parse([*chat.tokenizer.encode(text), chat.stop_ids[0]], tools=CHAT_TOOLS, prompt_tail=(), call_id="c")
    assert turn.content == text
    assert (turn.tool_calls, turn.broken_calls) == ((), 1)
