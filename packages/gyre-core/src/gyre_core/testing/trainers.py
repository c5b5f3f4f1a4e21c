"""Conformance suite for trainers: subclass `TrainerConformance` in a test file and give the fixture `rig`.

    class TestMine(TrainerConformance):
        @pytest.fixture
        def rig(self, model_folder, batches):
            return TrainerRig(lambda: MyTrainer(MyOptions(learning_rate=1e-2), context), WeightSource(0, model_folder),
                              batches, gradient=oracle_gradient, logprobs=oracle_logprobs, learning_rate=1e-2)

The tests are coroutines: run them with pytest-asyncio in its "auto" mode. torch, safetensors and transformers are
imported only when a test compares with them. What a trainer does not offer is skipped with the reason.
Invariant: the checks are the protocol's (`gyre_core.trainer`): a contribution counts once or not at all, the step's
result does not depend on who computed what, a satellite never steps, a file is whole or refused.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest

from gyre_core.agreement import require_facts
from gyre_core.engine import WeightSource
from gyre_core.errors import CapabilityError, InfrastructureError
from gyre_core.testing.trainer_rig import TrainerRig, at_rest, contribute, gap, summed, weights_of
from gyre_core.trainer import TrainerCapability

__all__ = [
    "TrainerArithmetic",
    "TrainerConformance",
    "TrainerProtocol",
    "TrainerRig",
    "at_rest",
    "contribute",
    "gap",
    "summed",
    "weights_of",
]


class _WithRig:
    @pytest.fixture
    def rig(self) -> TrainerRig:
        """To be given by the subclass."""
        raise NotImplementedError("a subclass of a trainers' suite gives the fixture `rig`: a TrainerRig")


class TrainerArithmetic(_WithRig):
    """The checks that depend on how a trainer splits model and work: values, gradients, steps, checkpoints."""

    async def test_it_starts_with_the_weights_it_was_given(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Version -1 before, the source's after; its facts are those of the folder; published tensors equal what was
        loaded, in the same names."""
        trainer = rig.make()
        assert trainer.version == -1
        await trainer.start(rig.source, core=True)
        assert trainer.version == rig.source.version
        assert trainer.facts is not None
        require_facts(trainer.facts, Path(rig.source.location), replay=False)
        published = await weights_of(trainer, tmp_path)
        assert gap(published, dict(rig.model().named_parameters())) == 0
        await trainer.close()

    async def test_the_gradient_is_the_oracles_sum(self, rig: TrainerRig, tmp_path: Path) -> None:
        """A sum, not a mean, in Hugging Face names, each tied weight once; what was used is in the header."""
        async with rig.started(core=False) as trainer:
            made = await contribute(trainer, rig.batches, "all", tmp_path)
            assert made.batch_ids == tuple(batch.id for batch in rig.batches)
            assert (made.step, made.version, made.id) == (rig.batches[0].step, rig.source.version, "all")
            assert gap(at_rest(made), rig.gradient(rig.model(), rig.batches)) < rig.tolerance
            assert made.stats.trained_tokens > 0
            assert made.stats.tokens == sum(batch.tokens for batch in rig.batches)

    async def test_logprobs_are_those_of_transformers(self, rig: TrainerRig) -> None:
        """Of every loss entry, in order, for a batch that branches."""
        async with rig.started(core=False) as trainer:
            model = rig.model()
            for batch in rig.batches[:2]:
                assert await trainer.logprobs(batch) == pytest.approx(rig.logprobs(model, batch), abs=rig.tolerance)

    async def test_any_split_over_cells_sums_to_the_whole(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Random schedules of contributions over a core and a satellite that joins late."""
        rng = random.Random(0)
        async with rig.started() as core, rig.started(core=False) as satellite:
            whole = at_rest(await contribute(core, rig.batches, "whole", tmp_path))
            for trial in range(rig.trials):
                order = rng.sample(list(rig.batches), len(rig.batches))
                cuts = sorted(rng.sample(range(1, len(order)), 2))
                shares = [order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]]
                who = [rng.choice((core, satellite)) for _ in shares]
                parts = [
                    at_rest(await contribute(trainer, share, f"t{trial}c{i}", tmp_path))
                    for i, (trainer, share) in enumerate(zip(who, shares, strict=True))
                ]
                assert gap(summed(parts), whole) < rig.sum_tolerance

    async def test_the_step_does_not_depend_on_the_order_of_arrival(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Bit for bit."""
        found = []
        for order in ((0, 1, 2), (2, 0, 1)):
            async with rig.started() as core:
                parts = [
                    await contribute(core, rig.batches[i::3], f"c{i}", tmp_path / f"o{order[0]}") for i in range(3)
                ]
                for index in order:
                    await core.add_contribution(parts[index])
                await core.step(3.0)
                found.append(await weights_of(core, tmp_path / f"w{order[0]}"))
        assert gap(found[0], found[1]) == 0

    async def test_steps_are_those_of_adamw(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Divide once, clip, step: three steps, each from the sum of two contributions."""
        torch = pytest.importorskip("torch")
        model = rig.model()
        names = dict(model.named_parameters())
        adam = torch.optim.AdamW(names.values(), lr=rig.learning_rate, betas=rig.betas, eps=rig.eps, weight_decay=0.0)
        async with rig.started() as core:
            for step in range(3):
                total = rig.gradient(model, rig.batches)
                for name, parameter in names.items():
                    parameter.grad = (total[name] / 2.0).to(parameter.dtype)
                norm = torch.nn.utils.clip_grad_norm_(names.values(), rig.max_grad_norm or float("inf"))
                adam.step()
                adam.zero_grad()
                for index in range(2):
                    part = await contribute(core, rig.batches[index::2], f"s{step}c{index}", tmp_path)
                    await core.add_contribution(part)
                result = await core.step(2.0)
                assert result.skipped is None
                assert result.version == core.version == rig.source.version + step + 1
                assert result.grad_norm == pytest.approx(float(norm), rel=1e-3)
            assert gap(await weights_of(core, tmp_path / "w"), names) < 10 * rig.tolerance

    async def test_a_gradient_that_is_not_finite_steps_nothing(self, rig: TrainerRig, tmp_path: Path) -> None:
        """The contribution is named, the weights stay, the version counts the step, the next one works."""
        files = pytest.importorskip("safetensors")
        torch_files = pytest.importorskip("safetensors.torch")
        async with rig.started() as core:
            good = await contribute(core, rig.batches[:1], "fine", tmp_path)
            bad = await contribute(core, rig.batches[1:2], "guilty", tmp_path)
            with files.safe_open(bad.location, framework="pt") as reader:
                metadata = reader.metadata()
            tensors = at_rest(bad)
            next(iter(tensors.values())).view(-1)[0] = float("nan")
            torch_files.save_file(tensors, bad.location, metadata)
            before = await weights_of(core, tmp_path / "before")
            await core.add_contribution(good)
            await core.add_contribution(bad)
            result = await core.step(1.0)
            assert result.skipped is not None
            assert "guilty" in result.skipped
            assert "fine" not in result.skipped
            assert result.version == core.version == rig.source.version + 1
            assert gap(await weights_of(core, tmp_path / "after"), before) == 0
            await core.add_contribution(await contribute(core, rig.batches[:1], "next", tmp_path))
            assert (await core.step(1.0)).skipped is None

    async def test_a_published_version_is_a_model(self, rig: TrainerRig, tmp_path: Path) -> None:
        """`folder`/v<version>, loadable by transformers and by a satellite, which then computes the core's gradient."""
        async with rig.started() as core, rig.started(core=False) as satellite:
            await core.add_contribution(await contribute(core, rig.batches, "all", tmp_path))
            await core.step(1.0)
            source = await core.publish(str(tmp_path / "weights"))
            assert source.version == core.version
            assert Path(source.location) == tmp_path / "weights" / f"v{core.version}"
            assert [path.name for path in (tmp_path / "weights").iterdir()] == [f"v{core.version}"]
            await satellite.load_weights(source)
            assert satellite.version == core.version
            mine = at_rest(await contribute(core, rig.batches, "mine", tmp_path))
            theirs = at_rest(await contribute(satellite, rig.batches, "theirs", tmp_path))
            assert gap(theirs, mine) < rig.sum_tolerance
            assert gap(mine, rig.gradient(rig.model(source), rig.batches)) < rig.tolerance

    async def test_a_restored_core_goes_on_exactly(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Weights, optimizer state and version: the next step is bit for bit the one without the restart."""
        async with rig.started() as core, rig.started() as other:
            for step in range(2):
                await core.add_contribution(await contribute(core, rig.batches[step::2], f"s{step}", tmp_path))
                await core.step(1.0)
            await core.save(str(tmp_path / "checkpoint"))
            await core.save(str(tmp_path / "checkpoint"))
            await other.restore(str(tmp_path / "checkpoint"))
            assert other.version == core.version
            for index, trainer in enumerate((core, other)):
                await trainer.add_contribution(await contribute(trainer, rig.batches, f"n{index}", tmp_path))
                await trainer.step(1.0)
            left = await weights_of(core, tmp_path / "left")
            assert gap(await weights_of(other, tmp_path / "right"), left) == 0

    async def test_offloading_and_back_changes_nothing(self, rig: TrainerRig, tmp_path: Path) -> None:
        """A core that was a rollout cell for a time goes on exactly."""
        async with rig.started() as core, rig.started() as other:
            if TrainerCapability.OFFLOAD not in core.capabilities:
                pytest.skip("this trainer does not offer OFFLOAD")
            for step in range(2):
                for index, trainer in enumerate((core, other)):
                    made = await contribute(trainer, rig.batches[step::2], f"s{step}t{index}", tmp_path)
                    await trainer.add_contribution(made)
                    await trainer.step(1.0)
                await core.offload()
                await core.onload()
            assert core.version == other.version
            left = await weights_of(core, tmp_path / "left")
            assert gap(left, await weights_of(other, tmp_path / "right")) == 0


class TrainerProtocol(_WithRig):
    """The checks of what is counted, refused and undone, whatever the split."""

    async def test_preparing_first_changes_nothing(self, rig: TrainerRig, tmp_path: Path) -> None:
        """`prepare` is answered before `start` and leaves no version behind."""
        trainer = rig.make()
        try:
            await trainer.prepare(rig.source)
            assert trainer.version == -1
            await trainer.start(rig.source, core=True)
            assert trainer.version == rig.source.version
        finally:
            await trainer.close()

    async def test_a_batch_counts_once(self, rig: TrainerRig, tmp_path: Path) -> None:
        """The same contribution again, a batch of it in another, another version's: ValueError, nothing changed."""
        async with rig.started() as core, rig.started(core=False) as satellite:
            first = await contribute(core, rig.batches[:2], "first", tmp_path)
            overlap = await contribute(satellite, rig.batches[1:3], "overlap", tmp_path)
            await core.add_contribution(first)
            for bad in (first, overlap, dataclasses.replace(overlap, version=rig.source.version + 1)):
                with pytest.raises(ValueError):
                    await core.add_contribution(bad)
            norm = (await core.step(1.0)).grad_norm
            late = await contribute(satellite, rig.batches[3:4], "late", tmp_path)
            with pytest.raises(ValueError):
                await core.add_contribution(late)
        async with rig.started() as alone:
            await alone.add_contribution(await contribute(alone, rig.batches[:2], "again", tmp_path))
            assert (await alone.step(1.0)).grad_norm == pytest.approx(norm, rel=1e-6)

    async def test_what_is_discarded_does_not_count(self, rig: TrainerRig, tmp_path: Path) -> None:
        """A lost lease, and a batch that could not be computed, leave no trace in the next contribution."""
        async with rig.started(core=False) as trainer:
            clean = at_rest(await contribute(trainer, rig.batches[:2], "clean", tmp_path))
            await trainer.accumulate(rig.batches[2])
            await trainer.discard_contribution()
            await trainer.accumulate(rig.batches[0])
            broken = dataclasses.replace(rig.batches[3], blob=rig.batches[3].blob[:-7])
            with pytest.raises((ValueError, InfrastructureError)):
                await trainer.accumulate(broken)
            await trainer.accumulate(rig.batches[1])
            again = await trainer.export_contribution("again", rig.batches[0].step, str(tmp_path))
            assert again.batch_ids == (rig.batches[0].id, rig.batches[1].id)
            assert gap(at_rest(again), clean) < rig.sum_tolerance
            with pytest.raises(ValueError):
                await trainer.export_contribution("empty", rig.batches[0].step, str(tmp_path))

    async def test_a_contribution_file_is_whole_or_refused(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Cut short or gone: InfrastructureError; the core steps on without it. No partial file lies about."""
        async with rig.started() as core:
            good = await contribute(core, rig.batches[:1], "good", tmp_path)
            cut = await contribute(core, rig.batches[1:2], "cut", tmp_path)
            assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(
                Path(made.location).name for made in (good, cut)
            )
            content = Path(cut.location).read_bytes()
            Path(cut.location).write_bytes(content[: len(content) // 2])
            with pytest.raises(InfrastructureError):
                await core.add_contribution(cut)
            Path(cut.location).unlink()
            with pytest.raises(InfrastructureError):
                await core.add_contribution(cut)
            await core.add_contribution(good)
            assert (await core.step(1.0)).skipped is None

    async def test_taking_weights_drops_the_open_contribution(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Gradients of two versions never meet in one sum."""
        async with rig.started(core=False) as satellite:
            await satellite.accumulate(rig.batches[0])
            await satellite.load_weights(dataclasses.replace(rig.source, version=rig.source.version + 5))
            made = await contribute(satellite, rig.batches[1:2], "one", tmp_path)
            assert made.batch_ids == (rig.batches[1].id,)
            assert made.version == rig.source.version + 5
            with pytest.raises(InfrastructureError):
                await satellite.load_weights(WeightSource(9, rig.source.location + "-missing"))
            assert satellite.version == rig.source.version + 5

    async def test_a_checkpoint_that_is_cut_short_is_refused(self, rig: TrainerRig, tmp_path: Path) -> None:
        """Whichever file: InfrastructureError, and the trainer is as it was."""
        async with rig.started() as core:
            await core.save(str(tmp_path / "checkpoint"))
            before = await weights_of(core, tmp_path / "before")
            files = [
                path for path in (tmp_path / "checkpoint").rglob("*") if path.is_file() and path.stat().st_size > 1
            ]
            for path in files:
                content = path.read_bytes()
                path.write_bytes(content[: len(content) // 2])
                with pytest.raises(InfrastructureError):
                    await core.restore(str(tmp_path / "checkpoint"))
                path.write_bytes(content)
            with pytest.raises(InfrastructureError):
                await core.restore(str(tmp_path / "nothing"))
            assert gap(await weights_of(core, tmp_path / "after"), before) == 0
            await core.restore(str(tmp_path / "checkpoint"))

    async def test_a_satellite_never_steps(self, rig: TrainerRig, tmp_path: Path) -> None:
        """What only the core may do is refused by name."""
        async with rig.started(core=False) as satellite:
            made = await contribute(satellite, rig.batches[:1], "c", tmp_path)
            for action in (
                satellite.add_contribution(made),
                satellite.step(1.0),
                satellite.publish(str(tmp_path)),
                satellite.save(str(tmp_path / "x")),
            ):
                with pytest.raises(CapabilityError):
                    await action

    async def test_neither_an_empty_step_nor_a_bad_divisor_moves_the_weights(
        self, rig: TrainerRig, tmp_path: Path
    ) -> None:
        """A step of groups with equal scores has no gradient: skipped, and counted as a version."""
        async with rig.started() as core:
            before = await weights_of(core, tmp_path / "before")
            empty = await core.step(1.0)
            assert empty.skipped is not None
            assert empty.version == core.version == rig.source.version + 1
            assert gap(await weights_of(core, tmp_path / "after"), before) == 0
            await core.add_contribution(await contribute(core, rig.batches[:1], "c", tmp_path))
            for divisor in (0.0, -1.0, float("nan")):
                with pytest.raises(ValueError):
                    await core.step(divisor)
            assert (await core.step(1.0)).version == rig.source.version + 2

    async def test_the_event_loop_answers_while_it_computes(self, rig: TrainerRig) -> None:
        """A cell must answer its run during a long batch."""
        async with rig.started(core=False) as trainer:
            task = asyncio.create_task(trainer.accumulate(rig.batches[0]))
            turns = 0
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns > 3
            assert (await task).seconds > 0

    async def test_logprobs_are_finite_and_repeatable(self, rig: TrainerRig) -> None:
        """One value or more for each trained token, never above 0, and computing them leaves no gradient."""
        async with rig.started(core=False) as trainer:
            first = await trainer.logprobs(rig.batches[0])
            assert len(first) > 0
            assert all(value <= 1e-5 for value in first)
            assert await trainer.logprobs(rig.batches[0]) == first
            with pytest.raises(ValueError):
                await trainer.export_contribution("none", rig.batches[0].step, ".")


class TrainerConformance(TrainerArithmetic, TrainerProtocol):
    """All checks of trainers."""
