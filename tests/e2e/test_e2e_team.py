"""`team` through the real proxy: sub-agents are sessions, compaction is a branch, every sampled token has one owner.

Real: the task, the sandbox, the harness, the proxy over HTTP, its store, the scorer, the making of groups. The engine
is token-true and says what a script says.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gyre_core import ComponentContext, ExecutionJob, ExecutionStatus, Kind, Limits, ModelEndpoint, PluginManager
from gyre_core import ScoringJob as Judged
from gyre_core.testing.harnesses import RecordedEvents
from gyre_loss.assemble import ExecutionRecord, assemble_group
from gyre_rl.cli.console import Console
from gyre_rl.cli.recordings import tito
from gyre_tito import ExecutionSpec, ProxyServer, Score, Status, Store, TitoService
from gyre_tito.backend import GenerateCall
from gyre_tito.testing import BookkeepingEngine, save_tiny_model, tiny_format

PARTS = ("anna", "ben", "clara", "david")
SUMMARY = "I handed out all four letters; their counts are in counts/. Left: the report."


def use(tool: str, **arguments: str) -> str:
    """An answer that calls a tool."""
    return f"I use {tool}.\n<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def write(path: str, text: str) -> str:
    return use("bash", command=f"mkdir -p $(dirname {path}) && printf %b {json.dumps(text)} > {path}")


def team_script(expected: dict[str, str], *, summary: bool, merge: bool) -> dict[str, list[str]]:
    """What each session says, in order: the lead hands out four parts and, if it is any good, merges them."""
    report = [write("report.txt", expected["report.txt"])] if merge else []
    handing = [use("task", prompt=f"Count the letter {name}.") for name in PARTS]
    main = [use("bash", command="ls letters"), *handing, *([SUMMARY] if summary else []), *report, "All is done."]
    helpers = {
        f"task-{number}": [write(f"counts/{name}.txt", expected[f"counts/{name}.txt"]), f"{name} is counted."]
        for number, name in enumerate(PARTS, 1)
    }
    return {"main": main, **helpers}


@dataclass
class Team:
    """What is left of the executions."""

    folder: Path
    engine: BookkeepingEngine
    ends: dict[str, Any]
    scores: dict[str, float]


def speaking(chat: Any, scripts: dict[str, dict[str, list[str]]]) -> Callable[[GenerateCall], Sequence[int]]:
    def reply(call: GenerateCall) -> list[int]:
        text = scripts[call.execution][call.session].pop(0)
        return [*chat.tokenizer.encode(text), chat.stop_ids[0]]

    return reply


async def play(folder: Path) -> Team:
    """One lead that merges and elides old results, one that summarises, one that forgets to merge."""
    plugins, context = PluginManager.installed(), ComponentContext(str(folder), "test")
    tasks = plugins.create(Kind.TASKSET, "team", {"only": ["letter-counts"]}, context)
    [task] = tasks.tasks("train")
    expected = {m["path"]: m["content"].decode() for m in task.scorer.options["milestones"]}
    kinds = {
        "g.0": ({"compact": "elide", "compact_after_turns": 3, "compact_keep": 1}, {"summary": False, "merge": True}),
        "g.1": ({"compact": "summary", "compact_after_turns": 5}, {"summary": True, "merge": True}),
        "g.2": ({}, {"summary": False, "merge": False}),
    }
    chat = tiny_format()
    scripts = {name: team_script(expected, **how) for name, (_, how) in kinds.items()}
    engine = BookkeepingEngine(speaking(chat, scripts))
    store = Store.open(folder / "trajectories.db", writable=True)
    service = TitoService(engine, store, chat)
    proxy = ProxyServer(service)
    await proxy.start()
    team = Team(folder, engine, {}, {})
    sandbox = plugins.create(Kind.SANDBOX, "local", {}, context)
    scorer = plugins.create(Kind.SCORER, "files", {}, context)

    async def execute(name: str) -> None:
        opened = await service.open_execution(ExecutionSpec(name, task.id, "g"))
        harness = plugins.create(Kind.HARNESS, "shell", {"tools": ["bash", "task"], **kinds[name][0]}, context)
        endpoint = ModelEndpoint(opened.base_url, opened.api_key, "policy")
        workspace = await sandbox.create(name, task.files)
        limits = Limits(max_call_tokens=2000)
        end = await harness.run(ExecutionJob(name, task, endpoint, limits), workspace, RecordedEvents())
        score = await scorer.score(Judged(task, end), workspace)
        milestones = {m.name: float(m.passed) for m in score.milestones}
        await service.close_execution(name, Status(end.status.value), Score(score.value, milestones), end.reason)
        await harness.aclose()
        team.ends[name], team.scores[name] = end, score.value

    try:
        await asyncio.gather(*(execute(name) for name in kinds))
    finally:
        await sandbox.close()
        await proxy.stop()
        await service.close()
        store.close()
    return team


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Team:
    return asyncio.run(play(tmp_path_factory.mktemp("team")))


def test_the_work_is_shared_and_scored(team: Team) -> None:
    assert {end.status for end in team.ends.values()} == {ExecutionStatus.COMPLETED}
    assert {name: end.sub_agents for name, end in team.ends.items()} == {"g.0": 4, "g.1": 4, "g.2": 4}
    assert team.ends["g.0"].compactions >= 1
    assert team.ends["g.1"].compactions >= 1
    assert team.ends["g.2"].compactions == 0
    assert (team.scores["g.0"], team.scores["g.1"]) == (1.0, 1.0)
    assert team.scores["g.2"] == pytest.approx(4 / 6)  # the report weighs as much as two letters


def test_sub_agents_are_sessions_with_their_parent(team: Team) -> None:
    with Store.open(team.folder / "trajectories.db") as store:
        for name in team.ends:
            sessions = {info.session: info.parent for info in store.sessions(name)}
            assert sessions == {"main": None, **{f"task-{n}": "main" for n in range(1, 5)}}


def test_paths_are_what_the_engine_saw_and_compaction_branches(team: Team) -> None:
    with Store.open(team.folder / "trajectories.db") as store:
        for name, end in team.ends.items():
            tree, calls = store.load_tree(name), store.calls(name)
            books = [entry for entry in team.engine.books if entry.call.execution == name]
            assert len(calls) == len(books)
            by_id = {entry.call.call_id: entry for entry in books}
            for call in calls:
                entry = by_id[f"{name}#{call.index}"]
                path = np.asarray(tree.path_ids(call.index))
                assert path.tolist() == [*entry.prompt.tolist(), *entry.sampled]
            assert tree.sampled_count == sum(len(entry.sampled) for entry in books)
            assert len(tree.leaves()) == 5 + end.compactions


def test_every_sampled_token_carries_loss_once(team: Team) -> None:
    with Store.open(team.folder / "trajectories.db") as store:
        trees = {name: store.load_tree(name).to_arrays() for name in team.ends}
    records = [ExecutionRecord(name, "completed", team.scores[name], trees[name]) for name in sorted(trees)]
    group = assemble_group(records, trainer_version=0)
    sampled = {name: sum(len(e.sampled) for e in team.engine.books if e.call.execution == name) for name in trees}
    assert group.batch is not None
    assert group.batch.entries == sum(sampled.values())
    assert float(group.batch.entry_weight.sum()) == pytest.approx(1.0)
    # Equal scores share an advantage; each execution's tokens weigh 1/3 together, however many branches it has.
    weights = Counter(np.round(np.asarray(group.batch.entry_weight, np.float64), 9).tolist())
    assert weights == Counter({round(1 / 3 / count, 9): 0 for count in sampled.values()}) + Counter(
        [round(1 / 3 / count, 9) for count in sampled.values() for _ in range(count)]
    )


def test_gyre_tree_shows_the_branches_and_gyre_check_finds_nothing(team: Team, capsys: pytest.CaptureFixture) -> None:
    model = str(save_tiny_model(team.folder / "model"))
    for name, end in team.ends.items():
        tito("tree", [str(team.folder), name], Console())
        shown = capsys.readouterr().out.splitlines()
        for session in ("main", "task-1", "task-2", "task-3", "task-4"):
            assert any(f"({session}; " in line for line in shown)
        branches = [n for n, line in enumerate(shown) if "(main; rewrite;" in line or "(main; compaction;" in line]
        assert len(branches) == end.compactions
        for at in branches:  # each begins with context of its own, beside what the main session had gone on with
            indent = len(shown[at]) - len(shown[at].lstrip())
            call = shown[at].partition(" call ")[2].partition(" ")[0]
            assert shown[at - 1] == f"{' ' * indent}{shown[at - 1].lstrip()}"
            assert shown[at - 1].endswith(f"first in call {call}")
        tito("tree", [str(team.folder), name], Console(json=True))
        counts = json.loads(capsys.readouterr().out)
        assert (counts["nodes"], counts["leaves"]) == (len(shown), 5 + end.compactions)
    tito("check", [str(team.folder), "--model", model], Console(json=True))
    report = json.loads(capsys.readouterr().out)
    assert (report["rollouts"], report["errors"], report["findings"]) == (3, 0, [])
