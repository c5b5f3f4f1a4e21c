"""`verifiers`: the agreement with a stand-in for its process everywhere, the package itself where it is to be had."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import gyre_harnesses
import pytest
from gyre_core import (
    ComponentContext,
    ConfigError,
    ExecutionEnd,
    ExecutionJob,
    ExecutionStatus,
    InfrastructureError,
    Limits,
    ModelEndpoint,
    ScorerSpec,
    ScoringJob,
    Task,
)
from gyre_core.settings import inherited_environment
from gyre_core.testing.endpoint import Refuse, Say, ScriptedEndpoint, in_order
from gyre_core.testing.folder import FolderWorkspace
from gyre_core.testing.harnesses import RecordedEvents
from gyre_core.testing.support import environment_python
from gyre_harnesses.options import VerifiersOptions, VerifiersScorerOptions
from gyre_harnesses.verifiers_env.harness import VerifiersHarness
from gyre_harnesses.verifiers_env.process import ask, environment_config
from gyre_harnesses.verifiers_env.tasks import VerifiersScorer, VerifiersTaskSet

ENVIRONMENT = Path(gyre_harnesses.__file__).with_name("environment.toml")

# What the worker would say: it lists three tasks, and plays by one call to its model.
STAND_IN = """
    #!{python}
    import json, os, sys, time, urllib.error, urllib.request
    job = json.loads(sys.stdin.readline())
    assert job["env"]["taskset"]["id"] == "shout", job
    if "limit" in job:
        tasks = [dict(index=i, key=str(i), prompt=f"Shout {{i}}.", name="") for i in range(min(job["limit"], 30))]
        print(json.dumps(dict(tasks=tasks)))
        sys.exit()
    body = json.dumps(dict(model=job["model"], messages=[dict(role="user", content="x")], **job["sampling"])).encode()
    headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["GYRE_VF_KEY"]}}
    answer = dict(ok=True, rewards=dict(loud=0.5, short=0.25), stop=["done"], truncated=False, late=False, errors=[])
    try:
        for _ in range({calls}):
            request = urllib.request.Request(job["base_url"] + "/chat/completions", body, headers)
            urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        answer |= dict(ok=False, rewards=dict(), stop=["provider_error"], errors=[str(error)])
    answer |= {more}
    print(json.dumps(answer))
