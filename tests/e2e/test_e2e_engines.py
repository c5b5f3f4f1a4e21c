"""The same small run over engines that are servers in environments of their own."""

from __future__ import annotations

import asyncio
import sys
from importlib.resources import files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core.environments import build, read_spec
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from small import Probe, check_counted_once, compare_logprobs, processes_of, small_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
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
