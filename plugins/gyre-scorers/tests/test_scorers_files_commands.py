"""Scorers `files`, `commands` and `composite`: partial credit, evidence, and what does not pass."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from gyre_core import (
    ConfigError,
    ExecutionStatus,
    InfrastructureError,
    Kind,
    Milestone,
    PluginManager,
    Registration,
    Score,
)
from gyre_scorers import plugin
from gyre_scorers.commands import CommandsScorer
from gyre_scorers.composite import CompositeScorer
from gyre_scorers.files import FilesScorer, stripped
from gyre_scorers.options import CompositeOptions, FilesOptions
from hypothesis import given
from hypothesis import strategies as st


async def test_each_file_is_one_milestone(workspace, context, job):
    await workspace.write("out/a", b"1\n2  \n\n")
    await workspace.write("out/b", b"1\n3\n")
    digest = hashlib.sha256(b"1\n3").hexdigest()
    options = {
        "milestones": [
            {"path": "out/a", "content": "1\n2\n"},
            {"path": "out/b", "content": "1\n2\n", "weight": 2.0, "name": "the second"},
            {"path": "out/b", "sha256": digest},
            {"path": "out/c", "content": ""},
        ]
    }
    score = await FilesScorer(None, context).score(job(options), workspace)
    assert score.value == pytest.approx(2 / 5)
    assert score.complete
    assert [m.passed for m in score.milestones] == [True, False, True, False]
    assert [m.name for m in score.milestones] == ["out/a", "the second", "out/b", "out/c"]
    assert score.milestones[1].evidence == "out/b: line 2 is '3', expected '2'"
    assert score.milestones[3].evidence == "out/c: No such file or directory"


async def test_a_cut_execution_is_scored_partially(workspace, context, job):
    options = {"milestones": [{"path": "a", "content": "x"}]}
    await workspace.write("a", b"x")
    for status, complete in (
        (ExecutionStatus.TIMEOUT, False),
        (ExecutionStatus.TRUNCATED, False),
        (ExecutionStatus.COMPLETED, True),
    ):
        commands = {"milestones": [{"run": "test -f a"}]}
        for scorer, asked in ((FilesScorer, options), (CommandsScorer, commands)):
            score = await scorer(None, context).score(job(asked, status), workspace)
            assert (score.value, score.complete) == (1.0, complete)
            assert score.why == ("" if complete else "the reason")


async def test_without_strip_bytes_must_agree(workspace, context, job):
    await workspace.write("a", b"x\n")
    options = {
        "milestones": [{"path": "a", "content": "x", "strip": False}, {"path": "a", "content": b"x\n", "strip": False}]
    }
    score = await FilesScorer(None, context).score(job(options), workspace)
    assert [m.passed for m in score.milestones] == [False, True]
    assert score.milestones[0].evidence == "a: 2 lines, expected 1"


async def test_links_out_and_giants_do_not_pass(workspace, context, job, tmp_path):
    (tmp_path / "answer").write_text("x")
    os.symlink(tmp_path / "answer", os.path.join(workspace.path, "a"))
    await workspace.write("big", b"x" + b" " * 100)
    options = {"milestones": [{"path": "a", "content": "x"}, {"path": "big", "content": "x"}]}
    score = await FilesScorer(FilesOptions(largest_bytes=50), context).score(job(options), workspace)
    assert score.value == 0.0
    assert "leads out" in score.milestones[0].evidence
    assert "more than 50 bytes" in score.milestones[1].evidence


@given(st.binary(max_size=60))
def test_stripping_is_idempotent_and_keeps_what_is_written(data):
    once = stripped(data)
    assert stripped(once) == once
    assert once.split() == data.split()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"milestones": []},
        {"milestones": "a"},
        {"milestones": [{"path": "a"}]},
        {"milestones": [{"path": "a", "content": "x", "sha256": "y"}]},
        {"milestones": [{"path": "a", "contents": "x"}]},
        {"milestones": [{"path": "a", "content": "x", "weight": -1}]},
        {"milestones": [{"path": "a", "content": "x", "weight": 0}]},
        {"milestones": [{"path": "a", "content": 3}]},
        {"milestones": [{"path": 3, "content": "x"}]},
        {"milestones": [{"content": "x"}]},
        {"milestones": [{"path": "a", "content": "x", "strip": "yes"}]},
        {"milestones": [{"path": "a", "content": "x"}], "more": 1},
    ],
    ids=str,
)
async def test_a_wrong_file_spec_is_a_fault_of_the_task_set(workspace, context, job, options):
    with pytest.raises(ConfigError, match="task 't'"):
        await FilesScorer(None, context).score(job(options), workspace)
    with pytest.raises(ConfigError, match="task 't'"):
        FilesScorer(None, context).check(job(options).task)


async def test_each_command_is_one_milestone(workspace, context, job):
    options = {
        "milestones": [
            {"run": "echo '3 4 '; exit 0", "stdout": "3 4\n"},
            {"run": ["sh", "-c", "exit 3"], "exit": 3, "name": "three"},
            {"run": "echo wrong", "stdout": "right"},
            {"run": "echo no >&2; exit 1", "weight": 2},
            {"run": "exit 9", "exit": None},
            {"run": "sleep 60", "timeout_s": 0.2},
            {"run": "cat", "stdin": "abc def", "contains": ["abc", "def"], "matches": "c d"},
            {"run": "echo abc", "contains": ["z"]},
            {"run": "echo abc", "matches": "^z"},
            {"run": "no-such-program-here"},
            {"run": "pwd", "cwd": "../.."},
        ]
    }
    score = await CommandsScorer(None, context).score(job(options), workspace)
    assert [m.passed for m in score.milestones] == [
        True,
        True,
        False,
        False,
        True,
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert score.value == pytest.approx(4 / 12)
    evidence = [m.evidence for m in score.milestones]
    assert evidence[2] == "stdout: line 1 is 'wrong', expected 'right'"
    assert evidence[3] == "exit 1, expected 0: no"
    assert evidence[5].startswith("killed at the limit of wall")
    assert evidence[7] == "stdout lacks 'z'"
    assert "leads out" in evidence[10]
    assert score.milestones[1].name == "three"


async def test_a_sandbox_that_fails_is_no_zero(workspace, context, job):
    async def broken(request):
        raise InfrastructureError("running a command")

    workspace.run = broken
    with pytest.raises(InfrastructureError):
        await CommandsScorer(None, context).score(job({"milestones": [{"run": "true"}]}), workspace)


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"run": ""},
        {"run": []},
        {"run": [1]},
        {"run": "x", "exit": "0"},
        {"run": "x", "matches": "("},
        {"run": "x", "contains": "text"},
        {"run": "x", "timeout": 3},
        {"run": "x", "timeout_s": True},
    ],
    ids=str,
)
async def test_a_wrong_command_spec_is_a_fault_of_the_task_set(workspace, context, job, spec):
    with pytest.raises(ConfigError, match="task 't'"):
        await CommandsScorer(None, context).score(job({"milestones": [spec]}), workspace)
    with pytest.raises(ConfigError, match="task 't'"):
        CommandsScorer(None, context).check(job({"milestones": [spec]}).task)


async def test_parts_have_their_shares_and_gates(workspace, context, job):
    await workspace.write("a", b"x")
    files = {"milestones": [{"path": "a", "content": "x"}, {"path": "b", "content": "x"}]}
    commands = {"milestones": [{"run": "true"}, {"run": "true"}, {"run": "false", "weight": 2}]}
    parts = [
        {"scorer": "files", "options": files, "weight": 3},
        {"scorer": "commands", "options": commands, "name": "build"},
    ]
    score = await CompositeScorer(None, context).score(job({"parts": parts}), workspace)
    assert score.value == pytest.approx(0.75 * 0.5 + 0.25 * 0.5)
    assert sum(m.weight for m in score.milestones) == pytest.approx(1.0)
    assert sum(m.weight for m in score.milestones if m.passed) == pytest.approx(score.value)
    assert [m.name for m in score.milestones][::2] == ["files: a", "build: true", "build: false"]
    gated = await CompositeScorer(None, context).score(job({"parts": [{**parts[0], "gate": 0.6}, parts[1]]}), workspace)
    assert (gated.value, gated.why) == (0.0, "files earned 0.50, its gate is 0.6")


PART = {"scorer": "files", "options": {"milestones": [{"path": "a", "content": ""}]}}


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [{"scorer": "none"}],
        [{"scorer": "composite"}],
        [{**PART, "weight": -1}],
        [{**PART, "weight": math.inf}],
        [{**PART, "weight": math.nan}],
        [{**PART, "wait": 1}],
        [{**PART, "gate": 50}],
        [{**PART, "gate": math.nan}],
        [{**PART, "options": 3}],
        [{**PART, "options": {"milestones": [{"path": "a"}]}}],
        [{**PART, "scorer": ["files"]}],
        [{**PART, "name": 7}],
    ],
    ids=str,
)
async def test_a_wrong_composition_is_a_fault_of_the_task_set(workspace, context, job, parts):
    with pytest.raises(ConfigError, match="task 't'"):
        await CompositeScorer(None, context).score(job({"parts": parts}), workspace)
    with pytest.raises(ConfigError, match="task 't'"):
        CompositeScorer(None, context).check(job({"parts": parts}).task)


@dataclass(frozen=True)
class HalfOptions:
    """What the scorer below takes."""

    share: float = 0.5


class HalfScorer:
    """A scorer of another plugin."""

    def __init__(self, options, context):
        self.share = options.share

    async def score(self, job, workspace):
        return Score(self.share, (Milestone("half", True, 1.0), Milestone("other", False, 1.0, "no")))


async def test_a_part_may_be_another_plugins_scorer(workspace, context, job, monkeypatch):
    await workspace.write("a", b"")

    class Plugin:
        @staticmethod
        def gyre_register():
            return [Registration(Kind.SCORER, "half", f"{__name__}:HalfScorer", f"{__name__}:HalfOptions", "")]

    manager = PluginManager()
    manager.add(Plugin)
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(HalfScorer=HalfScorer, HalfOptions=HalfOptions))
    monkeypatch.setattr(PluginManager, "installed", lambda: manager)
    parts = {"parts": [PART, {"scorer": "half"}]}
    for others, value in (({}, 0.75), ({"half": {"share": 0.1}}, 0.55)):
        scorer = CompositeScorer(CompositeOptions(others=others), context)
        scorer.check(job(parts).task)
        assert (await scorer.score(job(parts), workspace)).value == pytest.approx(value)


def test_the_plugin_brings_what_it_names(context):
    manager = PluginManager()
    manager.add(plugin)
    names = [c.registration.name for c in manager.components(Kind.SCORER)]
    assert {"files", "commands", "composite"} <= set(names)
    for name in names:
        assert manager.create(Kind.SCORER, name, {}, context) is not None
