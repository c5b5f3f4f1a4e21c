"""Versions of every kind reach engine and satellite; gradients reach the core in memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import CapabilityError, ComponentContext, InfrastructureError, WeightSource
from gyre_local.model.architecture import read_architecture
from gyre_local.model.weights import fuse, read_tensors, rope_tables
from gyre_local.options import LocalTrainerOptions
from gyre_local.serve import engine as engine_module
from gyre_local.train.trainer import LocalTrainer

KINDS = ["disk", "shm", "delta"]
PROMPT = list(range(5, 40))


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for /dev/shm, so that a test that fails leaves nothing there."""
    base = tmp_path / "shm"
    base.mkdir()
    monkeypatch.setattr("gyre_weights.shm.shm_root.__kwdefaults__", {"base": base})
    monkeypatch.setattr("gyre_weights.shm.sweep.__kwdefaults__", {"base": base, "abandoned_s": 3600.0})
    return base


@pytest.fixture
async def trainers(context: ComponentContext, folder_of: Callable[..., Path]) -> Any:
    made: list[LocalTrainer] = []

    async def make(*, core: bool = True, kind: str = "qwen3", **options: Any) -> LocalTrainer:
        trainer = LocalTrainer(LocalTrainerOptions(**({"learning_rate": 1e-2} | options)), context)
        await trainer.start(WeightSource(0, str(folder_of(kind))), core=core)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        with contextlib.suppress(RuntimeError):  # closed by the test
            await trainer.close()


async def one_step(core: LocalTrainer, batches: Any, folder: Path, seed: int = 0) -> None:
    for batch in batches(seed=seed, count=2):
        await core.accumulate(batch)
    await core.add_contribution(await core.export_contribution(f"c{seed}-{core.version}", 1, str(folder)))
    await core.step(2.0)


@pytest.mark.parametrize("model", ["qwen3", "qwen2", "llama"])
def test_the_windows_are_the_fused_weights(model: str, folder_of: Callable[..., Path]) -> None:
    """Writing another model's tensors into the windows gives that model's fused weights."""
    folder, other = folder_of(model), folder_of(model, 1)
    arch, device = read_architecture(folder), torch.device("cpu")
    rope = rope_tables(arch, 64, torch.float32, device)
    made = fuse(read_tensors(folder), arch, torch.float32, device, rope, "")
    expected = fuse(read_tensors(other), arch, torch.float32, device, rope, "")
    tensors = read_tensors(other)
    named = made.named()
    assert set(tensors) - set(named) <= {"lm_head.weight"}
    for name, windows in named.items():
        for window in windows:
            assert window.is_contiguous()
            window.copy_(tensors[name].view_as(window))
    assert torch.equal(made.embed, expected.embed)
    assert torch.equal(made.head, expected.head)
    for mine, theirs in zip(made.layers, expected.layers, strict=True):
        for field in dataclasses.fields(mine):
            left, right = getattr(mine, field.name), getattr(theirs, field.name)
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right), field.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engine_and_satellite_follow_the_trainer(
    kind: str, dtype: str, trainers: Any, engines: Any, ask: Any, batches: Any, tmp_path: Path
) -> None:
    core = await trainers(publish=kind, dtype=dtype, keep_versions=9)
    satellite, late = await trainers(core=False, dtype=dtype), await trainers(core=False, dtype=dtype)
    engine, fresh = await engines(), await engines()
    places = {name: p.data_ptr() for name, p in satellite._replica.parameters.items()}
    kinds = []
    for step in range(3):
        await one_step(core, batches, tmp_path / "c", step)
        source = await core.publish(str(tmp_path / "weights"))
        kinds.append(source.kind)
        assert (source.version, core.version) == (step + 1, step + 1)
        await engine.update_weights(source)
        await satellite.load_weights(source)
        for name, parameter in core._replica.parameters.items():
            assert torch.equal(satellite._replica.parameters[name], parameter), name
        assert places == {name: p.data_ptr() for name, p in satellite._replica.parameters.items()}
    assert kinds == {"disk": ["disk"] * 3, "shm": ["shm"] * 3, "delta": ["disk", "delta", "disk"]}[kind], (
        "AdamW at this rate changes every element, so a delta is not worth it twice"
    )
    await fresh.update_weights(source)  # from version 0: no delta fits
    await late.load_weights(source)
    for name, parameter in core._replica.parameters.items():
        assert torch.equal(late._replica.parameters[name], parameter), name
    same_weights(engine, fresh)
    followed, loaded = await ask(engine, PROMPT, 12), await ask(fresh, PROMPT, 12)
    assert followed.ids == loaded.ids
    assert followed.logprobs == pytest.approx(loaded.logprobs, abs=1e-5)
    assert followed.versions == [3] * 12
    await engine.sleep()
    await engine.wake(source)
    woken = await ask(engine, PROMPT, 12, name="b")
    same_weights(engine, fresh)
    assert woken.ids == loaded.ids


