"""Real clients against the proxy: each must work unchanged, and its conversation must be recorded as one path.

`openai` and `anthropic` are test dependencies. The heavier ones (mini-swe-agent, the OpenAI Agents SDK, a coding agent
from npm) run where they are installed and are skipped elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess

import pytest
from gyre_tito import ExecutionSpec, ProxyServer, Store, TitoService
from gyre_tito.records import Link
from gyre_tito.testing import BookkeepingEngine, scripted, tiny_format

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Bench:
    def __init__(self, tmp_path, *texts):
        self.chat = tiny_format()
        self.engine = BookkeepingEngine(scripted(self.chat, *texts), chunk=3)
        self.store = Store.open(tmp_path / "s.db", writable=True, durability="process")
        self.service = TitoService(self.engine, self.store, self.chat)
        self.server = ProxyServer(self.service)

    async def __aenter__(self):
        await self.server.start()
        self.opened = await self.service.open_execution(ExecutionSpec("e"))
        self.key, self.url = self.opened.api_key, self.opened.base_url
        return self

    async def __aexit__(self, *_):
        await self.server.stop()
        self.store.close()

    def recorded(self, leaves=1):
        tree = self.store.load_tree("e")
        for entry in self.engine.books:
            index = int(entry.call.call_id.rpartition("#")[2])
            assert tree.path_ids(index).tolist() == entry.prompt.tolist() + entry.sampled
        assert len(tree.leaves()) == leaves
        return self.store.calls("e")


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_chat(tmp_path, stream):
    openai = pytest.importorskip("openai")
    async with Bench(tmp_path, "Let me look.\n" + call("read", path="a"), "It is 5.") as bench:
        client = openai.AsyncOpenAI(api_key=bench.key, base_url=bench.url)
        tools = [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}}]
        messages = [{"role": "user", "content": "What is in a?"}]
        if stream:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=tools) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_completion()
        else:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        said = answer.choices[0].message
        assert answer.choices[0].finish_reason == "tool_calls"
        assert json.loads(said.tool_calls[0].function.arguments) == {"path": "a"}
        messages += [
            said.model_dump(exclude={"parsed"}),
            {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "5"},
        ]
        for one in messages[1].get("tool_calls") or ():
            one["function"].pop("parsed_arguments", None)
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=tools)
        assert answer.choices[0].message.content == "It is 5."
        assert (await client.models.list()).data[0].id == "policy"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model="policy", messages=messages, temperature=-3)
        with pytest.raises(openai.AuthenticationError):
            await openai.AsyncOpenAI(api_key="no", base_url=bench.url).models.list()
        assert [one.link for one in bench.recorded()] == [Link.START, Link.EXTEND]
        await client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_responses_and_completions(tmp_path, stream):
    openai = pytest.importorskip("openai")
    thought = "<think>\nhm\n</think>\n\n"
    async with Bench(tmp_path, thought + "Look.\n" + call("read", path="a"), "It is 5.", " and on") as bench:
        client = openai.AsyncOpenAI(api_key=bench.key, base_url=bench.url)
        tools = [{"type": "function", "name": "read", "parameters": SCHEMA, "strict": False}]
        items = [{"role": "user", "content": "What is in a?"}]
        if stream:
            async with client.responses.stream(model="policy", input=items, tools=tools) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(model="policy", input=items, tools=tools)
        assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
        items += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in answer.output]
        items.append({"type": "function_call_output", "call_id": answer.output[2].call_id, "output": "5"})
        answer = await client.responses.create(model="policy", input=items, tools=tools)
        assert answer.output_text == "It is 5."
        assert [one.link for one in bench.recorded()] == [Link.START, Link.EXTEND]
        plain = await client.completions.create(model="policy", prompt="one")
        assert plain.choices[0].text == " and on"
        await client.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic(tmp_path, stream):
    anthropic = pytest.importorskip("anthropic")
    thought = "<think>\nhm\n</think>\n\n"
    async with Bench(tmp_path, thought + "Look.\n" + call("read", path="a"), "It is 5.") as bench:
        client = anthropic.AsyncAnthropic(api_key=bench.key, base_url=bench.server.base_url)
        tools = [{"name": "read", "input_schema": SCHEMA}]
        messages = [{"role": "user", "content": "What is in a?"}]
        common = {"model": "policy", "max_tokens": 200, "tools": tools, "system": "Be brief."}
        if stream:
            async with client.messages.stream(messages=messages, **common) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(messages=messages, **common)
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.content[2].input == {"path": "a"}
        result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "5"}
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        last = await client.messages.create(messages=messages, **common)
        assert last.content[0].text == "It is 5."
        assert (await client.messages.count_tokens(model="policy", messages=messages[:1])).input_tokens > 5
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await client.messages.create(messages=messages, model="policy", max_tokens=0)
        assert [one.link for one in bench.recorded()] == [Link.START, Link.EXTEND]
        await client.close()


async def test_mini_swe_agent(tmp_path):
    pytest.importorskip("minisweagent")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    finish = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat out.txt"
    texts = ("I will write.\n" + call("bash", command="echo 5 > out.txt"), "Done.\n" + call("bash", command=finish))
    async with Bench(tmp_path, *texts) as bench:
        model = LitellmModel(
            model_name="openai/policy",
            model_kwargs={"api_base": bench.url, "api_key": bench.key},
            cost_tracking="ignore_errors",
        )
        work = tmp_path / "work"
        work.mkdir()
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=str(work)),
            system_template="You are an agent.",
            instance_template="{{ task }}",
            step_limit=5,
        )
        await asyncio.to_thread(agent.run, "Write 5 to out.txt")
        assert (work / "out.txt").read_text() == "5\n"
        assert [one.link for one in bench.recorded()] == [Link.START, Link.EXTEND]


@pytest.mark.parametrize("api", ["responses", "chat_completions"])
async def test_openai_agents_sdk(tmp_path, api):
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")
    async with Bench(tmp_path, "Look.\n" + call("read", path="a"), "It is 5.") as bench:
        agents.set_tracing_disabled(True)
        client = openai.AsyncOpenAI(api_key=bench.key, base_url=bench.url)
        kinds = {"responses": agents.OpenAIResponsesModel, "chat_completions": agents.OpenAIChatCompletionsModel}
        model = kinds[api](model="policy", openai_client=client)

        @agents.function_tool
        def read(path: str) -> str:
            """Read a file."""
            return f"{path} holds 5"

        agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[read])
        result = await agents.Runner.run(agent, "What is in a?")
        assert result.final_output == "It is 5."
        assert [one.link for one in bench.recorded()] == [Link.START, Link.EXTEND]
        await client.close()


async def test_a_coding_agent_from_npm(tmp_path):
    program = shutil.which("qwen")
    if program is None:
        pytest.skip("needs the qwen command (npm: @qwen-code/qwen-code) on the path")
    target = tmp_path / "work"
    target.mkdir()
    write = call("write_file", file_path=str(target / "out.txt"), content="5")
    async with Bench(tmp_path, "I will write it.\n" + write, *["Done."] * 8) as bench:
        env = {
            **os.environ,
            "OPENAI_API_KEY": bench.key,
            "OPENAI_BASE_URL": bench.url,
            "OPENAI_MODEL": "policy",
            "HOME": str(tmp_path),
            "CI": "1",
        }
        command = [program, "--auth-type", "openai", "--yolo", "-p", "Write 5 to out.txt"]
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=target, env=env, capture_output=True, text=True, timeout=200, check=False
        )
        assert (target / "out.txt").read_text() == "5", (done.stdout[-2000:], done.stderr[-2000:])
        calls = bench.store.calls("e")
        assert len(calls) >= 2
        tree = bench.store.load_tree("e")
        for entry in bench.engine.books:
            index = int(entry.call.call_id.rpartition("#")[2])
            assert tree.path_ids(index).tolist() == entry.prompt.tolist() + entry.sampled
        assert Link.EXTEND in {one.link for one in calls}
