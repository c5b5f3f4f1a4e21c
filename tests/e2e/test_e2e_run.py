"""One real small run, and what must hold of what it recorded (laws 5.1, 5.2 and 8 of docs/why/tito.md)."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from gyre_core import ComponentContext, GenerateRequest, SamplingParams, WeightSource
from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
from gyre_local.serve.engine import LocalEngine
from gyre_local.train.trainer import LocalTrainer
from gyre_rl.ring import run
from gyre_rl.run.batches import Member, build_group
from gyre_rl.run.directory import RunDirectory
from gyre_rl.views import events as ev
from gyre_tito import Store
from safetensors.torch import load_file
from small import Probe, check_counted_once, compare_logprobs, processes_of, scripted, small_config
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(900)


TURNING = (
    "cells.count=4",
    "cells.train=2",
    "scheduler.policy=turning",
    "scheduler.priors.kv_setup_s=1e-6",
    "scheduler.priors.kv_bytes_per_s=1e15",
)
"""A satellite from the beginning, and a cell that turns while it holds sessions; until a move was measured, KV is taken
along. So the run turns, moves and joins whatever the machine's speed."""


class FinishedRun:
    def __init__(self, root: Path) -> None:
        with scripted(root / "plugin"):
            self.config = small_config(root / "run", "seed=1", *TURNING)
            self.probe = Probe()
            self.summary = asyncio.run(run(self.config, view=self.probe))
        self.directory = RunDirectory(root / "run")
        self.store = Store.open(self.directory.store)

    def weights(self, version: int) -> str:
        return str(self.directory.weights / f"v{version}") if version else str(self.config.model_dir)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory):
    """A run in which cells turned, sessions moved with their KV and a satellite joined the first step."""
    made = FinishedRun(tmp_path_factory.mktemp("run"))
    yield made
    made.store.close()


def test_the_summary_says_what_the_log_says(finished: FinishedRun) -> None:
    summary, probe = finished.summary, finished.probe
    assert summary.status == "finished"
    assert summary.steps == 2
    assert summary.lost_calls == 0
    assert summary.role_switches == sum(e.ok for e in probe.of(ev.Switched)) > 0
    assert summary.sessions_rerouted == len(probe.of(ev.SessionMoved)) > 0
    assert summary.kv_moved_sessions == sum(e.carried for e in probe.of(ev.SessionMoved)) > 0
    assert summary.satellite_joins > 0
    assert summary.partial_scores == sum(e.partial and e.score > 0 for e in probe.of(ev.ExecutionEnded))
    before, after = probe.of(ev.Evaluated)
    assert (summary.score_before, summary.score_after) == (before.score, after.score)
    assert not probe.of(ev.Notice)


def test_trainer_and_engine_were_compared_before_the_first_step(finished: FinishedRun) -> None:
    (compared,) = finished.probe.of(ev.Compared)
    assert compared.step == 0
    assert compared.tokens > 100
    assert 0 < compared.mean <= compared.largest < 1e-3
    kinds = [event.kind for event in finished.probe.seen]
    assert kinds.index("compared") < kinds.index("step_applied")


def test_every_micro_batch_counts_once(finished: FinishedRun) -> None:
    check_counted_once(finished.probe.seen, steps=2)


def test_nothing_outlives_the_run(finished: FinishedRun) -> None:
    assert processes_of(finished.directory.root) == []


def test_recorded_logprobs_are_those_of_transformers(finished: FinishedRun) -> None:
    """Law 5.1 in numbers: every token of every call that one version sampled, on the path that the engine saw."""
    versions = [finished.weights(version) for version in range(3)]
    compared, sampled = compare_logprobs(finished.store, versions, every=5, bound=1e-4)
    assert compared > 0.95 * sampled


async def test_recorded_prompts_continue_greedily_as_in_transformers(finished: FinishedRun) -> None:
    engine = LocalEngine(LocalEngineOptions(kv_tokens=8192), ComponentContext(".", "test"))
    await engine.start(WeightSource(2, finished.weights(2)))
    model = AutoModelForCausalLM.from_pretrained(finished.weights(2), dtype=torch.float32).eval()
    names = [info.execution for info in finished.store.executions() if info.calls > 2][:8]
    for name in names:
        call = finished.store.calls(name)[-1]
        prompt = np.asarray(finished.store.load_tree(name).path_ids(call.index))[: call.prompt_len]
        request = GenerateRequest(name, name, prompt.tolist(), SamplingParams(12, temperature=0.0))
        got = [token async for chunk in engine.generate(request) for token in chunk.token_ids]
        ids = torch.as_tensor(prompt[None], dtype=torch.long)
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, len(prompt) :]
        assert got == expected.tolist()
    await engine.close()


async def test_the_weights_are_those_of_one_trainer_doing_everything(finished: FinishedRun, tmp_path: Path) -> None:
    """Step 0 again from the store, by one trainer and in one contribution."""
    options = finished.config.trainer.options
    assert isinstance(options, LocalTrainerOptions)
    trainer = LocalTrainer(options, ComponentContext(str(tmp_path), "alone", finished.config.seed))
    await trainer.start(WeightSource(0, finished.weights(0)), core=True)
    divisor, satellites = 0.0, finished.probe.of(ev.StepApplied)[0].satellites
    ready = {event.group for event in finished.probe.of(ev.GroupReady) if event.step == 0}
    for group in sorted(ready):
        members = []
        for info in finished.store.executions(group=group):
            score = math.nan if info.score is None else info.score.value
            tree = finished.store.load_tree(info.execution).to_arrays()
            members.append(Member(info.execution, info.status.value, score, tree))
        built = build_group(group, 0, members, finished.config.loss, trainer_version=0)
        divisor += built.group.divisor
        for batch in built.batches:
            await trainer.accumulate(batch)
    contribution = await trainer.export_contribution("all", 0, str(tmp_path))
    await trainer.add_contribution(contribution)
    result = await trainer.step(divisor)
    alone = await trainer.publish(str(tmp_path / "weights"))
    await trainer.close()
    assert result.skipped is None
    assert satellites > 0, "no satellite took part, so the run proves nothing"
    ours, theirs = (load_file(Path(p) / "model.safetensors") for p in (finished.weights(1), alone.location))
    start = load_file(Path(finished.weights(0)) / "model.safetensors")
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in theirs)
    gap = max(float((theirs[name] - ours[name]).abs().max()) for name in theirs)
    assert moved > 1e-5
    assert gap < 0.05 * moved  # Adam's first step is lr * sign(g): rounding shows where a gradient is almost zero