def same_weights(left: Any, right: Any) -> None:
    """Bit for bit."""
    mine, theirs = (engine._worker._core.weights.named() for engine in (left, right))
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert all(torch.equal(a, b) for a, b in zip(mine[name], theirs[name], strict=True)), name


async def test_the_engine_patches_in_place_and_only_then(
    trainers: Any, engines: Any, batches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, engine = await trainers(publish="delta"), await engines()
    first = await core.publish(str(tmp_path / "w"))
    await engine.update_weights(dataclasses.replace(first))
    await one_step(core, batches, tmp_path / "c")
    second = await core.publish(str(tmp_path / "w"))
    before = engine._worker._core.weights
    monkeypatch.setattr(engine_module, "fuse", lambda *args: pytest.fail("loaded the whole version"))
    await engine.update_weights(second)
    assert engine._worker._core.weights is before
    monkeypatch.undo()
    whole = fuse(read_tensors(tmp_path / "w" / "v0"), before.arch, torch.float32, before.embed.device, before.rope, "")
    assert not torch.equal(before.layers[0].qkv, whole.layers[0].qkv)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_damaged_version_is_refused_by_all(
    kind: str, trainers: Any, engines: Any, ask: Any, batches: Any, tmp_path: Path
) -> None:
    """An engine goes on with the version it has; a satellite, which checks while it copies, has none then."""
    core = await trainers(publish=kind)
    satellite, engine = await trainers(core=False), await engines()
    good = await core.publish(str(tmp_path / "w"))
    await engine.update_weights(good)
    await satellite.load_weights(good)
    await one_step(core, batches, tmp_path / "c")
    bad = await core.publish(str(tmp_path / "w"))
    (file,) = Path(bad.location).glob("*.safetensors")
    with file.open("r+b") as handle:
        handle.seek(-5, os.SEEK_END)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    before = await ask(engine, PROMPT, 5)
    for take in (engine.update_weights, satellite.load_weights):
        with pytest.raises(InfrastructureError, match="with digest"):
            await take(bad)
        with pytest.raises(InfrastructureError, match="version 1 there"):
            await take(WeightSource(7, bad.location, bad.kind))
        with pytest.raises(CapabilityError, match="pigeon"):
            await take(WeightSource(1, bad.location, "pigeon"))
    after = await ask(engine, PROMPT, 5, name="b")
    assert (after.ids, after.versions) == (before.ids, [0] * 5)
    assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
    assert (engine.version, satellite.version) == (0, -1)
    with pytest.raises(InfrastructureError, match="damaged"):
        await satellite.accumulate(batches()[0])
    again = await core.publish(str(tmp_path / "w"))
    await engine.update_weights(again)
    await satellite.load_weights(again)
    assert (engine.version, satellite.version) == (1, 1)


async def test_shared_memory_settles_on_disk_when_the_core_closes(trainers: Any, memory: Path, tmp_path: Path) -> None:
    core = await trainers(publish="shm")
    source = await core.publish(str(tmp_path / "w"))
    assert source.location.startswith(str(memory))
    assert (tmp_path / "w" / "v0").is_symlink()
    await core.close()
    assert not list(memory.iterdir())
    assert (tmp_path / "w" / "v0" / "model.safetensors").is_file()
    assert (tmp_path / "w" / "v0" / "config.json").is_file()


async def test_a_core_that_comes_again_goes_on_publishing(
    trainers: Any, engines: Any, batches: Any, tmp_path: Path
) -> None:
    """After a restart the first delta-version is whole, and engines that hold older ones follow."""
    core, engine = await trainers(publish="delta"), await engines()
    for step in range(2):
        await one_step(core, batches, tmp_path / "c", step)
        await engine.update_weights(await core.publish(str(tmp_path / "w")))
    await core.save(str(tmp_path / "checkpoint"))
    await core.close()
    core = await trainers(publish="delta")
    await core.restore(str(tmp_path / "checkpoint"))
    assert (await core.publish(str(tmp_path / "w"))).kind == "disk"
    await one_step(core, batches, tmp_path / "c", 2)
    source = await core.publish(str(tmp_path / "w"))
    assert source.kind == "delta"
    await engine.update_weights(source)
    assert engine.version == 3


# Gradients in memory


async def test_gradients_in_memory_are_the_ones_at_rest(trainers: Any, batches: Any, tmp_path: Path) -> None:
    work = batches(count=3)
    results = []
    for way in ("disk", "memory"):
        core, satellite = await trainers(handover=way), await trainers(core=False, handover=way)
        for trainer, part in ((core, work[:1]), (satellite, work[1:])):
            for batch in part:
                await trainer.accumulate(batch)
        made = [await t.export_contribution(f"c{i}", 1, str(tmp_path / way)) for i, t in enumerate((core, satellite))]
        for contribution in made:
            assert Path(contribution.location).exists() == (way == "disk")
            await core.add_contribution(contribution)
        await core.step(2.0)
        results.append({name: p.detach().clone() for name, p in core._replica.parameters.items()})
        await core.close()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not (tmp_path / "memory").exists()


async def test_a_contribution_in_memory_counts_once_and_ends_with_its_step(
    trainers: Any, batches: Any, tmp_path: Path
) -> None:
    core, satellite = await trainers(handover="memory"), await trainers(core=False, handover="memory")
    work = batches(count=2)
    await satellite.accumulate(work[0])
    made = await satellite.export_contribution("c", 1, str(tmp_path))
    other = dataclasses.replace(made, batch_ids=("another",))
    with pytest.raises(ValueError, match="batch_ids"):
        await core.add_contribution(other)
    with pytest.raises(InfrastructureError, match="none of that name"):
        await core.add_contribution(made)
    await satellite.accumulate(work[0])
    again = await satellite.export_contribution("d", 1, str(tmp_path))
    await core.add_contribution(again)
    with pytest.raises(InfrastructureError, match="none of that name"):
        await core.add_contribution(again)
    await satellite.accumulate(work[1])
    orphan = await satellite.export_contribution("orphan", 1, str(tmp_path))
    await core.step(1.0)
    assert core._memory.receiver.held == []
    with pytest.raises(ValueError, match="version 0"):
        await core.add_contribution(orphan)
    await satellite.accumulate(work[1])
    with pytest.raises(InfrastructureError, match="policy version 0"):
        await satellite.export_contribution("late", 1, str(tmp_path))
    await satellite.discard_contribution()


async def test_without_a_core_a_handover_fails_and_the_next_one_works(
    trainers: Any, batches: Any, tmp_path: Path
) -> None:
    satellite = await trainers(core=False, handover="memory")
    await satellite.accumulate(batches(count=2)[0])
    with pytest.raises(InfrastructureError, match="may be restarting"):
        await satellite.export_contribution("c", 1, str(tmp_path))
    core = await trainers(handover="memory")
    await core.add_contribution(await satellite.export_contribution("c", 1, str(tmp_path)))
    await core.close()
    await satellite.accumulate(batches(count=2)[0])
    with pytest.raises(InfrastructureError):
        await satellite.export_contribution("d", 1, str(tmp_path))


async def test_cells_must_agree_on_the_way(trainers: Any, batches: Any, tmp_path: Path) -> None:
    core, other = await trainers(), await trainers(handover="memory")
    await other.accumulate(batches(count=2)[0])
    with pytest.raises(InfrastructureError, match="on every cell"):
        await core.add_contribution(await other.export_contribution("c", 1, str(tmp_path)))


async def test_nan_gradients_are_named_through_memory(trainers: Any, batches: Any, tmp_path: Path) -> None:
    core, satellite = await trainers(handover="memory"), await trainers(core=False, handover="memory")
    with torch.no_grad():
        satellite._replica.parameters["model.norm.weight"][0] = float("nan")
    batch = batches(count=2)[0]
    await satellite.accumulate(batch)
    await core.add_contribution(await satellite.export_contribution("c", 1, str(tmp_path)))
    result = await core.step(1.0)
    assert result.skipped is not None
    assert batch.id in result.skipped


SATELLITE = """
import asyncio, os, pickle, signal, sys
from gyre_core import ComponentContext, WeightSource
from gyre_local.options import LocalTrainerOptions
from gyre_local.train import replica, trainer as module
from gyre_weights.handover import lanes
run_dir, model, point = sys.argv[1:4]
work = pickle.loads(sys.stdin.buffer.read())
die = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
if point == "fetching":
    replica.catch_up = die
if point == "computing":
    replica.accumulate = die
if point == "handing over":
    lanes.chunks = die
async def main():
    trainer = module.LocalTrainer(
        LocalTrainerOptions(dtype="float64", handover="memory"), ComponentContext(run_dir, "satellite"))
    await trainer.start(WeightSource(0, model), core=False)
    for batch in work:
        await trainer.accumulate(batch)
    await trainer.export_contribution("killed", 1, run_dir)
asyncio.run(main())
"""


@pytest.mark.parametrize("point", ["fetching", "computing", "handing over"])
async def test_a_satellite_killed_at_any_point_costs_only_its_lease(
    point: str, trainers: Any, batches: Any, tmp_path: Path, folder_of: Callable[..., Path]
) -> None:
    """kill -9; the lease is computed by somebody else and the parameters are those of one trainer."""
    import pickle

    work = batches(count=4)
    alone = await trainers(dtype="float64")
    for batch in work:
        await alone.accumulate(batch)
    await alone.add_contribution(await alone.export_contribution("alone", 1, str(tmp_path)))
    await alone.step(2.0)
    core = await trainers(dtype="float64", handover="memory")
    arguments = [sys.executable, "-c", SATELLITE, str(tmp_path), str(folder_of("qwen3")), point]

    def run() -> int:
        done = subprocess.run(arguments, input=pickle.dumps(work[2:]), check=False, timeout=120)
        return done.returncode

    killed = asyncio.create_task(asyncio.to_thread(run))
    for batch in work[:2]:
        await core.accumulate(batch)
    await core.add_contribution(await core.export_contribution("own", 1, str(tmp_path)))
    assert await killed == -signal.SIGKILL
    assert core._memory.receiver.held == []
    for batch in work[2:]:
        await core.accumulate(batch)
    await core.add_contribution(await core.export_contribution("again", 1, str(tmp_path)))
    await core.step(2.0)
    for name, parameter in core._replica.parameters.items():
        gap = float((parameter - alone._replica.parameters[name]).detach().norm())
        assert gap <= 1e-10 * float(alone._replica.parameters[name].detach().norm()), name
