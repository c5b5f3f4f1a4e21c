"""Any schedule of joins, leaves, crashes, slow satellites and double leases ends in the parameters of one trainer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, Contribution, MicroBatch, WeightSource
from gyre_local.options import LocalTrainerOptions
from gyre_local.train.trainer import LocalTrainer

STEPS = 2


class Step:
    """One step's ledger, played by a random hand: which batches are counted, which leases are out."""

    def __init__(self, rng: random.Random, batches: list[MicroBatch], folder: Path) -> None:
        self.rng, self.folder = rng, folder
        self.batches = {batch.id: batch for batch in batches}
        self.counted: set[str] = set()
        self.late: list[Contribution] = []
        self.made = 0

    def lease(self) -> list[MicroBatch]:
        open_ids = sorted(set(self.batches) - self.counted)
        picked = self.rng.sample(open_ids, min(len(open_ids), self.rng.randint(1, 3)))
        return [self.batches[name] for name in picked]

    async def compute(self, who: LocalTrainer, lease: list[MicroBatch]) -> Contribution | None:
        """None when the satellite crashes in the middle (its next life begins with nothing open)."""
        stop = self.rng.randrange(len(lease)) if self.rng.random() < 0.2 else len(lease)
        for batch in lease[:stop]:
            await who.accumulate(batch)
        if stop < len(lease):
            await who.discard_contribution()
            return None
        self.made += 1
        return await who.export_contribution(
            f"c{self.rng.randrange(10**6):06d}-{self.made}", lease[0].step, str(self.folder)
        )

    async def give(self, core: LocalTrainer, made: Contribution) -> None:
        """Count it, unless a batch of it was counted by somebody quicker."""
        if self.counted & set(made.batch_ids):
            with pytest.raises(ValueError):
                await core.add_contribution(made)
            return
        await core.add_contribution(made)
        self.counted |= set(made.batch_ids)

    async def run(self, core: LocalTrainer, satellites: list[LocalTrainer], source: WeightSource) -> None:
        joined: list[LocalTrainer] = [core]
        while self.counted != set(self.batches):
            for satellite in satellites:
                if self.rng.random() < 0.4:  # joins in mid-step, or leaves, or comes again
                    if satellite in joined:
                        joined.remove(satellite)
                    else:
                        await satellite.load_weights(source)
                        joined.append(satellite)
            made = await self.compute(self.rng.choice(joined), self.lease())
            if made is None:
                continue
            if self.rng.random() < 0.25:
                self.late.append(made)  # slow: its lease is given again meanwhile
            else:
                await self.give(core, made)
            if self.late and self.rng.random() < 0.4:
                await self.give(core, self.late.pop(self.rng.randrange(len(self.late))))


@pytest.mark.parametrize("way", ["disk", "memory"])
@pytest.mark.parametrize("trials", [4, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
async def test_any_schedule_gives_the_parameters_of_one_trainer(
    way: str, trials: int, folder_of: Callable[..., Path], context: ComponentContext, batches: Any, tmp_path: Path
) -> None:
    work: list[MicroBatch] = batches(count=6)
    start = WeightSource(0, str(folder_of("qwen3")))

    async def made(core: bool) -> LocalTrainer:
        publish = "delta" if way == "memory" else "disk"
        options = LocalTrainerOptions(dtype="float64", learning_rate=1e-2, handover=way, publish=publish)
        trainer = LocalTrainer(options, context)
        await trainer.start(start, core=core)
        return trainer

    core, satellites = await made(True), [await made(False) for _ in range(2)]
    await core.save(str(tmp_path / "begin"))
    for batch in work:
        await core.accumulate(batch)
    alone: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS):
        if step:
            for batch in work:
                await core.accumulate(batch)
        await core.add_contribution(await core.export_contribution(f"alone{step}", 1, str(tmp_path)))
        await core.step(2.0)
        alone.append({name: p.detach().clone() for name, p in core._replica.parameters.items()})

    for trial in range(trials):
        rng = random.Random(trial)
        await core.restore(str(tmp_path / "begin"))
        for step in range(STEPS):
            source = await core.publish(str(tmp_path / "weights"))
            await Step(rng, work, tmp_path / "contributions").run(core, satellites, source)
            await core.step(2.0)
            for name, parameter in core._replica.parameters.items():
                gap = float((parameter.detach() - alone[step][name]).norm() / alone[step][name].norm())
                assert gap < 1e-10, f"trial {trial}, step {step}: {name} differs by {gap}"
    for trainer in (core, *satellites):
        await trainer.close()