"""


def stand_in(tmp_path, calls=1, more="{}"):
    python = tmp_path / "python"
    python.write_text(textwrap.dedent(STAND_IN).lstrip().format(python=sys.executable, calls=calls, more=more))
    python.chmod(0o755)
    return VerifiersOptions(environment="shout", python=str(python))


async def play(tmp_path, options, script, limits=None, metadata=None):
    context = ComponentContext(str(tmp_path), "test")
    task = Task("t", "p", ScorerSpec("verifiers"), metadata={"index": 1} if metadata is None else metadata)
    async with ScriptedEndpoint(in_order({"main": script})) as endpoint:
        job = ExecutionJob("e", task, endpoint.address, limits or Limits())
        end = await VerifiersHarness(options, context).run(job, FolderWorkspace(str(tmp_path)), RecordedEvents())
        return end, endpoint.requests


async def test_an_episode_ends_with_its_rewards(tmp_path):
    end, requests = await play(tmp_path, stand_in(tmp_path), [Say("BEE")])
    assert (end.status, end.turns) == (ExecutionStatus.COMPLETED, 1)
    assert end.evidence["rewards"] == {"loud": 0.5, "short": 0.25}
    assert requests[0].headers["authorization"] == "Bearer key-of-the-execution"
    assert requests[0].body["max_tokens"] == Limits().max_call_tokens
    job = ScoringJob(Task("t", "p", ScorerSpec("verifiers")), end)
    context = ComponentContext(".", "test")
    score = await VerifiersScorer(VerifiersScorerOptions(best=1.5), context).score(job, FolderWorkspace(str(tmp_path)))
    assert score.value == 0.5
    assert [(m.name, m.passed, m.evidence) for m in score.milestones] == [
        ("loud", True, "0.5"),
        ("short", True, "0.25"),
    ]


async def test_limits_are_statuses_and_faults_are_ours(tmp_path):
    end, _ = await play(tmp_path, stand_in(tmp_path, calls=3), [Say("a"), Say("b"), Say("c")], Limits(max_turns=2))
    assert (end.status, end.reason, end.turns) == (ExecutionStatus.TIMEOUT, "limit of turns", 2)
    end, _ = await play(tmp_path, stand_in(tmp_path, more='{"truncated": True}'), [Say("a")])
    assert end.status is ExecutionStatus.TRUNCATED
    end, _ = await play(tmp_path, stand_in(tmp_path, more='{"late": True}'), [Say("a")])
    assert (end.status, end.reason) == (ExecutionStatus.TIMEOUT, "limit of time")
    with pytest.raises(InfrastructureError, match="HTTP 503"):
        await play(tmp_path, stand_in(tmp_path), [Refuse(503)])
    end, _ = await play(tmp_path, stand_in(tmp_path, calls=2), [Say("a"), Refuse(400)])  # by what the model said
    assert (end.status, end.evidence["turned_down"]) == (ExecutionStatus.TRUNCATED, "HTTP 400: scripted")
    with pytest.raises(InfrastructureError, match="HTTP 400"):
        await play(tmp_path, stand_in(tmp_path), [Refuse(400)])
    with pytest.raises(InfrastructureError, match="HTTP 503"):
        await play(tmp_path, stand_in(tmp_path, more='{"stop": ["max_turns"]}'), [Refuse(503)])
    with pytest.raises(InfrastructureError, match="HTTP 503"):  # late because the model was away
        await play(tmp_path, stand_in(tmp_path, more='{"late": True}'), [Refuse(503)])
    broken = stand_in(tmp_path, more='{"ok": False, "errors": ["TaskError: the reward broke"]}')
    with pytest.raises(InfrastructureError, match="the reward broke"):
        await play(tmp_path, broken, [Say("a")])
    with pytest.raises(InfrastructureError, match="its process ended"):
        await play(tmp_path, stand_in(tmp_path, more="1 / 0"), [Say("a")])
    with pytest.raises(InfrastructureError, match="without an index"):
        await play(tmp_path, stand_in(tmp_path), [], metadata={})


async def test_a_worker_over_its_time_is_ended(tmp_path):
    options = stand_in(tmp_path, more="dict(late=bool(time.sleep(600)))", calls=0)
    with pytest.raises(TimeoutError):
        await ask(options, {"env": environment_config(options), "index": 0, "model": "m", "sampling": {}}, "k", 0.5)


async def test_no_rewards_are_no_zero(tmp_path):
    scorer = VerifiersScorer(None, ComponentContext(".", "test"))
    task = Task("t", "p", ScorerSpec("verifiers"))
    for evidence in ({}, {"rewards": {}}):
        end = ExecutionEnd(ExecutionStatus.COMPLETED, "done", evidence=evidence)
        with pytest.raises(InfrastructureError, match="no rewards"):
            await scorer.score(ScoringJob(task, end), FolderWorkspace(str(tmp_path)))
    cut = ExecutionEnd(ExecutionStatus.TIMEOUT, "limit of turns", evidence={"rewards": {}})
    score = await scorer.score(ScoringJob(task, cut), FolderWorkspace(str(tmp_path)))
    assert (score.value, score.complete) == (0.0, False)


async def test_tasks_are_listed_in_disjoint_splits_also_inside_a_loop(tmp_path):
    listed = VerifiersTaskSet(stand_in(tmp_path), ComponentContext(".", "test"))
    train, heldout = listed.tasks("train"), listed.tasks("heldout")
    assert len(train) + len(heldout) == 30
    assert heldout
    assert {t.metadata["index"] for t in train}.isdisjoint(t.metadata["index"] for t in heldout)
    assert train[0].id.startswith("verifiers/shout/")
    with pytest.raises(ValueError, match="train, heldout"):
        listed.tasks("test")
    with pytest.raises(ConfigError, match="no environment"):
        VerifiersTaskSet(None, ComponentContext(".", "test")).tasks("train")


SHOUT = """
import verifiers.v1 as vf

class ShoutData(vf.TaskData):
    word: str = ""

class ShoutTask(vf.Task[ShoutData]):
    @vf.reward(weight=0.5)
    async def loud(self, trace) -> float:
        return float(self.data.word.upper() in trace.last_reply)

class ShoutTaskset(vf.Taskset[ShoutTask, vf.TasksetConfig]):
    def load(self):
        for word in ("ant", "bee"):
            yield ShoutTask(ShoutData(word=word, prompt=f"Shout {word}."), self.config.task)

__all__ = ["ShoutTaskset"]
"""
SHELF = """
import verifiers.v1 as vf

