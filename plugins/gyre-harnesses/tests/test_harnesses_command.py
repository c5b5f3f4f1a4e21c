# ruff: noqa: E501 - lines of embedded programs
"""The harness `command`: a program in the sandbox, seen and limited at the gate."""

from __future__ import annotations

import json

import pytest
from gyre_core import ComponentContext, ExecutionJob, ExecutionStatus, InfrastructureError, Limits, ScorerSpec, Task
from gyre_core.testing.endpoint import Refuse, Say, ScriptedEndpoint, in_order
from gyre_core.testing.harnesses import HarnessConformance, HarnessRig, RecordedEvents
from gyre_harnesses.command.asking import UnreadableError, read_request
from gyre_harnesses.command.harness import CommandHarness, fill
from gyre_harnesses.options import CommandOptions, LocalOptions
from gyre_harnesses.sandbox.local import LocalSandbox

AGENT = r"""
import json, os, sys, urllib.error, urllib.request
messages = [{"role": "user", "content": os.environ["GYRE_PROMPT"]}]
while True:
    body = json.dumps({"model": os.environ["GYRE_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    try:
        answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        sys.exit(f"refused: {error.read().decode()}")
    messages.append({"role": "assistant", "content": answer})
    if answer == "done":
        break
    os.system(answer)
    messages.append({"role": "user", "content": "ok"})
print("bye")
"""
PROGRAM = CommandOptions(argv=("/usr/bin/python3", "-c", AGENT))


def make_rig(tmp_path, options=PROGRAM):
    context = ComponentContext(str(tmp_path), "test")
    return HarnessRig(
        lambda: CommandHarness(options, context),
        lambda: LocalSandbox(LocalOptions(), context),
        works=[Say("cat in.txt > out"), Say("true"), Say("done")],
    )


class TestCommand(HarnessConformance):
    @pytest.fixture
    def rig(self, tmp_path):
        return make_rig(tmp_path)


async def run(tmp_path, script, options=PROGRAM, limits=None, workspace_options=None):
    context = ComponentContext(str(tmp_path), "test")
    sandbox = LocalSandbox(workspace_options or LocalOptions(), context)
    events = RecordedEvents()
    try:
        workspace = await sandbox.create("w", {})
        async with ScriptedEndpoint(in_order({"main": script})) as endpoint:
            job = ExecutionJob("e", Task("t", "the prompt", ScorerSpec("files")), endpoint.address, limits or Limits())
            end = await CommandHarness(options, context).run(job, workspace, events)
            return end, endpoint.requests, events.seen
    finally:
        await sandbox.close()


async def test_the_program_speaks_with_the_executions_key_and_nobody_else(tmp_path):
    end, requests, seen = await run(tmp_path, [Say("echo hi"), Say("done")])
    assert (end.status, end.turns, end.reason) == (ExecutionStatus.COMPLETED, 2, "the agent program ended")
    assert end.evidence["final"] == "hi\nbye\n"
    assert {r.headers["authorization"] for r in requests} == {"Bearer key-of-the-execution"}
    assert seen == [
        ("turn", "main"),
        ("tool_started", "main"),
        ("tool_ended", "main"),
        ("turn", "main"),
        ("tool_started", "main"),
    ]


async def test_tokens_are_counted_at_the_gate(tmp_path):
    answers = [Say("true", prompt_tokens=50, sampled_tokens=10)] * 9
    end, requests, _ = await run(tmp_path, answers, limits=Limits(max_sampled_tokens=25))
    assert (end.status, end.evidence["limit"], len(requests)) == (ExecutionStatus.TRUNCATED, "sampled_tokens", 3)
    end, requests, _ = await run(tmp_path, answers, limits=Limits(max_context_tokens=60))
    assert (end.status, end.evidence["limit"], len(requests)) == (ExecutionStatus.TRUNCATED, "context", 1)


async def test_a_program_that_goes_on_after_a_refusal_is_ended(tmp_path):
    stubborn = CommandOptions(
        argv=("/usr/bin/python3", "-c", AGENT.replace("sys.exit(", "__import__('time').sleep(600) or print("))
    )
    end, _, _ = await run(tmp_path, [Say("true")] * 3, stubborn, Limits(max_turns=1))
    assert (end.status, end.evidence["exit_code"]) == (ExecutionStatus.TIMEOUT, None)


async def test_whose_fault_it_is(tmp_path):
    with pytest.raises(InfrastructureError, match="before any answer of the model"):
        await run(tmp_path, [], CommandOptions(argv=("no-such-agent",)))
    with pytest.raises(InfrastructureError, match="HTTP 500"):
        await run(tmp_path, [Say("true"), Refuse(500)])
    with pytest.raises(InfrastructureError, match="HTTP 400: scripted"):  # the model has not said a word
        await run(tmp_path, [Refuse(400)])
    crash = CommandOptions(argv=("/usr/bin/python3", "-c", AGENT.replace('print("bye")', "sys.exit(3)")))
    end, _, _ = await run(tmp_path, [Say("done")], crash)
    assert (end.status, end.reason) == (ExecutionStatus.COMPLETED, "the agent program ended with 3")


LAST_ACTS = """
def post(path, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, body, {"content-type": "application/json"})
    try:
        return urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        return error.code
import json, os, urllib.error, urllib.request
good = json.dumps({"model": "m", "messages": []}).encode()
"""


