"""What `gyre check` finds in a run's tasks, and that a task that cannot be scored ends a run at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from gyre_core import ConfigError, ExecutionEnd, ExecutionStatus, Kind, PluginManager, ScorerSpec, Task
from gyre_core.testing.folder import FolderSandbox
from gyre_rl.agents.host import AgentsBody, AgentsHost
from gyre_rl.cli.taskcheck import MOST, task_problems
from gyre_rl.config import ModelConfig, PluginChoice, RunConfig
from gyre_rl.config.schema import EvalConfig
from gyre_rl.procs.child import ChildSpec
from gyre_rl.run.rollout import SCORING_REFUSED

TASK = 'prompt = "p"\nsplit = "{split}"\n[scorer]\nname = "{scorer}"\n[[scorer.milestones]]\nrun = "true"\n{key} = 0\n'


@pytest.fixture
def told(tmp_path):
    """The problems of the tasks in `tmp_path`/tasks as lines, for options of the task set."""
    manager = PluginManager.installed()
    for kind, name in ((Kind.TASKSET, "folder"), (Kind.SCORER, "commands")):
        if name not in [component.registration.name for component in manager.components(kind)]:
            pytest.skip(f"the {kind} {name!r} is not installed")
    made = manager.options_type(Kind.TASKSET, "folder")

    def problems(changes=None, **options):
        tasks = PluginChoice("folder", made(**{"path": "tasks", **options}))
        config = RunConfig("small", ModelConfig("policy"), tasks, base_dir=str(tmp_path))
        return [str(each) for each in task_problems(replace(config, **changes or {}), tmp_path / "run")]

    return problems


def write(folder, name, split="train", scorer="commands", key="exit"):
    (folder / "tasks" / name).mkdir(parents=True)
    (folder / "tasks" / name / "task.toml").write_text(TASK.format(split=split, scorer=scorer, key=key))


def test_good_tasks_have_no_problems_and_nothing_is_written(tmp_path, told):
    write(tmp_path, "one")
    assert told() == []
    assert told(repeat=3) == []
    assert not (tmp_path / "run").exists()


def test_a_mistyped_key_is_named_with_its_task_and_file_once_for_all_its_repetitions(tmp_path, told):
    write(tmp_path, "one")
    write(tmp_path, "two", split="heldout", key="exitt")
    (line,) = told(repeat=3)
    for word in ("two/task.toml", "'folder/two'", "milestone 0", "exitt"):
        assert word in line


@pytest.mark.parametrize(
    ("options", "words"),
    [({"path": "nope"}, "no such folder"), ({"only": ("three",)}, "only = 'three'"), ({"path": None}, "no path")],
)
def test_a_task_set_that_is_not_there_is_a_problem(tmp_path, told, options, words):
    write(tmp_path, "one")
    (line,) = told(**options)
    assert line.startswith("tasks: ")
    assert words in line


def test_splits_and_scorers_that_are_none_are_problems(tmp_path, told):
    write(tmp_path, "one", split="heldout")
    assert "rollout.split: got 'train', which has no tasks" in told()[0]
    write(tmp_path, "two", scorer="comands")
    (line,) = told()
    assert "looking for the scorer 'comands'" in line
    assert "commands" in line
    (line, _) = told({"eval": EvalConfig("test")})
    assert line.startswith("eval.split: ")
    assert "train, heldout" in line


def test_many_problems_are_counted(tmp_path, told):
    for number in range(MOST + 3):
        write(tmp_path, f"n{number:02d}", key="exitt")
    lines = told()
    assert len(lines) == MOST + 1
    assert "3 more tasks" in lines[-1]


async def test_the_agents_tell_that_a_task_cannot_be_scored_in_words_that_the_run_knows(tmp_path):
    class Played:
        async def run(self, job, workspace, events):
            return ExecutionEnd(ExecutionStatus.COMPLETED, "done")

        async def score(self, job, workspace):
            raise ConfigError("reading the options", got="a typo")

    played = Played()
    body = AgentsBody("played", "folder", rests=str(tmp_path / "rests"))
    plugins = SimpleNamespace(create=lambda *_: played)
    spec = ChildSpec("", "agents", 1, "", "token", str(tmp_path))
    host = AgentsHost(spec, plugins, played, FolderSandbox(str(tmp_path)), body)
    job = SimpleNamespace(
        execution="g.0", task=Task("t", "p", ScorerSpec("x")), limits=SimpleNamespace(wall_s=None), state=b""
    )
    outcome = await asyncio.wait_for(host.run(job), 60)
    await host.close()
    assert outcome.end.reason.startswith(SCORING_REFUSED)
