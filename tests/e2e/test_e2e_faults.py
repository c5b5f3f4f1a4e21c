"""Runs that lose processes in mid-step, and runs that are killed whole and go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_rl.agents.rests import Rests
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from small import QUICKSTART, SMALL, Probe, check_counted_once, pid_of, processes_of, scripted, small_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


WAYS = {"disk": (), "memory": ("trainer.handover=memory", "trainer.publish=shm")}
"""How gradients and weights travel."""


def ways(checked: str) -> pytest.MarkDecorator:
    """Each way, one of them at every check."""
    return pytest.mark.parametrize(
        "way", [pytest.param(way, marks=pytest.mark.checked if way == checked else ()) for way in WAYS]
    )


class Killer:
    """A signal to one cell at the first event that `when` accepts; `when` gives its name or None."""

    def __init__(self, root: Path, when, number: signal.Signals) -> None:
        self.root, self.when, self.number, self.victim = root, when, number, ""

    def __call__(self, event: ev.Event) -> None:
        if not self.victim and (victim := self.when(event)):
            self.victim = victim
            os.kill(pid_of(self.root, victim), self.number)


def run_with(root: Path, when, *sets: str, number: signal.Signals = signal.SIGKILL):
    config = small_config(root, *sets)
    killer = Killer(config.resolve(str(root)), when, number)
    probe = Probe(killer)
    summary = asyncio.run(run(config, view=probe))
    assert killer.victim, "nothing was killed, so nothing is proven"
    return summary, probe, killer.victim


def check_whole(summary, probe, victim: str, root: Path) -> None:
    assert (summary.status, summary.steps, summary.lost_calls) == ("finished", 2, 0)
    lost = [e for e in probe.of(ev.CellStateChanged) if e.state == "LOST"]
    assert [e.cell for e in lost] == [victim]
    check_counted_once(probe.seen, steps=2)
    zeros = [e for e in probe.of(ev.ExecutionEnded) if e.status == "failed" and e.score is not None]
    assert zeros == [], "a failure of ours must not be scored"
    per_group = Counter(e.group for e in probe.of(ev.GroupReady))
    assert set(per_group.values()) == {1}
    assert processes_of(root) == []


@ways("memory")
def test_kill_9_of_a_satellite_that_holds_a_lease(tmp_path: Path, way: str) -> None:
    """Its micro-batches go back and somebody else computes them. The satellite trains from the beginning, and never
    finishes: what it was leased first is still open when it dies, and there is no second time."""

    def when(event: ev.Event) -> str | None:
        return event.cell if isinstance(event, ev.Leased) and not event.core else None

    with scripted(tmp_path / "plugin"):
        summary, probe, victim = run_with(
            tmp_path / "run", when, "cells.train=2", "scheduler.policy=static", "trainer.name=unfinished", *WAYS[way]
        )
    check_whole(summary, probe, victim, tmp_path / "run")
    (leased,) = [e for e in probe.of(ev.Leased) if e.cell == victim]
    (returned,) = probe.of(ev.LeaseReturned)
    assert (returned.cell, returned.lease, returned.batches) == (victim, leased.lease, leased.batches)
    assert leased.batches > 0
    assert {e.cell for e in probe.of(ev.Contributed)} == {"cell-0#1"}
    assert left_in_memory(tmp_path) == []


@pytest.mark.checked
def test_kill_9_of_a_rollout_cell_with_running_calls(tmp_path: Path) -> None:
    ended = Counter()

    def when(event: ev.Event) -> str | None:
        if isinstance(event, ev.ExecutionEnded) and event.purpose == "train":
            ended["train"] += 1
        return "cell-1#1" if ended["train"] == 3 else None

    summary, probe, victim = run_with(tmp_path, when, "scheduler.policy=static")
    check_whole(summary, probe, victim, tmp_path)


@ways("disk")
def test_kill_9_of_the_core_in_mid_step(tmp_path: Path, way: str) -> None:
    def when(event: ev.Event) -> str | None:
        return "cell-0#1" if isinstance(event, ev.Contributed) and event.step == 1 else None

    summary, probe, victim = run_with(tmp_path, when, *WAYS[way])
    check_whole(summary, probe, victim, tmp_path)
    assert left_in_memory(tmp_path) == []


@pytest.mark.parametrize("way", ["memory", "delta"])
def test_a_core_that_ends_in_order_comes_back(tmp_path: Path, way: str) -> None:
    """As when its machine is shut down: its trainer gave the memory back in which the run's newest weights were, or
    published what changed alone."""

    def when(event: ev.Event) -> str | None:
        return "cell-0#1" if isinstance(event, ev.Contributed) and event.step == 1 else None

    summary, probe, victim = run_with(
        tmp_path, when, *{**WAYS, "delta": ("trainer.publish=delta",)}[way], number=signal.SIGTERM
    )
    check_whole(summary, probe, victim, tmp_path)
    assert left_in_memory(tmp_path) == []


def left_in_memory(root: Path) -> list[Path]:
    """Roots in shared memory that belong to a run under `root`."""
    owners = Path("/dev/shm").glob("gyre-weights-*/owner.json")
    return [path.parent for path in owners if str(root) in path.read_text()]


@pytest.mark.parametrize(
    ("number", "way"),
    [
        (signal.SIGKILL, "disk"),
        pytest.param(signal.SIGKILL, "memory", marks=pytest.mark.checked),
        (signal.SIGINT, "memory"),
    ],
)
def test_a_run_that_is_killed_whole_goes_on(tmp_path: Path, number: signal.Signals, way: str) -> None:
    """kill -9 and Ctrl-C in mid-step, then `gyre resume`: every group trains once, what had ended is not run again."""
    root = tmp_path / "run"
    sets = [f"--set={item}" for item in (*SMALL, *WAYS[way], "steps=4", "rollout.rest_every_s=0", f"dir={root}")]
    gyre = [sys.executable, "-m", "gyre_rl"]
    first = subprocess.Popen([*gyre, "run", str(QUICKSTART), "--plain", *sets], stderr=subprocess.PIPE, text=True)
    log = RunDirectory(root).events
    _wait_for(lambda: log.exists() and _in_mid_step(RunDirectory(root)), first)
    first.send_signal(number)
    status = first.wait(240)
    assert status == (-signal.SIGKILL if number is signal.SIGKILL else 130)
    _wait_for(lambda: not processes_of(root), None)
    if number is signal.SIGINT:
        assert f"gyre resume {root}" in first.stderr.read()
    before, rested = [ev.parse(e) for e in ev.read_log(log)], _resting(RunDirectory(root))
    saved = max(RunDirectory(root).versions_saved())
    again = subprocess.run(
        [*gyre, "resume", str(root), "--plain", "--json"], capture_output=True, text=True, check=False, timeout=400
    )
    assert again.returncode == 0, again.stderr[-3000:]
    events = [ev.parse(e) for e in ev.read_log(log)]
    assert json.loads(again.stdout.splitlines()[-1])["steps"] == 4
    _check_steps(before, events[len(before) :], saved)
    _check_each_group_once(events)
    _check_nothing_ran_twice(before, events[len(before) :], root)
    _check_what_rested_went_on(rested, events[len(before) :])
    assert processes_of(root) == []
    assert left_in_memory(root) == []


def _check_steps(before, after, saved: int) -> None:
    """The second life goes on from the newest checkpoint. A step may be in it of which the log does not tell: the core
    had saved it when the run was killed."""
    applied, later = ([e.step for e in part if isinstance(e, ev.StepApplied)] for part in (before, after))
    assert applied == list(range(len(applied)))
    assert len(applied) <= saved <= len(applied) + 1
    assert later == list(range(saved, 4))


def _in_mid_step(directory: RunDirectory) -> bool:
    """A step is applied, executions of later ones have ended, and others are at rest."""
    kinds = [e.kind for e in ev.read_log(directory.events)]
    if "step_applied" not in kinds or "execution_ended" not in kinds[kinds.index("step_applied") :]:
        return False
    return len(_resting(directory)) >= 2


def _wait_for(what, process: subprocess.Popen | None, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        assert process is None or process.poll() is None, process.stderr.read()[-3000:]
        time.sleep(0.1)


def _check_each_group_once(events) -> None:
    """The last life's seats: each step over the wanted number of groups, no group in two steps."""
    seats: dict[str, int] = {}
    for event in events:
        if isinstance(event, ev.GroupReady):
            seats[event.group] = event.step
    per_step = Counter(seats.values())
    assert per_step == dict.fromkeys(range(4), 4)
    assert sorted(seats) == [f"g{i:06d}" for i in range(16)], "a task was skipped"


