"""DeepSpeed beside the embedded trainer: same parameters from the same data, satellites of another backend, other
numbers of ranks, faults."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, InfrastructureError, Trainer, WeightSource
from gyre_core.testing.trainers import at_rest, contribute, gap, weights_of
from gyre_deepspeed.options import DeepSpeedTrainerOptions
from gyre_local.options import LocalTrainerOptions
from gyre_local.train.trainer import LocalTrainer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
RATE = 1e-3


@pytest.fixture
def local(context: ComponentContext) -> Callable[[], LocalTrainer]:
    return lambda: LocalTrainer(LocalTrainerOptions(learning_rate=RATE), context)


@pytest.fixture
def ranks(python: str, context: ComponentContext, pooled: Any) -> Callable[..., Any]:
    """`ranks(**options)`: a trainer with ranks, not started."""
    base = DeepSpeedTrainerOptions(python=python, learning_rate=RATE, bucket_elements=20_000)
    return lambda **told: pooled(dataclasses.replace(base, **told), context)


async def train(core: Trainer, helper: Trainer, batches: Any, steps: range, folder: Path) -> None:
    """Steps on fresh data, half of each computed by a helper that takes the core's weights."""
    for step in steps:
        work = [dataclasses.replace(b, id=f"{step}{b.id}", step=step) for b in batches(seed=step, count=8)]
        mine = await contribute(core, work[::2], f"s{step}core", folder)
        if helper is not core:
            await helper.load_weights(await core.publish(str(folder / "weights")))
        theirs = await contribute(helper, work[1::2], f"s{step}helper", folder)
        for made in (theirs, mine):
            await core.add_contribution(made)
        assert (await core.step(2.0)).skipped is None


SPLITS = [
    {"stage": 1, "ranks": 2},
    {"stage": 2, "ranks": 2, "offload_optimizer": True},
    {"stage": 3, "ranks": 2},
    {"stage": 3, "offload_optimizer": True},
    {"stage": 2, "recompute": True},
]


@pytest.mark.parametrize("told", SPLITS, ids=lambda told: "-".join(f"{k}{v}" for k, v in told.items()))
async def test_five_steps_give_the_embedded_trainers_parameters(
    told: dict[str, Any], ranks: Any, local: Any, folder_of: Any, batches: Any, tmp_path: Path
) -> None:
    """With a satellite on the embedded trainer computing half of every step."""
    source = WeightSource(0, str(folder_of("qwen3")))
    core, satellite, alone = ranks(**told), local(), local()
    await core.start(source, core=True)
    await satellite.start(source, core=False)
    await alone.start(source, core=True)
    try:
        await train(core, satellite, batches, range(1, 6), tmp_path / "mixed")
        await train(alone, alone, batches, range(1, 6), tmp_path / "alone")
        left = await weights_of(core, tmp_path / "left")
        assert gap(left, await weights_of(alone, tmp_path / "right")) < 1e-4
    finally:
        for trainer in (core, satellite, alone):
            await trainer.close()


async def test_a_checkpoint_goes_on_in_another_stage_and_number_of_ranks(
    ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
) -> None:
    source = WeightSource(0, str(folder_of("qwen3")))
    first = ranks(stage=3, ranks=2)
    await first.start(source, core=True)
    try:
        await train(first, first, batches, range(1, 4), tmp_path / "first")
        await first.save(str(tmp_path / "checkpoint"))
        await train(first, first, batches, range(4, 6), tmp_path / "on")
        wanted = await weights_of(first, tmp_path / "wanted")
    finally:
        await first.close()
    for name, told in (("one", {"stage": 1}), ("two", {"stage": 2, "ranks": 2})):
        other = ranks(**told)
        await other.start(source, core=True)
        try:
            await other.restore(str(tmp_path / "checkpoint"))
            assert other.version == 3
            await train(other, other, batches, range(4, 6), tmp_path / name)
            assert gap(await weights_of(other, tmp_path / f"w{name}"), wanted) < 1e-4
        finally:
            await other.close()


async def test_logprobs_are_the_embedded_trainers(ranks: Any, local: Any, folder_of: Any, batches: Any) -> None:
    source, batch = WeightSource(0, str(folder_of("llama3"))), batches(count=4)[1]
    mine, theirs = ranks(stage=3, ranks=2), local()
    await mine.start(source, core=False)
    await theirs.start(source, core=False)
    try:
        assert await mine.logprobs(batch) == pytest.approx(await theirs.logprobs(batch), abs=1e-3)
    finally:
        await mine.close()
        await theirs.close()


async def test_the_model_is_taken_down_and_built_again(
    ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
) -> None:
    core = ranks(stage=2, ranks=2, offload="rebuild")
    await core.start(WeightSource(0, str(folder_of("qwen3"))), core=True)
    try:
        await train(core, core, batches, range(1, 3), tmp_path / "a")
        await core.save(str(tmp_path / "checkpoint"))
        await train(core, core, batches, range(3, 4), tmp_path / "b")
        wanted = await weights_of(core, tmp_path / "wanted")
        await core.restore(str(tmp_path / "checkpoint"))
        await core.offload()
        await core.onload()
        await train(core, core, batches, range(3, 4), tmp_path / "c")
        assert gap(await weights_of(core, tmp_path / "found"), wanted) == 0
    finally:
        await core.close()


async def test_a_rank_killed_while_computing_gives_its_lease_back(
    ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
) -> None:
    satellite = ranks(stage=3, ranks=2)
    work = batches(count=4)
    await satellite.start(WeightSource(0, str(folder_of("qwen3"))), core=False)
    try:
        good = at_rest(await contribute(satellite, work[:2], "good", tmp_path))
        await satellite.accumulate(work[2])
        os.kill(satellite.pids[1], signal.SIGKILL)
        with pytest.raises(InfrastructureError, match="rank 1 of 2"):
            await satellite.accumulate(work[3])
        await satellite.discard_contribution()
        again = at_rest(await contribute(satellite, work[:2], "again", tmp_path))
        assert gap(again, good) == 0
    finally:
        await satellite.close()


async def test_another_models_weights_are_refused(ranks: Any, folder_of: Any) -> None:
    satellite = ranks()
    await satellite.start(WeightSource(0, str(folder_of("qwen3"))), core=False)
    try:
        with pytest.raises(InfrastructureError, match=r"model\.layers\.0"):
            await satellite.load_weights(WeightSource(1, str(folder_of("qwen2"))))
        assert satellite.version == 0
    finally:
        await satellite.close()
