"""Sessions that change between two cells of servers in environments of their own, and take their KV along."""

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

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
BLOCK = 32
SERVER = (
    'engine={name="vllm", dtype="float32", max_running=16, kv_cache_gb=0.25, transfers=true, '
    f'arguments=["--block-size", "{BLOCK}"]}}'
)
SETS = (
    "cells.start_s=900",
    "cells.switch_s=600",
    "limits.wall_s=600",
    "rollout.tasks_per_step=2",
    "scheduler.priors.prefill_tps=50.0",
)
"""Prefilling is believed to be slow, so that contexts of a few hundred tokens are worth carrying."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    build(read_spec(Path(str(files("gyre_vllm") / "environment.toml"))))
    root, probe = tmp_path_factory.mktemp("handover"), Probe()
    config = small_config(root, SERVER, *SETS)
    summary = asyncio.run(run(config, view=probe))
    return config, summary, probe, RunDirectory(root)


def test_sessions_are_rerouted_with_their_kv(finished) -> None:
    _, summary, probe, directory = finished
    moves = probe.of(ev.SessionMoved)
    carried = [move for move in moves if move.carried]
    assert summary.status == "finished"
    assert summary.lost_calls == 0
    assert summary.kv_moved_sessions == len(carried) > 0
    assert summary.sessions_rerouted == len(moves)
    for move in carried:
        assert move.tokens > 0
        assert move.bytes > 0
        assert move.seconds > 0
        assert move.src != move.dst
    check_counted_once(probe.seen, steps=2)
    assert processes_of(directory.root) == []


def test_tokens_sampled_after_a_move_are_those_of_the_model(finished) -> None:
    config, _, _, directory = finished
    folders = [str(directory.weights / f"v{version}") if version else str(config.model_dir) for version in range(3)]
    store = Store.open(directory.store)
    try:
        compared, sampled = compare_logprobs(store, folders, every=1, bound=1e-3)
    finally:
        store.close()
    assert compared > 0.8 * sampled, "the rest saw weights change in mid-call"
