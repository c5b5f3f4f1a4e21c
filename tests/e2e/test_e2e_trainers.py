"""The same small run with trainers that live in rank processes of an environment of their own."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core.environments import build, read_spec
from gyre_rl.config import load
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from small import QUICKSTART, SMALL, Probe, check_counted_once, compare_logprobs, processes_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
TRAINERS = {
    "deepspeed": 'trainer={name="deepspeed", learning_rate=1e-3, keep_versions=20}',
    "megatron": 'trainer={name="megatron", learning_rate=1e-3, keep_versions=20, cpu_shim=true}',
}
SLOW_STARTS = ("cells.start_s=600", "cells.switch_s=300", "limits.wall_s=300", "rollout.tasks_per_step=2")


@pytest.mark.parametrize("trainer", sorted(TRAINERS))
def test_the_run_ends_right(trainer: str, tmp_path: Path) -> None:
    build(read_spec(Path(str(files(f"gyre_{trainer}") / "environment.toml"))))
    common = [item for item in SMALL if not item.startswith("trainer.")]
    config = replace(load(QUICKSTART, [*common, TRAINERS[trainer], *SLOW_STARTS]), dir=str(tmp_path))
    probe = Probe()
    summary = asyncio.run(run(config, view=probe))
    assert summary.status == "finished"
    assert summary.steps == 2
    assert summary.lost_calls == 0
    assert summary.role_switches > 0
    check_counted_once(probe.seen, steps=2)
    assert processes_of(tmp_path) == []
    (compared,) = probe.of(ev.Compared)
    assert 0 < compared.mean <= compared.largest < 1e-3
    directory = RunDirectory(tmp_path)
    store = Store.open(directory.store)
    try:
        weights = [str(config.model_dir), *(str(directory.weights / f"v{version}") for version in (1, 2))]
        tokens, sampled = compare_logprobs(store, weights, every=3, bound=1e-3)
        assert tokens > 0.8 * sampled
    finally:
        store.close()
