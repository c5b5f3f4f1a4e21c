"""The harness `shell` against an endpoint that follows a script, over HTTP, in a real sandbox."""

from __future__ import annotations

import asyncio

import pytest
from gyre_core import (
    ComponentContext,
    ConfigError,
    ExecutionJob,
    ExecutionStatus,
    InfrastructureError,
    Limits,
    ScorerSpec,
    Task,
)
from gyre_core.testing.endpoint import Call, Refuse, Say, ScriptedEndpoint, in_order
from gyre_core.testing.folder import FolderWorkspace
from gyre_harnesses.options import LocalOptions, ShellOptions
from gyre_harnesses.sandbox.local import LocalSandbox
from gyre_harnesses.shell.harness import ShellHarness
from gyre_harnesses.shell.tools import FileTools, ToolCall

FAST = {"retry_first_s": 0.01}


class Events:
    def __init__(self):
        self.seen = []
        self.states = []

    def turn(self, session, number):
        self.seen.append(("turn", session, number))

    def tool_started(self, session, name):
        self.seen.append(("start", session, name))

    def tool_ended(self, session, name, seconds):
        self.seen.append(("end", session, name))

    def compacted(self, session):
        self.seen.append(("compacted", session))

    async def resting(self, state):
        self.states.append(state())


class Rig:
    def __init__(self, tmp_path):
        self.context = ComponentContext(str(tmp_path), "test")
        self.sandbox = LocalSandbox(LocalOptions(), self.context)
        self.events = Events()

    async def run(self, script, options=None, limits=None, files=None):
        if isinstance(script, list):
            script = in_order({"main": script})
        elif isinstance(script, dict):
            script = in_order(script)
        harness = ShellHarness(ShellOptions(**{**FAST, **(options or {})}), self.context)
        self.workspace = await self.sandbox.create("w", files or {"in": b"3\n1\n2\n"})
        task = Task("t", "sort in", ScorerSpec("files"))
        try:
            async with ScriptedEndpoint(script) as endpoint:
                self.requests = endpoint.requests
                job = ExecutionJob("e1", task, endpoint.address, limits or Limits(), seed=5, temperature=0.7)
                return await harness.run(job, self.workspace, self.events)
        finally:
            await harness.aclose()

    def tool_results(self, request=-1):
        return [m["content"] for m in self.requests[request].body["messages"] if m["role"] == "tool"]


@pytest.fixture
async def rig(tmp_path):
    made = Rig(tmp_path)
    yield made
    await made.sandbox.close()


def bash(command, **more):
    return Say(calls=[Call("bash", {"command": command})], **more)


async def test_an_agent_works_and_says_it_is_done(rig):
    end = await rig.run([bash("sort in > out; cat out; exit 3"), bash("true"), Say("done")], {"system": "Be brief."})
    assert (end.status, end.turns, end.tool_calls) == (ExecutionStatus.COMPLETED, 3, 2)
    assert await rig.workspace.read("out") == b"1\n2\n3\n"
    assert rig.tool_results() == ["1\n2\n3\n[exit 3]", "(no output)"]
    first, last = rig.requests[0], rig.requests[-1]
    assert first.body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "sort in"},
    ]
    assert last.body["messages"][: len(first.body["messages"])] == first.body["messages"]
    assert (
        last.body["messages"][2]["tool_calls"][0]["function"]["arguments"]
        == '{"command": "sort in > out; cat out; exit 3"}'
    )
    assert [t["function"]["name"] for t in first.body["tools"]] == ["bash", "read", "write", "edit"]
    assert (first.body["temperature"], first.body["max_tokens"]) == (0.7, 1024)
    assert first.session == "main"
    assert first.parent is None
    assert first.headers["authorization"] == "Bearer key-of-the-execution"
    assert len({r.body["seed"] for r in rig.requests}) == 3
    assert rig.events.seen[:3] == [("turn", "main", 1), ("start", "main", "bash"), ("end", "main", "bash")]
    assert end.evidence["final"] == "done"