async def test_a_call_that_the_endpoint_failed_is_no_turn(tmp_path):
    again = LAST_ACTS + "for _ in range(6): post('/chat/completions', good)"
    options, limits = CommandOptions(argv=("/usr/bin/python3", "-c", again)), Limits(max_turns=2)
    end, requests, _ = await run(tmp_path, [Refuse(503)] * 4 + [Say("a")] * 2, options, limits)
    assert (end.status, end.turns, len(requests)) == (ExecutionStatus.COMPLETED, 2, 6)
    with pytest.raises(InfrastructureError, match="HTTP 503"):
        await run(tmp_path, [Refuse(503)] * 6, options, limits)


async def test_a_program_whose_every_request_is_turned_down_has_not_done_its_task(tmp_path):
    options = CommandOptions(argv=("/usr/bin/python3", "-c", f"{LAST_ACTS}post('/chat/completions', good)"))
    with pytest.raises(InfrastructureError, match="exit 0 before any answer of the model: HTTP 400: scripted"):
        await run(tmp_path, [Refuse(400)], options)


@pytest.mark.parametrize(
    ("act", "noted"),
    [
        ("post('/chat/completions', good)", "HTTP 400: scripted"),
        ("post('/chat/completions', b'nonsense')", "HTTP 400: the request body is not JSON"),
        ("post('/chat/completions', b'[' * 100000)", "HTTP 400: the request body is not JSON"),
        ("post('/nothing', good)", "HTTP 404: no POST /v1/nothing here"),
    ],
    ids=["turned down", "nonsense", "deep", "nowhere"],
)
async def test_no_act_of_the_program_is_a_fault_of_ours(tmp_path, act, noted):
    options = CommandOptions(argv=("/usr/bin/python3", "-c", f"{LAST_ACTS}post('/chat/completions', good); {act}"))
    end, _, _ = await run(tmp_path, [Say("a"), Refuse(400)], options)
    assert (end.status, end.turns) == (ExecutionStatus.COMPLETED, 1)
    assert end.evidence["turned_down"].startswith(noted)


async def test_only_the_model_is_behind_the_gate(tmp_path):
    look = (
        LAST_ACTS
        + """if True:
        import os, urllib.request as u
        post("/chat/completions", good)
        for path in ("/admin", "/v1/../admin", "/v1/%252e%252e/admin", "/v1//chat/completions", "/v1/%2563hat/completions"):
            try:
                u.urlopen(os.environ["ANTHROPIC_BASE_URL"] + path, b"{}")
            except Exception as error:
                print(error)
    """
    )
    end, requests, _ = await run(tmp_path, [Say("a")], CommandOptions(argv=("/usr/bin/python3", "-c", look)))
    assert end.evidence["final"] == "HTTP Error 404: Not Found\n" * 5
    assert len(requests) == 1


def test_words_are_filled_in_once():
    words = {"prompt": "say {model} {x}", "model": "m"}
    assert fill("{prompt}|{model}|{y}", words) == "say {model} {x}|m|{y}"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/chat/completions", {"max_tokens": 9000, "n": 1}, {"max_tokens": 50, "n": 1}),
        ("/chat/completions", {"max_completion_tokens": 9000}, {"max_completion_tokens": 50}),
        ("/chat/completions", {"messages": []}, {"messages": [], "max_tokens": 50}),
        ("/messages", {"max_tokens": 32000}, {"max_tokens": 50}),
        ("/responses", {"input": "x"}, {"input": "x", "max_output_tokens": 50}),
        ("/chat/completions", {"max_tokens": None}, {"max_tokens": 50}),
        ("/chat/completions", {"max_tokens": 9e9}, {"max_tokens": 50}),
        ("/completions", {"max_tokens": -1}, {"max_tokens": 50}),
        ("/chat/completions", {"max_tokens": 5, "n": "8"}, {"max_tokens": 5, "n": 1}),
        ("/chat/completions", '{"max_tokens": 5, "max_t\\u006fkens": 100000}', {"max_tokens": 50}),
        ("/chat/completions", {"metadata": {"max_tokens": 1}}, {"metadata": {"max_tokens": 1}, "max_tokens": 50}),
        ("/messages", {"max_output_tokens": 1}, {"max_output_tokens": 1, "max_tokens": 50}),
        (
            "/chat/completions",
            {"max_tokens": 20, "messages": [{"content": '"max_tokens": 999'}]},
            {"max_tokens": 20, "messages": [{"content": '"max_tokens": 999'}]},
        ),
    ],
    ids=str,
)
def test_a_call_asks_for_no_more_tokens_than_a_call_may_have(path, body, expected):
    text = body if isinstance(body, str) else json.dumps(body)
    assert json.loads(read_request(path, text.encode()).bounded(50)) == expected


def test_what_is_within_its_limit_is_passed_on_as_it_is_and_what_cannot_be_read_not_at_all():
    for body in (
        b'{ "max_tokens":  50 }',
        b'{"n": 2, "max_tokens": 0}',
        b'{"stream":  true, "max_tokens": 1, "stream_options": {"include_usage": true}}',
    ):
        assert read_request("/chat/completions", body).bounded(50) == body
    for body in (b"not json", b"[1]", b"", b"\xff", b"[" * 100_000):
        with pytest.raises(UnreadableError):
            read_request("/chat/completions", body)