def _resting(directory: RunDirectory) -> set[str]:
    """Executions that are under way and at rest."""
    with Store.open(directory.store) as store:
        under_way = {info.execution for info in store.executions() if info.closed_at is None}
    return {name for name in under_way if Rests(directory.rests, "shell").find(name) is not None}


def _check_what_rested_went_on(rested: set[str], after) -> None:
    """They go on under their names, and end well; no other attempt is made at them."""
    assert rested, "nothing was at rest, so nothing is proven"
    started = [e.execution for e in after if isinstance(e, ev.ExecutionStarted)]
    assert rested <= set(started)
    assert not [name for name in started if name.partition(".r")[0] in rested and name not in rested]
    ends = {e.execution: e.status for e in after if isinstance(e, ev.ExecutionEnded)}
    assert all(ends[name] != "failed" for name in rested), ends


def _check_nothing_ran_twice(before, after, root: Path) -> None:
    """An execution that had ended and been scored before the kill has no second attempt."""
    ended = {e.execution for e in before if isinstance(e, ev.ExecutionEnded) and e.score is not None}
    started = {e.execution for e in after if isinstance(e, ev.ExecutionStarted)}
    assert not {name for name in started if name.split(".r")[0] in ended}
    with Store.open(RunDirectory(root).store) as store:
        names = [info.execution for info in store.executions()]
    assert len(names) == len(set(names))
    assert os.path.exists(RunDirectory(root).summary)