async def test_the_file_tools(rig):
    calls = [
        Call("read", {"path": "in"}),
        Call("write", {"path": "d/new", "content": "one two one\n"}),
        Call("edit", {"path": "d/new", "old": "two", "new": "2"}),
        Call("edit", {"path": "d/new", "old": "one", "new": "1"}),
        Call("edit", {"path": "d/none", "old": "one", "new": "1"}),
        Call("read", {"path": "../../etc/passwd"}),
        Call("write", {"path": "/etc/passwd", "content": ""}),
    ]
    await rig.run([Say(calls=calls), Say("done")])
    assert rig.tool_results() == [
        "3\n1\n2",
        "wrote 12 bytes",
        "edited",
        "error: old stands in 2 places, expected exactly one",
        "error: No such file or directory",
        "error: path leads out of the workspace",
        "error: path leads out of the workspace",
    ]
    assert await rig.workspace.read("d/new") == b"one 2 one\n"


async def test_mistakes_come_back_as_text_and_never_crash(rig):
    calls = [
        Call("fly", {"to": "moon"}),
        Call("bash", '{"command": "ls'),
        Call("bash", "[]"),
        Call("bash", {"cmd": "ls"}),
        Call("bash", {"command": 7}),
        Call("bash", {"command": "echo a\0b"}),
        Call("bash", {"command": "echo \udcff"}),
        Call("write", {"path": "x", "content": "\ud800"}),
        Call("task", {"prompt": "not offered"}),
        Call("bash", "[" * 100_000),
        Call("read", {"path": "\ud800"}),
    ]
    end = await rig.run([Say(calls=calls), Say("done")])
    assert end.status is ExecutionStatus.COMPLETED
    results = rig.tool_results()
    assert results[0] == "error: no tool 'fly'; there are: bash, read, write, edit"
    assert results[1].startswith("error: arguments of bash are not JSON")
    assert results[2] == results[3] == "error: bash takes exactly: command"
    assert results[4] == "error: bash: command must be a string"
    assert results[5] == "error: the command holds a NUL byte"
    assert results[8].startswith("error: no tool 'task'")
    assert results[9].startswith("error: arguments of bash are not JSON: maximum recursion")
    assert results[10].startswith("error: ")
    assert end.evidence["mistakes"] == 7


@pytest.mark.parametrize("tool", ["read", "write", "edit"])
@pytest.mark.parametrize("path", ["\ud800", "a\0b"], ids=["surrogate", "NUL"])
async def test_a_path_that_no_host_has_a_form_for_is_the_models_mistake(tmp_path, tool, path):
    given = {"path": path, "content": "x", "old": "x", "new": "y"}
    files = FileTools(FolderWorkspace(str(tmp_path)), ["bash", "-c"], 1000)
    assert (await files.use(ToolCall("1", tool, given), 1.0)).startswith("error: ")


async def test_a_sub_agent_is_told_nothing_that_cannot_be_sent(rig):
    script = {"main": [Say(calls=[Call("task", {"prompt": "go \ud800"})]), Say("m")], "task-1": [Say("one")]}
    await rig.run(script, {"tools": ("task",)})
    told = [r.body["messages"][0]["content"] for r in rig.requests if r.session == "task-1"]
    assert told == ["go ?"]


async def test_spoilt_answers_cost_a_turn(rig):
    script = [Say("thinking and thi", finish_reason="length"), Say('<tool_call>{"name": bash'), Say("done")]
    end = await rig.run(script)
    assert (end.status, end.turns) == (ExecutionStatus.COMPLETED, 3)
    said = [m["content"] for m in rig.requests[-1].body["messages"] if m["role"] == "user"]
    assert said[1:] == ["[cut: an answer has at most 1024 tokens]", "error: the tool call could not be read"]


async def test_the_turn_limit_is_a_timeout_after_the_last_tools_ran(rig):
    end = await rig.run([bash(f"echo {n} >> out") for n in range(5)], limits=Limits(max_turns=3))
    assert (end.status, end.turns, end.evidence["limit"]) == (ExecutionStatus.TIMEOUT, 3, "turns")
    assert await rig.workspace.read("out") == b"0\n1\n2\n"


