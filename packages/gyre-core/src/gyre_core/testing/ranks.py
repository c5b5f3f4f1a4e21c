"""What a trainer with rank processes (`gyre_core.ranks`) must do beyond the trainers' suite: equal another backend on
the same data, take its contributions, go on in another split, survive a rank's death at any moment, name who is guilty.

Invariant: every check works through the trainer protocol and through `pids`; which backend it is does not matter. The
reference is a trainer of one process that computes the same objective.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gyre_core.agreement import require_facts
from gyre_core.engine import WeightSource
from gyre_core.errors import InfrastructureError
from gyre_core.ranks.files import OPTIMIZER
from gyre_core.testing.trainer_rig import Gradient, Logprobs, TrainerRig, at_rest, contribute, gap, weights_of
from gyre_core.trainer import Contribution, MicroBatch, Trainer


@dataclass(frozen=True, slots=True)
class Poison:
    """Weights that make the gradient of one execution of a micro-batch not finite, and that of no other."""

    healthy: WeightSource
    poisoned: WeightSource
    batch: MicroBatch
    execution: str


async def killed_during(trainer: Any, command: Coroutine[Any, Any, Any]) -> str:
    """Rank 1 stands still, the command comes, rank 1 dies: what the command says of it."""
    pid = trainer.pids[1]
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.ensure_future(command)
    await asyncio.sleep(0.3)
    assert not task.done(), "the command did not need rank 1, so nothing is proven"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="rank 1 of 2") as caught:
        await task
    return str(caught.value)


async def step_and_save(core: Any, made: Contribution, folder: Path) -> dict[str, Any]:
    """The float32 masters after a step from one contribution."""
    files = pytest.importorskip("safetensors.torch")
    await core.add_contribution(made)
    assert (await core.step(1.0)).skipped is None
    await core.save(str(folder))
    found = files.load_file(folder / OPTIMIZER)
    return {name: tensor.clone() for name, tensor in found.items() if name.startswith("master/")}


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


async def check_it_is_transformers(
    core: Any, folder: Path, work: Sequence[MicroBatch], gradient: Gradient, logprobs: Logprobs, out: Path
) -> None:
    """A core, not started, against the model of `folder` in transformers: facts, values, gradient (`gradient` in the
    names that files have), and again after a step, from what it published."""
    transformers = pytest.importorskip("transformers")

    def model(location: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(location).eval()

    before = model(str(folder))
    await core.start(WeightSource(0, str(folder)), core=True)
    require_facts(core.facts, folder, replay=False)
    for batch in work[:2]:
        assert await core.logprobs(batch) == pytest.approx(logprobs(before, batch), abs=1e-4)
    made = await contribute(core, work, "all", out)
    assert gap(at_rest(made), gradient(before, work)) < 1e-4
    await core.add_contribution(made)
    assert (await core.step(1.0)).skipped is None
    after = model((await core.publish(str(out / "weights"))).location)
    assert await core.logprobs(work[1]) == pytest.approx(logprobs(after, work[1]), abs=1e-4)
    assert await core.logprobs(work[1]) != pytest.approx(logprobs(before, work[1]), abs=1e-4)


class AgainstReference:
    """What depends on the split once more, beside another backend. Fixtures to be given: `rig` (a `TrainerRig` of the
    split), `slow` (() -> a trainer of that split, not started, whose steps are small) and `reference` (() -> one of one
    process with the same steps)."""

    async def test_five_steps_give_the_references_parameters(
        self, rig: TrainerRig, slow: Callable[[], Any], reference: Any, batches: Any, tmp_path: Path
    ) -> None:
        """With a satellite on the reference's backend computing half of every step."""
        core, satellite, alone = slow(), reference(), reference()
        try:
            await core.start(rig.source, core=True)
            await satellite.start(rig.source, core=False)
            await alone.start(rig.source, core=True)
            await train(core, satellite, batches, range(1, 6), tmp_path / "mixed")
            await train(alone, alone, batches, range(1, 6), tmp_path / "alone")
            left = await weights_of(core, tmp_path / "left")
            assert gap(left, await weights_of(alone, tmp_path / "right")) < 1e-4
        finally:
            for trainer in (core, satellite, alone):
                await trainer.close()


