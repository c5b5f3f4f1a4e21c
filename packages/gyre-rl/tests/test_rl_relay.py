"""What `gyre agent` shows of the calls that pass it, in each dialect; and that they pass unchanged."""

from __future__ import annotations

import json

import aiohttp
import pytest
from gyre_core import ModelEndpoint
from gyre_core.testing.endpoint import Call, Refuse, Say, ScriptedEndpoint
from gyre_rl.cli.relay import LONGEST, Relay, received, said


def lines(*events):
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + b"data: [DONE]\n\n"


CALL = {"function": {"name": "bash", "arguments": '{"command": "ls"}'}}
ANSWERS = {
    "chat": json.dumps({"choices": [{"message": {"content": "I look.", "tool_calls": [CALL]}}]}).encode(),
    "chat, streamed": lines(
        {"choices": [{"delta": {"role": "assistant", "content": "I "}}]},
        {"choices": [{"delta": {"content": "look."}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "bash", "arguments": ""}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"command": '}}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '"ls"}'}}]}}]},
        {"choices": [], "usage": {}},
    ),
    "messages": json.dumps(
        {
            "type": "message",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "name": "bash", "input": {"command": "ls"}},
            ],
        }
    ).encode(),
    "messages, streamed": lines(
        {"type": "message_start", "message": {"content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "I look."}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "bash", "input": {}}},
        {"type": "content_block_delta", "index": 1, "delta": {"partial_json": '{"command": "ls"}'}},
    ),
    "responses": json.dumps(
        {
            "output": [
                {"type": "message", "content": [{"type": "output_text", "text": "I look."}]},
                {"type": "function_call", "name": "bash", "arguments": '{"command": "ls"}'},
            ]
        }
    ).encode(),
}


@pytest.mark.parametrize("dialect", ANSWERS)
def test_what_the_model_says_and_calls_is_read_in_each_dialect(dialect):
    assert list(said(ANSWERS[dialect])) == ["says: I look.", 'calls bash {"command": "ls"}']


@pytest.mark.parametrize("answer", [b"", b"null", b"[1]", b"<html>", b"data: x\n\n", b'{"choices": [3]}', b"\xff"])
def test_what_cannot_be_read_is_not_shown(answer):
    assert list(said(answer)) == []


def test_of_a_request_what_is_new_is_shown():
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "do it"}
    own, result = {"role": "assistant", "content": "I look."}, {"role": "tool", "content": "a.txt"}
    assert list(received({"messages": [system, user]})) == ["gets: do it"]
    assert list(received({"messages": [system, user, own, result]})) == ["gets: a.txt"]
    block = {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "a.txt"}]}]}
    assert list(received({"messages": [user, own, block]})) == ["gets: a.txt"]
    output = {"type": "function_call_output", "output": "a.txt"}
    assert list(received({"input": [user, {"type": "function_call"}, output]})) == ["gets: a.txt"]
    assert list(received(None)) == list(received({"messages": 3})) == []
    (long,) = received({"messages": [{"role": "user", "content": "x" * (LONGEST + 5)}]})
    assert long.endswith("… (5 more characters)")


async def test_calls_pass_unchanged_and_are_told_by_session():
    told = []
    answers = iter([Say("", calls=[Call("bash", {"command": "ls"})]), Refuse(418, "no tea")])
    async with ScriptedEndpoint(lambda _: next(answers)) as endpoint, aiohttp.ClientSession() as http:
        async with Relay(endpoint.address, lambda *line: told.append(line)) as model:
            assert model.base_url != endpoint.address.base_url
            url, body = f"{model.base_url}/chat/completions", {"messages": [{"role": "user", "content": "do it"}]}
            headers = {"x-gyre-session": "helper", "authorization": "Bearer k"}
            async with http.post(url, json=body, headers=headers) as answer:
                assert (answer.status, "ls" in await answer.text()) == (200, True)
            async with http.post(url, json=body) as answer:
                assert (answer.status, await answer.text()) == (418, "no tea")
        first, second = endpoint.requests
        assert (first.body, first.headers["authorization"], first.session) == (body, "Bearer k", "helper")
        assert second.session == "main"
    assert told[:2] == [("helper", "gets: do it"), ("helper", 'calls bash {"command": "ls"}')]
    assert told[-1] == ("main", "the model answers HTTP 418: no tea")


async def test_a_model_that_is_not_there_is_told():
    told = []
    nobody = ModelEndpoint("http://127.0.0.1:1/v1", "k", "m")
    async with aiohttp.ClientSession() as http, Relay(nobody, lambda *line: told.append(line)) as model:
        with pytest.raises(aiohttp.ClientError):
            await http.post(f"{model.base_url}/chat/completions", json={})
    assert "is not there" in told[0][1]