async def test_the_wall_limit_cuts_a_slow_model_and_a_slow_tool(rig):
    end = await rig.run([Say("late", delay_s=600)], limits=Limits(wall_s=0.2))
    assert (end.status, end.evidence["limit"], end.turns) == (ExecutionStatus.TIMEOUT, "wall", 0)
    end = await rig.run([bash("sleep 600"), Say("done")], limits=Limits(wall_s=4.0))
    assert (end.status, end.turns, end.tool_calls) == (ExecutionStatus.TIMEOUT, 1, 1)


async def test_time_that_ran_out_while_the_model_was_away_is_our_fault(rig):
    patient = {"retries": 1000, "retry_first_s": 0.05}
    with pytest.raises(InfrastructureError, match="HTTP 503"):
        await rig.run([Refuse(503)] * 1000, options=patient, limits=Limits(wall_s=4.0))


async def test_a_tool_limit_is_told(rig):
    await rig.run(
        [bash("echo some; sleep 600"), bash("yes | head -c 100"), Say()],
        limits=Limits(tool_s=4.0, tool_output_bytes=20),
    )
    assert rig.tool_results() == ["some\n[killed: wall]", "y\n" * 9 + "y\n[cut: 80 more bytes]"]


async def test_token_limits_truncate(rig):
    big = [bash("echo x >> out", prompt_tokens=90, sampled_tokens=20) for _ in range(9)]
    end = await rig.run(big, limits=Limits(max_context_tokens=100))
    assert (end.status, end.evidence["limit"], end.turns) == (ExecutionStatus.TRUNCATED, "context", 1)
    assert await rig.workspace.read("out") == b"x\n"
    end = await rig.run(big, limits=Limits(max_sampled_tokens=50))
    assert (end.status, end.evidence["limit"], end.turns) == (ExecutionStatus.TRUNCATED, "sampled_tokens", 3)
    assert [r.body["max_tokens"] for r in rig.requests] == [50, 30, 10]
    end = await rig.run([bash("true"), Refuse(400, '{"error":{"code":"context_length_exceeded"}}')])
    assert (end.status, end.turns) == (ExecutionStatus.TRUNCATED, 1)


async def test_an_answer_that_is_done_at_the_context_limit_is_done(rig):
    end = await rig.run([Say("done", prompt_tokens=99)], limits=Limits(max_context_tokens=100))
    assert end.status is ExecutionStatus.COMPLETED


async def test_a_busy_endpoint_is_tried_again_with_one_key(rig):
    script = [Refuse(503), Refuse(0), Refuse(429), Say("done")]
    end = await rig.run(script)
    assert end.status is ExecutionStatus.COMPLETED
    assert end.turns == 1
    assert {r.headers["idempotency-key"] for r in rig.requests} == {"e1/main/1"}


async def test_a_dead_endpoint_is_our_fault(rig):
    with pytest.raises(InfrastructureError, match="within 3 tries"):
        await rig.run([Refuse(500)] * 9, {"retries": 2})
    with pytest.raises(InfrastructureError, match="401"):
        await rig.run([Refuse(401)])
    with pytest.raises(InfrastructureError, match="chat completion"):
        await rig.run([Refuse(200, "<html>")])


async def test_a_sub_agent_has_its_own_session_and_the_same_workspace(rig):
    script = {
        "main": [Say(calls=[Call("task", {"prompt": "sort it"}), Call("task", {"prompt": "again"})]), Say("done")],
        "task-1": [bash("sort in > out"), Say("sorted")],
        "task-2": [bash("true"), bash("true"), bash("true")],
    }
    end = await rig.run(script, {"tools": ("bash", "task"), "sub_agent_turns": 2, "system": "s"})
    assert (end.status, end.sub_agents, end.turns, end.tool_calls) == (ExecutionStatus.COMPLETED, 2, 2, 5)
    assert rig.tool_results() == ["sorted", "[sub-agent stopped: turns]"]
    sub = [r for r in rig.requests if r.session == "task-1"]
    assert sub[0].parent == "main"
    assert sub[0].body["messages"] == [{"role": "system", "content": "s"}, {"role": "user", "content": "sort it"}]
    assert [t["function"]["name"] for t in sub[0].body["tools"]] == ["bash"]
    assert await rig.workspace.read("out") == b"1\n2\n3\n"


