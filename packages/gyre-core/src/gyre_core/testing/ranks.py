"""What a trainer with rank processes (`gyre_core.ranks`) must do beyond the trainers' suite: equal another backend on
the same data, take its contributions, go on in another split, survive a rank's death.

Invariant: every check works through the trainer protocol and through `pids`; which backend it is does not matter. The
reference is a trainer of one process that computes the same objective.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gyre_core.engine import WeightSource
from gyre_core.errors import InfrastructureError
from gyre_core.ranks import RankGroup
from gyre_core.registration import ComponentContext
from gyre_core.testing.trainers import at_rest, contribute, gap, weights_of
from gyre_core.trainer import Trainer


class RankPool:
    """Ranks that outlive their trainer: importing their library takes longer than any test."""

    def __init__(self, trainer: type[Any]) -> None:
        self._idle: dict[str, list[RankGroup]] = {}
        self._pooled = _pooled(trainer, self._idle)

    def trainer(self, options: object, context: ComponentContext) -> Any:
        """A trainer that takes its ranks from the pool and gives them back."""
        return self._pooled(options, context)

    async def close(self) -> None:
        """End all ranks."""
        for groups in self._idle.values():
            for group in groups:
                await group.close()


def _pooled(trainer: type[Any], idle: dict[str, list[RankGroup]]) -> type[Any]:
    class Pooled(trainer):  # type: ignore[misc]
        _group: RankGroup | None

        async def _ranks(self) -> None:
            living = [group for group in idle.pop(repr(self.options), []) if group.alive]
            if self._group is None and living:
                self._group = living.pop()
            idle[repr(self.options)] = living
            await super()._ranks()

        async def close(self) -> None:
            if self._group is not None and self._group.alive:
                idle.setdefault(repr(self.options), []).append(self._group)
                self._group = None
            await super().close()

    return Pooled


async def train(core: Trainer, other: Trainer, batches: Any, steps: range, folder: Path) -> None:
    """Steps on fresh data, half of each computed by `other`, which takes the core's weights first."""
    for step in steps:
        work = [dataclasses.replace(b, id=f"{step}{b.id}", step=step) for b in batches(seed=step, count=8)]
        mine = await contribute(core, work[::2], f"s{step}core", folder)
        if other is not core:
            await other.load_weights(await core.publish(str(folder / "weights")))
        theirs = await contribute(other, work[1::2], f"s{step}other", folder)
        for made in (theirs, mine):
            await core.add_contribution(made)
        assert (await core.step(2.0)).skipped is None


class RankTrainerChecks:
    """Fixtures to be given: `ranks` (options -> a trainer, not started), `reference` (() -> a trainer of one process),
    `split` (one dict of options after another), `folder_of` (kind, seed -> a tiny model), `batches` (seed, count ->
    micro-batches of step 1)."""

    two: ClassVar[Mapping[str, Any]]
    """Options of a trainer with two ranks."""
    elsewhere: ClassVar[tuple[Mapping[str, Any], ...]]
    """Other splits that a checkpoint of `two` goes on in."""

    async def test_five_steps_give_the_references_parameters(
        self,
        split: Mapping[str, Any],
        ranks: Any,
        reference: Any,
        folder_of: Callable[..., Path],
        batches: Any,
        tmp_path: Path,
    ) -> None:
        """With a satellite on the reference's backend computing half of every step."""
        source = WeightSource(0, str(folder_of("qwen3")))
        core, satellite, alone = ranks(**split), reference(), reference()
        try:
            await core.start(source, core=True)
            await satellite.start(source, core=False)
            await alone.start(source, core=True)
            await train(core, satellite, batches, range(1, 6), tmp_path / "mixed")
            await train(alone, alone, batches, range(1, 6), tmp_path / "alone")
            left = await weights_of(core, tmp_path / "left")
            assert gap(left, await weights_of(alone, tmp_path / "right")) < 1e-4
        finally:
            for trainer in (core, satellite, alone):
                await trainer.close()

    async def test_a_checkpoint_goes_on_in_another_split(
        self, ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """Two more steps give the same weights, whatever split they are taken in."""
        source = WeightSource(0, str(folder_of("qwen3")))
        first = ranks(**self.two)
        try:
            await first.start(source, core=True)
            await train(first, first, batches, range(1, 4), tmp_path / "first")
            await first.save(str(tmp_path / "checkpoint"))
            await train(first, first, batches, range(4, 6), tmp_path / "on")
            wanted = await weights_of(first, tmp_path / "wanted")
        finally:
            await first.close()
        for number, told in enumerate(self.elsewhere):
            other = ranks(**told)
            try:
                await other.start(source, core=True)
                await other.restore(str(tmp_path / "checkpoint"))
                assert other.version == 3
                await train(other, other, batches, range(4, 6), tmp_path / str(number))
                assert gap(await weights_of(other, tmp_path / f"w{number}"), wanted) < 1e-4
            finally:
                await other.close()

    async def test_logprobs_are_the_references(self, ranks: Any, reference: Any, folder_of: Any, batches: Any) -> None:
        """Of another family, split over two ranks."""
        source, batch = WeightSource(0, str(folder_of("llama3"))), batches(count=4)[1]
        mine, theirs = ranks(**self.two), reference()
        try:
            await mine.start(source, core=False)
            await theirs.start(source, core=False)
            assert await mine.logprobs(batch) == pytest.approx(await theirs.logprobs(batch), abs=1e-3)
        finally:
            await mine.close()
            await theirs.close()

    async def test_the_model_is_taken_down_and_built_again(
        self, ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """Offloading by taking everything down changes no bit of what comes after."""
        core = ranks(**self.two, offload="rebuild")
        try:
            await core.start(WeightSource(0, str(folder_of("qwen3"))), core=True)
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
        self, ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """One attributed error; after it the satellite computes as if nothing had been."""
        satellite, work = ranks(**self.two), batches(count=4)
        try:
            await satellite.start(WeightSource(0, str(folder_of("qwen3"))), core=False)
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

    async def test_another_models_weights_are_refused(self, ranks: Any, folder_of: Any) -> None:
        """By name of the tensor, and the version stays."""
        satellite = ranks()
        try:
            await satellite.start(WeightSource(0, str(folder_of("qwen3"))), core=False)
            with pytest.raises(InfrastructureError, match=r"model\.layers\.0"):
                await satellite.load_weights(WeightSource(1, str(folder_of("qwen2"))))
            assert satellite.version == 0
        finally:
            await satellite.close()
