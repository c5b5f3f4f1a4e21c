"""Every sample task: its reference solution earns all, its start the stated floor, a half between."""

from __future__ import annotations

import os
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from gyre_core import ComponentContext, ExecutionEnd, ExecutionStatus, Kind, PluginManager, ScoringJob
from gyre_core.testing.folder import FolderSandbox
from gyre_tasks.folders.loader import read_folder, read_task
from gyre_tasks.folders.options import FolderOptions
from gyre_tasks.folders.taskset import MigrateTaskSet, TeamTaskSet, TerminalTaskSet, samples_folder

ROOT = Path(__file__).parents[1]
REFERENCES = ROOT / "references"
FAMILIES = {"terminal": TerminalTaskSet, "migrate": MigrateTaskSet, "team": TeamTaskSet}
SAMPLES = sorted(file.parent for file in (ROOT / "samples").glob("*/*/task.toml"))
QUICK = ("log-rotation", "dicts-to-dataclasses", "letter-counts", "fleet-policy", "book-index", "common-hours")
"""Proved at every run; the others by the slow tests."""
EACH = [
    pytest.param(
        folder, id=f"{folder.parent.name}/{folder.name}", marks=() if folder.name in QUICK else pytest.mark.slow
    )
    for folder in SAMPLES
]


def context(**more: str) -> ComponentContext:
    return ComponentContext(".", "test", **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_ten_tasks_in_two_splits(family):
    made = FAMILIES[family](None, context())
    train, heldout = made.tasks("train"), made.tasks("heldout")
    assert (len(train), len(heldout)) == (8, 2)
    assert not {task.id for task in train} & {task.id for task in heldout}
    assert len({task.prompt for task in (*train, *heldout)}) == 10
    repeated = FAMILIES[family](FolderOptions(repeat=3), context()).tasks("train")
    assert len({task.id for task in repeated}) == 24
    assert repeated[:8] == train
    with pytest.raises(ValueError, match="train, heldout"):
        made.tasks("test")


@pytest.mark.parametrize("folder", SAMPLES, ids=lambda folder: folder.name)
def test_the_agent_sees_nothing_of_what_is_hidden(folder):
    task = read_task(folder).task(folder.parent.name)
    hidden = read_folder(folder / "hidden")
    solution = read_folder(REFERENCES / folder.parent.name / folder.name / "solution")
    assert hidden
    assert solution
    shown = [*task.files.values(), task.prompt.encode()]
    assert not [path for path, data in (*hidden.items(), *solution.items()) if len(data) > 12 and data in shown]


def test_reference_solutions_are_in_no_installed_package():
    """A sandbox may show the host's packages to the agent; solutions are in the repository alone."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert build["packages"] == ["src/gyre_tasks"]
    assert set(build["force-include"]) == {"samples"}
    assert {path.name for folder in SAMPLES for path in folder.iterdir()} <= {"task.toml", "start", "hidden"}
    assert samples_folder() == ROOT / "samples"


def test_each_sample_has_its_references():
    named = {f"{folder.parent.name}/{folder.name}" for folder in SAMPLES}
    assert named == {str(folder.relative_to(REFERENCES)) for folder in REFERENCES.glob("*/*")}
    assert Counter(name.partition("/")[0] for name in named) == dict.fromkeys(FAMILIES, 10)


@pytest.mark.parametrize("folder", EACH)
async def test_solution_half_start_and_nothing(folder, tmp_path):
    pytest.importorskip("gyre_scorers")
    sample = read_task(folder)
    reference = REFERENCES / folder.parent.name / folder.name
    removes = (reference / "removes.txt").read_text().split() if (reference / "removes.txt").is_file() else []

    async def value(kind: str) -> float:
        files = {} if kind == "nothing" else dict(sample.files)
        if kind in ("solution", "half"):
            files |= read_folder(reference / kind)
        if kind == "solution":
            files = {path: data for path, data in files.items() if path not in removes}
        workspace = await FolderSandbox(str(tmp_path)).create(kind, files)
        for path in removes if kind == "solution" else ():
            os.makedirs(os.path.join(workspace.path, os.path.dirname(path)), exist_ok=True)
        task = sample.task(folder.parent.name)
        options = {"python": sys.executable} if task.scorer.name == "pytest" else {}
        scorer = PluginManager.installed().create(Kind.SCORER, task.scorer.name, options, context())
        score = await scorer.score(ScoringJob(task, ExecutionEnd(ExecutionStatus.COMPLETED, "done")), workspace)
        if kind == "solution":
            assert [m.name for m in score.milestones if not m.passed] == []
        return float(score.value)

    assert await value("solution") == 1.0
    assert await value("start") == pytest.approx(sample.floor)
    assert sample.floor < await value("half") < 1.0
    assert await value("nothing") <= sample.floor
