"""`gyre score` and `gyre agent` with the real task set, sandbox, harness and scorer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from gyre_core import ConfigError, GyreError, ModelEndpoint, PluginManager
from gyre_core.testing.endpoint import Call, Refuse, Say, ScriptedEndpoint, in_order
from gyre_rl.cli.authoring import agent, find_task, make_bench, score
from gyre_rl.cli.console import Console
from gyre_rl.config import RunConfigError


@pytest.fixture(scope="module")
def bench():
    pytest.importorskip("gyre_tasks", reason="the task set 'files' is in gyre-tasks, which gyre-rl does without")
    return make_bench("files", ["tasks.heldout=3", "tasks.train=3"], PluginManager.installed())


@pytest.fixture
def task(bench, tmp_path):
    from gyre_core import Kind

    return bench.make(Kind.TASKSET, bench.tasks, str(tmp_path)).tasks("heldout")[0]


def answer(capsys):
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_a_folder_is_judged_by_what_stands_in_it(bench, task, tmp_path, capsys):
    score(bench, task.id, None, None, Console(json=True))
    nothing = answer(capsys)
    assert nothing["score"] == 0.0
    assert not any(m["passed"] for m in nothing["milestones"])
    milestones = task.scorer.options["milestones"]
    for number, milestone in enumerate(milestones, 1):
        file = tmp_path / milestone["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(milestone["content"])
        score(bench, task.id, tmp_path, "heldout", Console(json=True))
        assert answer(capsys)["score"] == pytest.approx(number / len(milestones))


def test_wrong_names_are_told_with_the_nearest(bench, task, tmp_path):
    from gyre_core import Kind

    taskset = bench.make(Kind.TASKSET, bench.tasks, str(tmp_path))
    with pytest.raises(ConfigError, match=task.id):
        find_task(taskset, task.id + "x")
    with pytest.raises(ValueError, match="split"):
        find_task(taskset, task.id, "nowhere")
    with pytest.raises(ConfigError, match="no folder"):
        score(bench, task.id, tmp_path / "nowhere", None, Console())
    with pytest.raises(RunConfigError, match=r"--set tasks\.sed=3: tasks\.sed: unknown key; did you mean 'seed'"):
        make_bench("files", ["tasks.sed=3"])
    with pytest.raises(RunConfigError, match="unknown key; expected tasks, sandbox, harness, scorers or limits"):
        make_bench("files", ["rollout.group_size=3"])


class Served:
    """A scripted end point in a thread of its own, for code that runs an event loop itself."""

    def __init__(self, answers):
        self.answers, self.ready, self.done = answers, threading.Event(), None

    def __enter__(self):
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        assert self.ready.wait(60)
        return self.address

    async def serve(self):
        self.loop, self.done = asyncio.get_running_loop(), asyncio.Event()
        async with ScriptedEndpoint(in_order({"main": self.answers})) as endpoint:
            self.address = endpoint.address
            self.ready.set()
            await self.done.wait()

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.done.set)
        self.thread.join()


def test_an_agent_is_shown_and_judged(bench, task, tmp_path, capsys):
    milestones = task.scorer.options["milestones"]
    first = milestones[0]
    command = f"mkdir -p $(dirname {first['path']}); printf '%s' '{first['content']}' > {first['path']}"
    with Served([Say(calls=[Call("bash", {"command": command})]), Say("done")]) as address:
        agent(bench, task.id, address, Console(json=True), keep=tmp_path / "kept")
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["status"] == "completed"
    assert told["score"] == pytest.approx(1 / len(milestones))
    assert "main: turn 1" in captured.err
    assert f"main: gets: {task.prompt}" in captured.err
    assert "main: calls bash {" in captured.err
    assert "main: says: done" in captured.err
    assert "bash took" in captured.err
    assert (tmp_path / "kept" / first["path"]).read_text() == first["content"]


RUNS = """prompt = "Write run.sh."
[scorer]
name = "commands"
milestones = [{ run = "./run.sh", stdout = "ran" }, { run = "cat link", contains = ["echo"] }, { run = "ls empty" }]
"""


@pytest.fixture
def runs(tmp_path):
    """A task whose work must be executed, and its bench."""
    (tmp_path / "tasks" / "runs").mkdir(parents=True)
    (tmp_path / "tasks" / "runs" / "task.toml").write_text(RUNS)
    return make_bench("folder", [f"tasks.path={tmp_path / 'tasks'}"])


WRITE = "printf '#!/bin/sh\\necho ran\\n' > run.sh; chmod +x run.sh; ln -s run.sh link; mkdir empty"


def test_what_is_kept_earns_what_the_agent_earned(runs, tmp_path, capsys):
    with Served([Say(calls=[Call("bash", {"command": WRITE})]), Say("done")]) as address:
        agent(runs, "runs", address, Console(json=True), keep=tmp_path / "kept")
    assert answer(capsys)["score"] == 1.0
    score(runs, "runs", tmp_path / "kept", None, Console(json=True))
    assert answer(capsys)["score"] == 1.0


def test_a_workspace_is_kept_when_the_execution_failed_by_our_fault(runs, tmp_path, capsys):
    answers = [Say(calls=[Call("bash", {"command": WRITE})]), Refuse(401, "no key")]
    with Served(answers) as address, contextlib.suppress(SystemExit, GyreError):
        agent(runs, "runs", address, Console(json=True), keep=tmp_path / "kept")
    assert "HTTP 401" in capsys.readouterr().err
    assert os.access(tmp_path / "kept" / "run.sh", os.X_OK)


def test_a_task_that_cannot_be_scored_is_told_before_the_agent_begins(runs, tmp_path):
    file = tmp_path / "tasks" / "runs" / "task.toml"
    file.write_text(RUNS.replace("stdout", "stdoutt"))
    nobody = ModelEndpoint("http://127.0.0.1:1/v1", "k", "m")
    with pytest.raises(ConfigError, match="stdoutt"):
        agent(runs, "runs", nobody, Console(json=True))


def test_a_signal_leaves_nothing_behind(runs, tmp_path):
    """And what the agent had done is kept."""
    hang = [Say(calls=[Call("bash", {"command": f"{WRITE}; echo begun; sleep 600"})])]
    scratch, keep = tmp_path / "scratch", tmp_path / "kept"
    scratch.mkdir()
    code = "from gyre_rl.cli import main; main()"
    with Served(hang) as address:
        words = ["agent", "--tasks", "folder", "--set", f"tasks.path={tmp_path / 'tasks'}", "--task", "runs"]
        words += ["--base-url", address.base_url, "--model", "m", "--keep", str(keep)]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *words], env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE
        )
        try:
            for line in process.stderr:
                if b"bash ..." in line:
                    break
            until = time.monotonic() + 60
            while not list(scratch.rglob("empty")):
                assert time.monotonic() < until, "the agent's folder did not come"
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            _, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert list(scratch.iterdir()) == []
    assert os.access(keep / "run.sh", os.X_OK)


def test_options_of_a_scorer_reach_it(bench, tmp_path, capsys):
    """A judge behind an end point judges a folder; without its address that is said."""
    verdicts = in_order({"main": [Say('{"why": "it greets", "verdict": "yes"}')]})
    folder = tmp_path / "tasks" / "letter"
    folder.mkdir(parents=True)
    (folder / "task.toml").write_text(
        'prompt = "Write a letter to letter.txt."\n[scorer]\nname = "rubric"\n'
        'files = ["letter.txt"]\ncriteria = [{ question = "Is it kind?" }]\n'
    )
    work = tmp_path / "work"
    work.mkdir()
    (work / "letter.txt").write_text("Dear you")

    async def judged():
        async with ScriptedEndpoint(verdicts) as endpoint:
            sets = [f"tasks.path={tmp_path / 'tasks'}"]
            with pytest.raises(ConfigError, match="base_url"):
                await asyncio.to_thread(score, make_bench("folder", sets), "letter", work, None, Console(json=True))
            sets.append(f'scorers=[{{name = "rubric", base_url = "{endpoint.address.base_url}"}}]')
            await asyncio.to_thread(score, make_bench("folder", sets), "letter", work, None, Console(json=True))

    asyncio.run(judged())
    told = answer(capsys)
    assert told["score"] == 1.0
    assert told["milestones"][0]["evidence"] == "it greets"
    with pytest.raises(RunConfigError, match="base_urll"):
        make_bench("folder", ['scorers=[{name = "rubric", base_urll = "x"}]'])