class RankTrainerChecks:
    """Fixtures to be given: `ranks` (options -> a trainer, not started), `reference` (() -> a trainer of one process),
    `folder_of` (kind, seed -> a tiny model), `batches` (seed, count -> micro-batches of step 1), `poison`."""

    two: ClassVar[Mapping[str, Any]]
    """Options of a trainer with two ranks."""
    elsewhere: ClassVar[tuple[Mapping[str, Any], ...]]
    """Other splits that a checkpoint of `two` goes on in."""

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

    async def test_bfloat16_has_float32_gradients_and_masters(
        self, ranks: Any, reference: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """A step that is less than a unit in the last place of a weight is kept, also by a checkpoint."""
        source, work = WeightSource(0, str(folder_of("qwen3"))), batches(count=4)
        core, exact = ranks(**self.two, dtype="bfloat16"), reference()
        try:
            await exact.start(source, core=True)
            await core.start(source, core=True)
            wanted = at_rest(await contribute(exact, work, "wide", tmp_path))
            made = await contribute(core, work, "narrow", tmp_path)
            assert {str(tensor.dtype) for tensor in at_rest(made).values()} == {"torch.float32"}
            assert gap(at_rest(made), wanted) < 0.1
            masters = [await step_and_save(core, made, tmp_path / "first")]
            assert {str(t.dtype) for t in (await weights_of(core, tmp_path / "w")).values()} == {"torch.bfloat16"}
            for number in range(2):
                await core.restore(str(tmp_path / "first"))
                again = await contribute(core, work, f"again{number}", tmp_path)
                masters.append(await step_and_save(core, again, tmp_path / f"again{number}"))
            assert gap(masters[1], masters[2]) == 0
            moved = max(float((masters[1][name] - tensor).abs().max()) for name, tensor in masters[0].items())
            assert 0 < moved < 2**-8
        finally:
            await core.close()
            await exact.close()

    async def test_a_rank_killed_while_computing_gives_its_lease_back(
        self, ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """One attributed error; after it the satellite computes as if nothing had been."""
        satellite, work = ranks(**self.two), batches(count=4)
        try:
            await satellite.start(WeightSource(0, str(folder_of("qwen3"))), core=False)
            good = at_rest(await contribute(satellite, work[:2], "good", tmp_path))
            await satellite.accumulate(work[2])
            assert "accumulate" in await killed_during(satellite, satellite.accumulate(work[3]))
            await satellite.discard_contribution()
            again = at_rest(await contribute(satellite, work[:2], "again", tmp_path))
            assert gap(again, good) == 0
        finally:
            await satellite.close()

    async def test_a_rank_killed_while_fetching_leaves_the_version_it_had(
        self, ranks: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """The next lease fetches again, and its gradient is that of the new weights."""
        old, new = (WeightSource(seed, str(folder_of("qwen3", seed))) for seed in range(2))
        satellite, work = ranks(**self.two), batches(count=4)
        try:
            await satellite.start(new, core=False)
            wanted = at_rest(await contribute(satellite, work[:2], "wanted", tmp_path))
            await satellite.load_weights(old)
            assert re.match("(compare|load) in rank", await killed_during(satellite, satellite.load_weights(new)))
            assert satellite.version == old.version
            await satellite.load_weights(new)
            assert satellite.version == new.version
            assert gap(at_rest(await contribute(satellite, work[:2], "again", tmp_path)), wanted) == 0
        finally:
            await satellite.close()

    async def test_a_rank_killed_while_handing_over_leaves_nothing_half(
        self, ranks: Any, reference: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """No file, whole or partial; the core steps on with what others computed of it."""
        source, work = WeightSource(0, str(folder_of("qwen3"))), batches(count=4)
        satellite, core = ranks(**self.two), reference()
        try:
            await satellite.start(source, core=False)
            await core.start(source, core=True)
            await satellite.accumulate(work[0])
            parts = tmp_path / "parts"
            assert "export" in await killed_during(satellite, satellite.export_contribution("lost", 1, str(parts)))
            assert list(parts.iterdir()) == []
            await satellite.discard_contribution()
            await core.add_contribution(await contribute(core, work[:1], "again", parts))
            await core.add_contribution(await contribute(satellite, work[1:2], "late", parts))
            assert (await core.step(1.0)).skipped is None
        finally:
            await satellite.close()
            await core.close()

    async def test_the_guilty_execution_is_named(
        self, ranks: Any, poison: Poison, batches: Any, tmp_path: Path
    ) -> None:
        """Not the innocent ones of its micro-batch, though attention carries NaN to all of them."""
        core, satellite = ranks(**self.two), ranks(**self.two)
        try:
            await core.start(poison.healthy, core=True)
            await satellite.start(poison.poisoned, core=False)
            before = await weights_of(core, tmp_path / "before")
            others = [batch for batch in batches(count=8) if batch.id != poison.batch.id]
            await core.add_contribution(await contribute(core, others, "fine", tmp_path))
            await core.add_contribution(await contribute(satellite, [poison.batch], "guilty", tmp_path))
            result = await core.step(1.0)
            assert result.skipped is not None
            assert (
                f"contribution guilty has a gradient that is not finite: micro-batch {poison.batch.id} "
                in result.skipped
            )
            assert f"(executions {poison.execution})" in result.skipped
            assert gap(await weights_of(core, tmp_path / "after"), before) == 0
            await core.add_contribution(await contribute(core, others, "next", tmp_path))
            assert (await core.step(1.0)).skipped is None
        finally:
            await core.close()
            await satellite.close()

    async def test_another_models_gradient_is_refused(
        self, ranks: Any, reference: Any, folder_of: Any, batches: Any, tmp_path: Path
    ) -> None:
        """By name of the tensor; the step goes on without it."""
        core, stranger = ranks(), reference()
        try:
            await core.start(WeightSource(0, str(folder_of("qwen3"))), core=True)
            await stranger.start(WeightSource(0, str(folder_of("qwen2"))), core=False)
            with pytest.raises(InfrastructureError, match=r"model\.layers\.0"):
                await core.add_contribution(await contribute(stranger, batches(count=2), "strange", tmp_path))
            await core.add_contribution(await contribute(core, batches(count=2), "own", tmp_path))
            assert (await core.step(1.0)).skipped is None
        finally:
            await core.close()
            await stranger.close()

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
