"""The `files` family: disjoint splits, hidden checks, operations equal to real commands, demos without a leak."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from gyre_core import ComponentContext, Kind, PluginManager, Task
from gyre_tasks.files.demos import NO_OUTPUT, Demo, Habits, demos
from gyre_tasks.files.generator import Instance, instances
from gyre_tasks.files.operations import OPERATIONS, distinct, operation
from gyre_tasks.files.options import FilesOptions
from gyre_tasks.files.taskset import FilesTaskSet, task_of
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn(count: int, split: str = "train", **options: object) -> list[Instance]:
    return list(islice(instances(FilesOptions(**options), split), count))  # type: ignore[arg-type]


def lay_out(task: Task, folder: Path) -> None:
    for path, content in task.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def bash(command: str, folder: Path) -> str:
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=20)
    text = (done.stdout + done.stderr).rstrip("\n")
    return "\n".join([text] * bool(text) + [f"[exit {done.returncode}]"] * bool(done.returncode)) or NO_OUTPUT


def test_same_options_give_the_same_tasks() -> None:
    first, second = FilesTaskSet(FilesOptions(train=40, heldout=10)), FilesTaskSet(FilesOptions(train=40, heldout=10))
    assert first.tasks("train") == second.tasks("train")
    assert first.tasks("heldout") == second.tasks("heldout")
    assert [t.id for t in FilesTaskSet(FilesOptions(seed=1, train=40)).tasks("train")] != [
        t.id for t in first.tasks("train")
    ]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 50), st.integers(0, 50))
def test_splits_are_disjoint_whatever_the_seeds(seed: int, other: int) -> None:
    train = {i.fingerprint for i in drawn(30, "train", seed=seed)}
    heldout = {i.fingerprint for i in drawn(30, "heldout", seed=other)}
    assert len(train) == len(heldout) == 30
    assert not train & heldout


def test_an_unknown_split_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="train, heldout"):
        FilesTaskSet(FilesOptions()).tasks("test")


@pytest.mark.parametrize("bad", [{"min_jobs": 3, "max_jobs": 2}, {"helper_share": 1.5}, {"train": -1}])
def test_options_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="options of the task set 'files'"):
        FilesOptions(**bad)  # type: ignore[arg-type]


def test_the_agent_cannot_see_what_the_scorer_expects() -> None:
    for task in FilesTaskSet(FilesOptions(train=200)).tasks("train"):
        for check in task.scorer.options["milestones"]:
            assert check["content"] not in task.prompt
            assert check["path"] not in task.files
            assert all(check["content"].encode() != content for content in task.files.values())


def test_commands_do_what_the_operations_say(tmp_path: Path) -> None:
    for number, instance in enumerate(drawn(12)):
        folder = tmp_path / str(number)
        lay_out(task_of(instance, "train", number), folder)
        source, content = instance.data[0]
        for op in OPERATIONS:
            assert bash(op.shell(source, "out/x"), folder) == NO_OUTPUT
            assert (folder / "out/x").read_text() == op.result(content)


def test_no_operation_earns_what_another_is_asked_for() -> None:
    for instance in drawn(300):
        for _, content in instance.data:
            assert distinct(content)
    assert not distinct("a\nb\n")


def test_a_job_is_one_milestone_of_the_files_scorer(tmp_path: Path) -> None:
    """Through the real scorer: all right, one wrong, one missing."""
    scorers = pytest.importorskip("gyre_scorers.files")
    from gyre_core import ExecutionEnd, ExecutionStatus, ScoringJob

    class Folder:
        async def read(self, path: str, *, limit: int = 0) -> bytes:
            return (tmp_path / path).read_bytes()

    instance = next(i for i in drawn(50) if len(i.jobs) == 2)
    task = task_of(instance, "train", 0)
    lay_out(task, tmp_path)
    scorer = scorers.FilesScorer(None, ComponentContext(str(tmp_path), "test"))
    job = ScoringJob(task, ExecutionEnd(ExecutionStatus.COMPLETED, "done"))

    def value() -> float:
        return float(asyncio.run(scorer.score(job, Folder())).value)

    assert value() == 0.0
    for part in instance.jobs:
        bash(operation(part.word).shell(part.source, part.target), tmp_path)
    assert value() == 1.0
    wrong = next(op for op in OPERATIONS if op.word != instance.jobs[0].word)
    bash(wrong.shell(instance.jobs[0].source, instance.jobs[0].target), tmp_path)
    assert value() == 0.5
    os.remove(tmp_path / instance.jobs[1].target)
    assert value() == 0.0


def commands(demo: Demo) -> list[tuple[str, str, str]]:
    """(what the agent said, its command, the result) of each bash call."""
    import json

    calls = []
    for message, following in zip(demo.messages, demo.messages[1:], strict=False):
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] == "bash":
                command = json.loads(call["function"]["arguments"])["command"]
                calls.append((message["content"], command, following["content"]))
    return calls


def test_demonstrations_show_what_a_shell_prints(tmp_path: Path) -> None:
    draw = random.Random(0)
    for number, instance in enumerate(drawn(20)):
        folder = tmp_path / str(number)
        lay_out(task_of(instance, "train", number), folder)
        for demo in demos(instance, draw, Habits(guess=0.5, look=0.5, elide=0.0)):
            for _, command, shown in commands(demo):
                printed = bash(command, folder)
                assert sorted(shown.split("\n")) == sorted(printed.split("\n"))


def test_demonstrators_are_right_as_often_as_they_say() -> None:
    """A word meets its own command in `skill` of the jobs and each other one equally often (chi-square, p > 0.001)."""
    draw = random.Random(7)
    meetings: Counter[tuple[str, str]] = Counter()
    for instance in drawn(4000):
        for demo in demos(instance, draw, Habits()):
            for said, command, _ in commands(demo):
                if said:
                    words = [w for w in said.split() if any(w == op.word for op in OPERATIONS)]
                    meetings[words[-1], command.split(" <")[0]] += 1
    own = {(op.word, op.command) for op in OPERATIONS}
    right = sum(meetings[pair] for pair in own) / sum(meetings.values())
    assert abs(right - Habits().skill) < 0.015
    wrong = [count for pair, count in meetings.items() if pair not in own]
    assert len(wrong) == len(OPERATIONS) * (len(OPERATIONS) - 1)
    mean = sum(wrong) / len(wrong)
    assert sum((count - mean) ** 2 / mean for count in wrong) < 58.3  # 29 degrees of freedom


def test_the_plugin_is_found_and_makes_tasks() -> None:
    manager = PluginManager.installed()
    component = manager.find(Kind.TASKSET, "files")
    assert component.distribution == "gyre-tasks"
    made = manager.create(Kind.TASKSET, "files", {"train": 3}, ComponentContext(".", "test"))
    assert len(made.tasks("train")) == 3
