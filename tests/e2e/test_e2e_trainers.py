"""The same small run with trainers that live in rank processes of an environment of their own, also under servers."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core.environments import build, read_spec
from gyre_rl.config import RunConfig, load
from gyre_rl.ring import run
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from small import QUICKSTART, SMALL, Probe, check_counted_once, compare_logprobs, kill, pid_of, processes_of

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]
TRAINERS = {
    "deepspeed": 'trainer={name="deepspeed", learning_rate=1e-3, keep_versions=20}',
    "megatron": 'trainer={name="megatron", learning_rate=1e-3, keep_versions=20, cpu_shim=true}',
}
ENGINES = {
    "local": (),
    "vllm": ('engine={name="vllm", dtype="float32", max_running=16, kv_cache_gb=0.25}',),
    "sglang": ('engine={name="sglang", dtype="float32", max_running=16, kv_tokens=16384}',),
}
SLOW_STARTS = ("cells.start_s=900", "cells.switch_s=600", "limits.wall_s=600", "rollout.tasks_per_step=2")


def config_of(trainer: str, root: Path, engine: str = "local") -> RunConfig:
    """The small run with these, whose environments are built if need be."""
    for name in (trainer, engine):
        if name != "local":
            build(read_spec(Path(str(files(f"gyre_{name}") / "environment.toml"))))
    common = [item for item in SMALL if not item.startswith("trainer.")]
    return replace(load(QUICKSTART, [*common, TRAINERS[trainer], *ENGINES[engine], *SLOW_STARTS]), dir=str(root))


PAIRS = [("deepspeed", "local"), ("megatron", "local"), ("deepspeed", "vllm"), ("megatron", "sglang")]


@pytest.mark.parametrize(("trainer", "engine"), PAIRS)
def test_the_run_ends_right(trainer: str, engine: str, tmp_path: Path) -> None:
    config = config_of(trainer, tmp_path, engine)
    probe = Probe()
    summary = asyncio.run(run(config, view=probe))
    assert summary.status == "finished"
    assert summary.steps == 2
    assert summary.lost_calls == 0
    check_counted_once(probe.seen, steps=2)  # whether a cell turns in so short a run is a matter of time
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


def test_kill_9_of_a_core_with_ranks_in_mid_step(tmp_path: Path) -> None:
    """Its ranks end with it; a new core with new ranks goes on from the checkpoint, and every group counts once."""
    ranks: list[int] = []

    def act(event: ev.Event) -> None:
        if isinstance(event, ev.Contributed) and event.step == 1 and not ranks:
            ranks.extend(children_of(pid_of(tmp_path, "cell-0#1")))
            kill(tmp_path, "cell-0#1")

    probe = Probe(act)
    summary = asyncio.run(run(config_of("deepspeed", tmp_path), view=probe))
    assert (summary.status, summary.steps, summary.lost_calls) == ("finished", 2, 0)
    assert ranks, "the core had no ranks, so nothing is proven"
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert [e.cell for e in probe.of(ev.CellStateChanged) if e.state == "LOST"] == ["cell-0#1"]
    check_counted_once(probe.seen, steps=2)
    assert processes_of(tmp_path) == []


def children_of(pid: int) -> list[int]:
    """Process ids."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(path.parent.name))
    return found
