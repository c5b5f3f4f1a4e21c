"""What a trainer publishes, in each way that it knows: the same weights for whoever takes them, at once or later.

Subclass `TrainerPublishing` and give the fixture `rig` with `kinds` and, to have an engine take the versions, `engine`.
Invariant: what a version must be is read from a checkpoint of the same core, which is published in no way at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gyre_core.engine import GenerateRequest, SamplingParams, WeightSource
from gyre_core.errors import InfrastructureError
from gyre_core.testing.trainer_rig import TrainerRig, at_rest, contribute, gap, step_once
from gyre_core.trainer import Trainer


async def said(engine: Any, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Eight greedy tokens and their log-probabilities."""
    request = GenerateRequest("r", "s", list(prompt), SamplingParams(max_tokens=8, temperature=0.0))
    chunks = [chunk async for chunk in engine.generate(request)]
    return [t for c in chunks for t in c.token_ids], [p for c in chunks for p in c.logprobs]


class TrainerPublishing:
    """The checks of each kind that the rig names."""

    @pytest.fixture
    def rig(self) -> TrainerRig:
        """To be given by the subclass."""
        raise NotImplementedError("a subclass of a trainers' suite gives the fixture `rig`: a TrainerRig")

    @pytest.fixture(params=["disk", "shm", "delta"])
    def kind(self, request: pytest.FixtureRequest, rig: TrainerRig) -> str:
        """One of the rig's."""
        if request.param not in rig.kinds:
            pytest.skip(f"this trainer does not publish by {request.param}")
        return str(request.param)

    async def test_what_is_taken_is_what_the_core_has(self, kind: str, rig: TrainerRig, tmp_path: Path) -> None:
        """By a satellite and an engine that follow every version, and by a satellite that comes when the core is gone:
        what was in memory alone is on disk then."""
        weights, checkpoint = str(tmp_path / "weights"), tmp_path / "checkpoint"
        core: Any = rig.kinds[kind]()
        satellite = rig.make()
        engine = rig.engine() if rig.engine is not None else None
        try:
            await core.start(rig.source, core=True)
            await satellite.start(rig.source, core=False)
            if engine is not None:
                await engine.start(rig.source)
            kinds = set()
            for step in range(3):
                await step_once(core, rig.batches, f"s{step}", tmp_path)
                source = await core.publish(weights)
                kinds.add(source.kind)
                await satellite.load_weights(source)
                if engine is not None:
                    await engine.update_weights(source)
            assert source.version == core.version
            assert kind in kinds
            shards = Path(source.location).glob("*.safetensors")
            assert core.published_bytes == sum(shard.stat().st_size for shard in shards)
            wanted = at_rest(await contribute(core, rig.batches, "core", tmp_path))
            assert gap(at_rest(await contribute(satellite, rig.batches, "sat", tmp_path)), wanted) < rig.sum_tolerance
            await core.save(str(checkpoint))
            if engine is not None and rig.engine is not None:
                await _says_the_same(engine, rig.engine(), WeightSource(core.version, str(checkpoint)))
        finally:
            for each in (core, satellite, engine):
                if each is not None:
                    await each.close()
        async with rig.started(core=False) as late:
            await late.load_weights(WeightSource(source.version, f"{weights}/v{source.version}"))
            assert gap(at_rest(await contribute(late, rig.batches, "late", tmp_path)), wanted) < rig.sum_tolerance

    async def test_a_damaged_version_is_refused(self, kind: str, rig: TrainerRig, tmp_path: Path) -> None:
        """One flipped bit of what was published: InfrastructureError, and the next whole version is taken."""
        core: Trainer = rig.kinds[kind]()
        async with rig.started(core=False) as satellite:
            try:
                await core.start(rig.source, core=True)
                for step in range(2):
                    await step_once(core, rig.batches, f"s{step}", tmp_path)
                    source = await core.publish(str(tmp_path / "weights"))
                (shard, *_) = sorted(Path(source.location).glob("*.safetensors"))
                content = shard.read_bytes()
                shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
                with pytest.raises(InfrastructureError, match="digest"):
                    await satellite.load_weights(source)
                assert satellite.version in (rig.source.version, -1)
                shard.write_bytes(content)
                with pytest.raises(InfrastructureError, match=f"version {source.version}"):
                    await satellite.load_weights(dataclasses.replace(source, version=source.version + 1))
                await satellite.load_weights(source)
                assert satellite.version == source.version
            finally:
                await core.close()


async def _says_the_same(engine: Any, other: Any, source: WeightSource) -> None:
    """An engine that took published versions, and one that starts with the same weights at rest."""
    try:
        await other.start(source)
        mine, theirs = await said(engine, range(1, 6)), await said(other, range(1, 6))
        assert engine.version == source.version
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], abs=1e-5)
    finally:
        await other.close()