async def test_sub_agents_nest_to_their_depth(rig):
    ask = Say(calls=[Call("task", {"prompt": "deeper"})])
    script = {"main": [ask, Say("m")], "task-1": [ask, Say("one")], "task-1.1": [ask, Say("two")]}
    await rig.run(script, {"tools": ("task",), "sub_agent_depth": 2})
    deepest = [r for r in rig.requests if r.session == "task-1.1"]
    assert "tools" not in deepest[0].body
    assert deepest[1].body["messages"][-1]["content"].startswith("error: no tool 'task'")


async def test_a_sub_agent_out_of_context_does_not_end_the_execution(rig):
    script = {
        "main": [Say(calls=[Call("task", {"prompt": "p"})]), Say("done")],
        "task-1": [bash("true", prompt_tokens=500)],
    }
    end = await rig.run(script, {"tools": ("bash", "task")}, Limits(max_context_tokens=100))
    assert end.status is ExecutionStatus.COMPLETED
    assert rig.tool_results() == ["[sub-agent stopped: context]"]


async def test_compaction_elides_old_results(rig):
    script = [bash(f"echo {n}") for n in range(5)] + [Say("done")]
    end = await rig.run(script, {"compact": "elide", "compact_after_turns": 3, "compact_keep": 1})
    assert [rig.tool_results(n) for n in range(6)] == [
        [],
        ["0"],
        ["0", "1"],
        ["[elided]", "[elided]", "2"],
        ["[elided]", "[elided]", "2", "3"],
        ["[elided]", "[elided]", "2", "3", "4"],
    ]
    assert end.compactions == 1
    assert ("compacted", "main") in rig.events.seen


async def test_compaction_by_tokens_makes_room_before_the_context_limit(rig):
    script = [bash("echo a"), bash("echo b", prompt_tokens=95), bash("echo c"), Say("done")]
    options = {"compact": "elide", "compact_tokens": 90, "compact_keep": 1}
    end = await rig.run(script, options, Limits(max_context_tokens=100))
    assert (end.status, end.compactions) == (ExecutionStatus.COMPLETED, 1)
    assert rig.tool_results() == ["[elided]", "b", "c"]


async def test_compaction_by_summary_starts_again(rig):
    script = [bash("echo 0"), bash("echo 1"), Say("notes: did two"), bash("echo 2"), Say("done")]
    end = await rig.run(script, {"compact": "summary", "compact_after_turns": 2, "summary_prompt": "sum up"})
    assert (end.status, end.turns, end.compactions) == (ExecutionStatus.COMPLETED, 5, 1)
    assert rig.requests[2].body["messages"][-1] == {"role": "user", "content": "sum up"}
    assert [m["role"] for m in rig.requests[3].body["messages"]] == ["user"]
    assert rig.requests[3].body["messages"][0]["content"].endswith("notes: did two")
    assert rig.requests[3].body["messages"][0]["content"].startswith("sort in")


async def test_cancelling_stops_it_at_once_and_leaves_the_workspace(rig):
    running = asyncio.ensure_future(rig.run([bash("echo x > out; sleep 600"), Say("done")]))
    while not any(kind == "start" for kind, *_ in rig.events.seen):
        await asyncio.sleep(0.01)
    while "out" not in await rig.workspace.list():
        await asyncio.sleep(0.01)
    running.cancel()
    async with asyncio.timeout(120):
        with pytest.raises(asyncio.CancelledError):
            await running
    assert await rig.workspace.read("out") == b"x\n"


@pytest.mark.parametrize(
    "options", [{"tools": ("fly",)}, {"compact": "maybe"}, {"compact": "elide"}, {"sub_agent_turns": 0}], ids=str
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ShellOptions(**options)


def test_descriptions_can_be_replaced():
    from gyre_harnesses.shell.tools import schemas

    assert schemas(["bash"], {"bash": "x"})[0]["function"]["description"] == "x"