PAGES = {"ant": 3, "bee": 7}

class Shelf(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def look(self, word: str) -> str:
        'Say on which page a word stands.'
        return f"page {PAGES[word]}"

class SumTask(vf.Task[vf.TaskData]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == str(sum(PAGES.values())))

class ShelfTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(vf.TaskData(prompt="Add the pages of ant and bee."), self.config.task)

__all__ = ["ShelfTaskset"]

if __name__ == "__main__":  # the package starts a toolset's server as its module
    Shelf.run()
"""


async def really_play(tmp_path, name, source, index, *texts):
    """One episode of an environment by the package itself, through the gate and the recording proxy: how it ended, what
    prompts the engine saw, the tasks. Every token that the engine saw is on record, and no law is broken."""
    tito = pytest.importorskip("gyre_tito")
    from gyre_tito.check_files import check_path, reader_of
    from gyre_tito.testing import BookkeepingEngine, scripted, tiny_format

    (tmp_path / f"{name}.py").write_text(source)
    python = environment_python(ENVIRONMENT, os.environ.get("GYRE_TEST_VERIFIERS_PYTHON"))
    # Its chat loop is a script that uv prepares: the environment has one, found though PATH does not come from here.
    kept = {name: value for name, value in inherited_environment().items() if name != "PATH"}
    env = {**kept, "PYTHONPATH": str(tmp_path)}
    options = VerifiersOptions(environment=name, python=python, env=env)
    context = ComponentContext(str(tmp_path), "test")
    listed = VerifiersTaskSet(options, context)
    tasks = {t.metadata["index"]: t for split in ("train", "heldout") for t in listed.tasks(split)}
    chat = tiny_format()
    engine = BookkeepingEngine(scripted(chat, *texts))
    with tito.Store.open(tmp_path / "t.db", writable=True) as store:
        service = tito.TitoService(engine, store, chat)
        proxy = tito.ProxyServer(service)
        await proxy.start()
        try:
            opened = await service.open_execution(tito.ExecutionSpec("e", "t"))
            endpoint = ModelEndpoint(opened.base_url, opened.api_key, "policy")
            job = ExecutionJob("e", tasks[index], endpoint, Limits())
            end = await VerifiersHarness(options, context).run(job, FolderWorkspace(str(tmp_path)), RecordedEvents())
            await service.close_execution("e", tito.Status(end.status.value), tito.Score(0.0))
        finally:
            await proxy.stop()
            await service.close()
        tree = store.load_tree("e")
        for entry in engine.books:
            seen = tree.path_ids(int(entry.call.call_id.rpartition("#")[2])).tolist()
            assert seen == [*entry.prompt.tolist(), *entry.sampled]
        assert tree.sampled_count == sum(len(entry.sampled) for entry in engine.books)
    findings = check_path(tmp_path / "t.db", reader=reader_of(chat)).findings
    assert [one for one in findings if one.severity != "note"] == []
    return end, [chat.tokenizer.decode(entry.prompt.tolist()) for entry in engine.books], tasks


@pytest.mark.engine
@pytest.mark.timeout(900)
async def test_the_package_itself_through_the_recording_proxy(tmp_path):
    """Its environment, its harness, its reward; streamed through the gate and the proxy."""
    end, prompts, tasks = await really_play(tmp_path, "shout", SHOUT, 1, "BEE!")
    assert [tasks[i].prompt for i in (0, 1)] == ["Shout ant.", "Shout bee."]
    assert (end.status, end.turns, len(prompts)) == (ExecutionStatus.COMPLETED, 1, 1)
    assert end.evidence["rewards"] == {"loud": 0.5}


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("last", "reward"), [("10", 1.0), ("11", 0.0)])
async def test_an_environment_with_tools_over_several_turns(tmp_path, last, reward):
    """The tools are the environment's own server's; what they answer is in the next prompt."""
    use = '<tool_call>\n{{"name": "look", "arguments": {{"word": "{}"}}}}\n</tool_call>'
    texts = (use.format("ant"), use.format("bee"), last)
    end, prompts, _ = await really_play(tmp_path, "shelf", SHELF, 0, *texts)
    assert (end.status, end.turns, len(prompts)) == (ExecutionStatus.COMPLETED, 3, 3)
    assert [("page 3" in text, "page 7" in text) for text in prompts] == [(False, False), (True, False), (True, True)]
    assert end.evidence["rewards"] == {"right": reward}
