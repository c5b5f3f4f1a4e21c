"""The same small run over engines that are servers in environments of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core.environments import build, read_spec
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from gyre_tito.check_files import check_path
from small import Probe, check_counted_once, compare_logprobs, pid_of, processes_of, small_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
SERVERS = {
    "vllm": 'engine={name="vllm", dtype="float32", max_running=16, kv_cache_gb=0.25}',
    "sglang": 'engine={name="sglang", dtype="float32", max_running=16, kv_tokens=16384}',
}
SLOW_STARTS = ("cells.start_s=900", "cells.switch_s=600", "limits.wall_s=600", "rollout.tasks_per_step=2")


class FinishedRun:
    def __init__(self, engine: str, root: Path) -> None:
        build(read_spec(Path(str(files(f"gyre_{engine}") / "environment.toml"))))
        self.config = small_config(root, SERVERS[engine], *SLOW_STARTS)
        self.probe = Probe()
        self.summary = asyncio.run(run(self.config, view=self.probe))
        self.directory = RunDirectory(root)
        self.store = Store.open(self.directory.store)

    def weights(self, version: int) -> str:
        return str(self.directory.weights / f"v{version}") if version else str(self.config.model_dir)


@pytest.fixture(scope="module", params=sorted(SERVERS))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    made = FinishedRun(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.store.close()


def test_the_run_ends_right_with_switches_and_rerouting(finished: FinishedRun) -> None:
    summary, probe = finished.summary, finished.probe
    assert summary.status == "finished"
    assert summary.steps == 2
    assert summary.lost_calls == 0
    assert summary.role_switches > 0
    assert summary.sessions_rerouted > 0
    check_counted_once(probe.seen, steps=2)
    assert not [event for event in probe.of(ev.Switched) if not event.ok]
    assert all(event.seconds > 0 for event in probe.of(ev.Switched))
    assert processes_of(finished.directory.root) == []


def test_trainer_and_server_compute_the_same_model(finished: FinishedRun) -> None:
    (compared,) = finished.probe.of(ev.Compared)
    assert 0 < compared.mean <= compared.largest < 1e-3


def test_recorded_logprobs_are_those_of_transformers(finished: FinishedRun) -> None:
    versions = [finished.weights(version) for version in range(3)]
    compared, sampled = compare_logprobs(finished.store, versions, every=3, bound=1e-3)
    assert compared > 0.8 * sampled, "the rest saw weights change in mid-call"


class ServerKiller:
    """kill -9 of the server of cell-1, which its cell survives, when three executions have ended."""

    def __init__(self, root: Path) -> None:
        self.root, self.ended, self.killed = root, 0, Counter[str]()

    def __call__(self, event: ev.Event) -> None:
        self.ended += isinstance(event, ev.ExecutionEnded) and event.purpose == "train"
        if self.ended == 3 and not self.killed:
            for pid in children_of(pid_of(self.root, "cell-1#1")):
                name = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"gyre_sglang_server.serve" in name and b"guard.py" not in name:
                    os.kill(pid, signal.SIGKILL)
                    self.killed["sglang"] += 1


def children_of(pid: int) -> list[int]:
    """Its descendants, nearest first."""
    found = [pid]
    for each in found:
        for thread in Path(f"/proc/{each}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found[1:]


def test_a_server_that_dies_costs_one_error_and_no_call(tmp_path: Path) -> None:
    """Two cells sample on servers; one server is killed in mid-run. Its sessions go on at the other cell; its cell
    gives up with the server's end as the reason, and its next life begins."""
    build(read_spec(Path(str(files("gyre_sglang") / "environment.toml"))))
    config = small_config(tmp_path, SERVERS["sglang"], *SLOW_STARTS, "scheduler.policy=static", "steps=4")
    killer = ServerKiller(tmp_path)
    probe = Probe(killer)
    summary = asyncio.run(run(config, view=probe))
    assert killer.killed["sglang"] >= 1, "nothing was killed, so nothing is proven"
    assert (summary.status, summary.steps, summary.lost_calls) == ("finished", 4, 0)
    (said,) = [notice.text for notice in probe.of(ev.Notice) if "gives up" in notice.text]
    assert said.startswith("cell-1#1 gives up")
    assert "ended with signal 9" in said
    lost = [event for event in probe.of(ev.CellStateChanged) if event.state == "LOST"]
    assert [event.cell for event in lost] == ["cell-1#1"]
    assert (tmp_path / "procs" / "cell-1.2.json").exists(), "its next life was not begun"
    moved = [event for event in probe.of(ev.SessionMoved) if event.src == "cell-1#1"]
    assert moved
    assert {event.dst for event in moved} <= {"cell-2#1", "cell-1#2"}
    assert [event for event in probe.of(ev.ExecutionEnded) if event.status == "failed"] == []
    check_counted_once(probe.seen, steps=4)
    directory = RunDirectory(tmp_path)
    assert [one for one in check_path(directory.store).findings if one.severity != "note"] == []
    with Store.open(directory.store) as store:
        versions = [str(config.model_dir), *(str(directory.weights / f"v{version}") for version in range(1, 5))]
        compared, _ = compare_logprobs(store, versions, every=3, bound=1e-3)
    assert compared > 0
    assert processes_of(tmp_path) == []
