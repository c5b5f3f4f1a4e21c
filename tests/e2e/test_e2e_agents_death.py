"""kill -9 of the agents' process in the middle of a run: executions at rest go on, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_rl.agents.rests import Rests
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_rl.views.report import write_report
from gyre_tito import CallRecord, Store
from small import Probe, check_counted_once, pid_of, processes_of, small_config

pytestmark = [pytest.mark.slow, pytest.mark.checked, pytest.mark.timeout(600)]

Answered = dict[str, list[CallRecord]]


class AgentsKiller:
    """kill -9 of the agents once two of their executions rest, one of which was answered a call since. They stand still
    while that is looked at."""

    def __init__(self, root: Path) -> None:
        self.root, self.directory = root, RunDirectory(root)
        self.running: set[str] = set()
        self.before: Answered = {}

    def __call__(self, event: ev.Event) -> None:
        match event:
            case ev.ExecutionStarted():
                self.running.add(event.execution)
            case ev.ExecutionEnded():
                self.running.discard(event.execution)
        if not self.before and isinstance(event, ev.Contributed | ev.GroupReady | ev.LoadSampled | ev.ExecutionEnded):
            agents = pid_of(self.root, "agents#1")
            os.kill(agents, signal.SIGSTOP)
            self._look()
            os.kill(agents, signal.SIGKILL if self.before else signal.SIGCONT)

    def _look(self) -> None:
        rests = Rests(self.directory.rests, "shell")
        found = {name: rest for name in self.running if name.startswith("g") and (rest := rests.find(name))}
        if len(found) < 2:
            return
        with Store.open(self.directory.store) as store:
            calls = {name: answered(store, name) for name in found}
        told = {name: json.loads(rest.state)["counts"]["answered"] for name, rest in found.items()}
        if any(len(calls[name]) > told[name] for name in found):
            self.before = calls


def answered(store: Store, execution: str) -> list[CallRecord]:
    """Its calls that its agent was given an answer of, in order."""
    return [call for call in store.calls(execution) if call.finish in ("stop", "length")]


def test_executions_at_rest_outlive_their_agents(tmp_path: Path) -> None:
    config = small_config(tmp_path, "rollout.rest_every_s=0.3")
    killer = AgentsKiller(tmp_path)
    probe = Probe(killer)
    summary = asyncio.run(run(config, view=probe))
    assert killer.before, "nothing was killed, so nothing is proven"
    assert (summary.status, summary.steps, summary.lost_calls) == ("finished", 2, 0)
    check_counted_once(probe.seen, steps=2)
    went_on = {event.execution for event in probe.of(ev.ExecutionWentOn)}
    check_the_rest_had_ended(probe, went_on, set(killer.before))
    check_nothing_began_again(probe, went_on)
    check_the_others_began_again(probe, went_on)
    with Store.open(RunDirectory(tmp_path).store) as store:
        for name in went_on:
            check_nothing_is_sampled_twice(store, name, killer.before.get(name, []))
    assert f"{len(went_on)} went on from a rest" in write_report(tmp_path).read_text()
    assert list((tmp_path / "rests").iterdir()) == []
    assert list((tmp_path / "workspaces").iterdir()) == [], "the dead agents' workspaces are cleared away"
    assert processes_of(tmp_path) == []


def check_the_rest_had_ended(probe: Probe, went_on: set[str], before: set[str]) -> None:
    """Of those that were at rest some went on; of any other the end was on its way when the agents died."""
    assert went_on & before
    ends = [event for event in probe.of(ev.ExecutionEnded) if event.execution in before - went_on]
    assert sorted(event.execution for event in ends) == sorted(before - went_on)
    assert all(event.status != "failed" and event.score is not None for event in ends), ends


def check_nothing_began_again(probe: Probe, went_on: set[str]) -> None:
    """Under its own name to its one end, which is not a failure; no other attempt at it."""
    started = [event.execution for event in probe.of(ev.ExecutionStarted)]
    assert [name for name in started if name.partition(".r")[0] in went_on] == sorted(went_on, key=started.index), (
        "started once, and no other attempt"
    )
    ends = [event for event in probe.of(ev.ExecutionEnded) if event.execution in went_on]
    assert len(ends) == len(went_on)
    assert all(event.status != "failed" and event.score is not None for event in ends), ends


def check_the_others_began_again(probe: Probe, went_on: set[str]) -> None:
    """Each that failed did so once, without a score, and its next attempt ended."""
    ends = {event.execution: event for event in probe.of(ev.ExecutionEnded)}
    failed = {name for name, event in ends.items() if event.status == "failed"}
    assert not failed & went_on
    for name in failed:
        assert ends[name].score is None
        assert not name.endswith(".r1"), "the agents' being away spends one retry at most"
        assert ends[f"{name}.r1"].score is not None


def check_nothing_is_sampled_twice(store: Store, name: str, before: list[CallRecord]) -> None:
    """What had been answered is there as it was, and in no session was a prompt answered two times."""
    now = answered(store, name)
    for old in before:
        (same,) = (call for call in now if call.index == old.index)
        np.testing.assert_array_equal(same.sampled_ids, old.sampled_ids)
    tree = store.load_tree(name)
    prompts = [(call.session, *tree.path_ids(call.index)[: call.prompt_len].tolist()) for call in now]
    assert len(set(prompts)) == len(prompts), [(call.index, call.session, call.prompt_len) for call in now]
