"""Trainers with ranks, against a fake rank without torch: the laws of contributions, and every way to fail."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import gyre_core
import pytest
from gyre_core import CapabilityError, ConfigError, InfrastructureError, MicroBatch, ModelFacts, WeightSource
from gyre_core.ranks import Entry, RankPlan, RankTrainer, RankTrainerOptions, TensorFile, package_folders
from gyre_core.ranks.places import interpreter, local_device
from gyre_core.ranks.tensorfile import create, files_of, shards
from gyre_core.ranks.versions import PlainVersions, Versions
from gyre_core.registration import ComponentContext

FAKE = Path(__file__).parent / "fake_ranks"
OPTIONS = RankTrainerOptions(learning_rate=0.5, max_grad_norm=0.0, timeout_s=60.0, start_timeout_s=120.0)


def numbers(path: Path | str, name: str) -> list[float]:
    file = TensorFile(Path(path))
    entry = file.entries[name]
    return list(memoryview(file.buffer)[entry.start : entry.start + entry.size].cast("f"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float16", "vocab_size": 3}))
    (folder / "tokenizer.json").write_text("{}")
    path = folder / "model.safetensors"
    create(path, [Entry("a.weight", "F32", (4, 3)), Entry("b.weight", "F32", (5,)), Entry("other", "BF16", (3,))])
    file = TensorFile(path, writable=True)
    for name in ("a.weight", "b.weight"):
        entry = file.entries[name]
        view = memoryview(file.buffer)[entry.start : entry.start + entry.size].cast("f")
        for index in range(entry.count):
            view[index] = float(index)
        view.release()
    file.flush()
    return folder


def make(
    tmp_path: Path, world: int = 2, options: RankTrainerOptions = OPTIONS, versions: Versions | None = None, **body: Any
) -> RankTrainer:
    plan = RankPlan(
        "fake", Path(sys.executable), "gyre_fake_ranks", world, body, tmp_path / "logs",
        package_folders(gyre_core), {},
    )  # fmt: skip
    linked = dataclasses.replace(plan, packages=[*plan.packages, FAKE / "gyre_fake_ranks.py"])
    return RankTrainer(options, linked, "cpu", versions)


def batch(name: str, **told: Any) -> MicroBatch:
    return MicroBatch(name, 1, 4, json.dumps(told).encode())


async def test_a_step_is_the_sum_of_what_the_ranks_hold(tmp_path: Path, model: Path) -> None:
    core, satellite = make(tmp_path, 3), make(tmp_path, 2)
    try:
        await asyncio.gather(
            core.start(WeightSource(4, str(model)), core=True), satellite.start(WeightSource(4, str(model)), core=False)
        )
        assert core.facts == ModelFacts("Fake", 17, False, 3, 4)
        assert await core.logprobs(batch("x", add=1.0)) == [-1.0, -2.0]
        stats = await core.accumulate(batch("x", add=1.0))
        assert (stats.loss_sum, stats.trained_tokens, stats.tokens) == (3.0, 3, 4)
        await satellite.accumulate(batch("y", add=2.0))
        await satellite.accumulate(batch("z", add=3.0))
        mine = await core.export_contribution("c1", 1, str(tmp_path / "parts"))
        theirs = await satellite.export_contribution("c2", 1, str(tmp_path / "parts"))
        assert numbers(theirs.location, "a.weight") == [5.0] * 12
        assert theirs.batch_ids == ("y", "z")
        for contribution in (theirs, mine):
            await core.add_contribution(contribution)
        result = await core.step(2.0)
        assert (result.version, result.skipped) == (5, None)
        assert result.grad_norm == pytest.approx(3.0 * 17**0.5)
        made = await core.publish(str(tmp_path / "weights"))
        assert numbers(files_of(Path(made.location))[0], "b.weight") == [index - 1.5 for index in range(5)]
        assert json.loads((Path(made.location) / "config.json").read_text())["dtype"] == "float32"
        assert (Path(made.location) / "tokenizer.json").exists()
        await core.save(str(tmp_path / "checkpoint"))
        with pytest.raises(CapabilityError):
            await satellite.step(1.0)
        with pytest.raises(CapabilityError):
            await core.load_weights(made)
    finally:
        await asyncio.gather(core.close(), satellite.close())
    other = make(tmp_path, 1)
    try:
        await other.start(WeightSource(0, str(model)), core=True)
        await other.restore(str(tmp_path / "checkpoint"))
        assert other.version == 5
        again = await other.publish(str(tmp_path / "again"))
        path, same = files_of(Path(again.location))[0], files_of(Path(made.location))[0]
        assert numbers(path, "a.weight") == numbers(same, "a.weight")
    finally:
        await other.close()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"do": "die", "rank": 1}, "signal 9"),
        ({"do": "raise", "rank": 0}, "MemoryError"),
        ({"do": "rubbish", "rank": 1}, "WireError"),
        ({"do": "refuse", "rank": 1}, "this rank alone refuses"),
    ],
)
async def test_a_rank_that_fails_ends_all_and_a_satellite_starts_again(
    tmp_path: Path, model: Path, told: dict[str, Any], said: str
) -> None:
    satellite = make(tmp_path)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        first = satellite.pids
        await satellite.accumulate(batch("a", add=1.0))
        with pytest.raises(InfrastructureError, match=f"rank {told['rank']} of 2") as caught:
            await satellite.accumulate(batch("b", **told))
        assert said in str(caught.value)
        assert satellite.pids == []
        await gone(first)
        await satellite.discard_contribution()
        await satellite.accumulate(batch("c", add=4.0))
        made = await satellite.export_contribution("c", 1, str(tmp_path / "parts"))
        assert made.batch_ids == ("c",)
        assert made.version == 2
        assert numbers(made.location, "b.weight") == [4.0] * 5
        assert set(satellite.pids).isdisjoint(first)
    finally:
        await satellite.close()


async def test_what_died_with_the_ranks_is_not_exported(tmp_path: Path, model: Path) -> None:
    satellite = make(tmp_path)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        await satellite.accumulate(batch("a", add=1.0))
        os.kill(satellite.pids[0], signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await satellite.export_contribution("c", 1, str(tmp_path / "parts"))
        with pytest.raises((ValueError, InfrastructureError)):
            await satellite.export_contribution("c", 1, str(tmp_path / "parts"))
        assert not list((tmp_path / "parts").glob("*"))
    finally:
        await satellite.close()


async def test_ranks_write_behind_what_the_ranks_before_them_wrote(tmp_path: Path, model: Path) -> None:
    """The log says why ranks were ended when others run already; an error quotes its own rank's words alone."""
    log = tmp_path / "logs" / "fake-rank1.log"
    log.parent.mkdir()
    log.write_text("out of memory, said the rank before\n")
    satellite = make(tmp_path)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        error = await killed_during(satellite, satellite.load_weights(WeightSource(5, str(model))))
    finally:
        await satellite.close()
    assert log.read_text().startswith("out of memory, said the rank before\n")
    assert "out of memory" not in error


async def killed_during(trainer: RankTrainer, command: Coroutine[Any, Any, Any]) -> str:
    """Rank 1 stands still, the command comes, rank 1 dies: the error that the command ends with."""
    pid, group = trainer.pids[1], trainer._group
    assert group is not None
    os.kill(pid, signal.SIGSTOP)
    before, task = group._number, asyncio.ensure_future(command)
    async with asyncio.timeout(60):
        while group._number == before:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InfrastructureError, match="rank 1 of 2") as caught:
        await task
    return str(caught.value)


async def test_a_rank_killed_while_fetching_leaves_the_version_it_had(tmp_path: Path, model: Path) -> None:
    satellite = make(tmp_path)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        assert "load" in await killed_during(satellite, satellite.load_weights(WeightSource(5, str(model))))
        assert satellite.version == 2
        await satellite.load_weights(WeightSource(5, str(model)))
        await satellite.accumulate(batch("a", add=1.0))
        assert (await satellite.export_contribution("c", 1, str(tmp_path / "parts"))).version == 5
    finally:
        await satellite.close()


class Numbered(PlainVersions):
    """Versions whose folders tell their number; `lost` are dropped after they were looked at."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lost = False

    async def shapes(self, source: WeightSource) -> Any:
        if source.version != self.number:
            raise OSError(f"got version {self.number}, expected version {source.version}")
        return await super().shapes(source)

    async def load(self, source: WeightSource, ask: Any) -> None:
        if self.lost:
            await ask("load", {"files": [f"{source.location}/lost.safetensors"]})
        await super().load(source, ask)


async def test_weights_that_were_loaded_in_part_are_of_no_version(tmp_path: Path, model: Path) -> None:
    """Until they are loaded again; a version refused before that changes nothing."""
    versions = Numbered(2)
    satellite = make(tmp_path, versions=versions)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        with pytest.raises(InfrastructureError, match="expected version 3"):
            await satellite.load_weights(WeightSource(3, str(model)))
        assert satellite.version == 2
        versions.number, versions.lost = 3, True
        with pytest.raises(InfrastructureError, match="lost"):
            await satellite.load_weights(WeightSource(3, str(model)))
        assert satellite.pids
        assert satellite.version == -1
        versions.lost = False
        await satellite.load_weights(WeightSource(3, str(model)))
        assert satellite.version == 3
    finally:
        await satellite.close()


async def test_new_ranks_that_could_not_load_what_the_dead_had_are_of_no_version(tmp_path: Path, model: Path) -> None:
    """It was dropped since; they live, and take the next."""
    versions = Numbered(2)
    satellite = make(tmp_path, versions=versions)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        os.kill(satellite.pids[1], signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await satellite.accumulate(batch("a", add=1.0))
        assert satellite.version == 2
        versions.number = 3
        with pytest.raises(InfrastructureError, match="expected version 2"):
            await satellite.accumulate(batch("a", add=1.0))
        assert satellite.pids
        assert satellite.version == -1
        await satellite.load_weights(WeightSource(3, str(model)))
        assert satellite.version == 3
    finally:
        await satellite.close()


async def test_a_core_that_began_from_a_published_version_is_restored_after_its_ranks_died(
    tmp_path: Path, model: Path
) -> None:
    core = make(tmp_path, versions=Numbered(5))
    try:
        await core.start(WeightSource(5, str(model)), core=True)
        await core.step(1.0)
        await core.save(str(tmp_path / "checkpoint"))
        os.kill(core.pids[1], signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await core.accumulate(batch("b", add=1.0))
        await core.restore(str(tmp_path / "checkpoint"))
        assert core.version == 6
        assert len(core.pids) == 2
    finally:
        await core.close()


async def test_a_core_that_was_set_back_keeps_what_it_publishes_since(tmp_path: Path, model: Path) -> None:
    """Version 4 of before is not its newest; what it began from stays."""
    core, weights = make(tmp_path, options=dataclasses.replace(OPTIONS, keep_versions=2)), tmp_path / "weights"
    for version in (3, 4, 9):
        (weights / f"v{version}").mkdir(parents=True)
    model.rename(weights / "v7")
    try:
        await core.start(WeightSource(0, str(weights / "v7")), core=True)
        for version in range(3):
            made = await core.publish(str(weights))
            assert made.version == version
            await core.step(1.0)
        assert sorted(path.name for path in weights.iterdir()) == ["v1", "v2", "v7"]
    finally:
        await core.close()


async def test_no_file_is_made_forced_to_disk_or_removed_in_the_event_loop(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the disk would let the whole cell stand still."""
    done, in_loop, loop = set(), [], threading.current_thread()

    def watch(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def watched(*args: Any, **told: Any) -> Any:
            done.add(name)
            if threading.current_thread() is loop:
                in_loop.append(name)
            return inner(*args, **told)

        monkeypatch.setattr(module, name, watched)

    core = make(tmp_path, options=dataclasses.replace(OPTIONS, keep_versions=1))
    try:
        await core.start(WeightSource(0, str(model)), core=True)
        for module, name in ((os, "fsync"), (os, "posix_fallocate"), (shutil, "rmtree")):
            watch(module, name)
        for version in range(2):
            await core.accumulate(batch(str(version), add=1.0))
            made = await core.export_contribution(f"c{version}", 1, str(tmp_path / "parts"))
            await core.add_contribution(made)
            await core.step(1.0)
            await core.publish(str(tmp_path / "weights"))
            await core.save(str(tmp_path / "checkpoint"))
        assert done == {"fsync", "posix_fallocate", "rmtree"}
        assert in_loop == []
    finally:
        await core.close()


async def test_a_disk_that_is_full_is_told_as_an_error_of_the_run(tmp_path: Path, model: Path) -> None:
    class Full(Numbered):
        refusals = ValueError

        async def publish(self, order: Any, ask: Any) -> Any:
            raise OSError(28, "No space left on device", str(order.folder))

    core = make(tmp_path, versions=Full(0))
    try:
        await core.start(WeightSource(0, str(model)), core=True)
        with pytest.raises(InfrastructureError, match="No space left") as caught:
            await core.publish(str(tmp_path / "weights"))
        assert "policy version 0" in str(caught.value)
    finally:
        await core.close()


async def test_a_rank_killed_while_handing_over_leaves_no_file(tmp_path: Path, model: Path) -> None:
    satellite = make(tmp_path)
    try:
        await satellite.start(WeightSource(2, str(model)), core=False)
        await satellite.accumulate(batch("a", add=1.0))
        assert "export" in await killed_during(
            satellite, satellite.export_contribution("c", 1, str(tmp_path / "parts"))
        )
        assert list((tmp_path / "parts").iterdir()) == []
        await satellite.discard_contribution()
        await satellite.accumulate(batch("a", add=1.0))
        made = await satellite.export_contribution("c", 1, str(tmp_path / "parts"))
        assert numbers(made.location, "b.weight") == [1.0] * 5
    finally:
        await satellite.close()


async def test_a_rank_that_hangs_ends_by_time_out(tmp_path: Path, model: Path) -> None:
    satellite = make(tmp_path, options=dataclasses.replace(OPTIONS, timeout_s=4.0))
    try:
        await satellite.start(WeightSource(0, str(model)), core=False)
        pids = satellite.pids
        with pytest.raises(InfrastructureError, match=r"ranks \[1\] in 4 s"):
            await satellite.accumulate(batch("a", do="hang", rank=1))
        await gone(pids)
    finally:
        await satellite.close()


async def test_all_ranks_refusing_alike_is_their_error_and_nothing_is_lost(tmp_path: Path, model: Path) -> None:
    satellite = make(tmp_path)
    try:
        await satellite.start(WeightSource(0, str(model)), core=False)
        await satellite.accumulate(batch("a", add=1.0))
        with pytest.raises(ValueError, match="without add"):
            await satellite.accumulate(batch("b"))
        with pytest.raises(ValueError, match="has it already"):
            await satellite.accumulate(batch("a", add=1.0))
        made = await satellite.export_contribution("c", 1, str(tmp_path))
        assert numbers(made.location, "a.weight") == [1.0] * 12
    finally:
        await satellite.close()


async def test_a_core_that_lost_its_ranks_says_so_until_it_is_restored(tmp_path: Path, model: Path) -> None:
    core = make(tmp_path)
    try:
        await core.start(WeightSource(0, str(model)), core=True)
        await core.accumulate(batch("a", add=1.0))
        made = await core.export_contribution("c", 1, str(tmp_path / "parts"))
        await core.add_contribution(made)
        await core.step(1.0)
        await core.save(str(tmp_path / "checkpoint"))
        os.kill(core.pids[1], signal.SIGKILL)
        with pytest.raises(InfrastructureError):
            await core.accumulate(batch("b", add=1.0))
        with pytest.raises(InfrastructureError, match="checkpoint"):
            await core.step(1.0)
        await core.restore(str(tmp_path / "checkpoint"))
        assert core.version == 1
        source = await core.publish(str(tmp_path / "weights"))
        assert numbers(files_of(Path(source.location))[0], "b.weight") == [i - 0.5 for i in range(5)]
    finally:
        await core.close()


@pytest.mark.parametrize(
    ("guilty", "named"), [(["e2"], "e2"), (["e1", "e2"], "e1, e2"), ([], "e1, e2")], ids=["one", "both", "unclear"]
)
async def test_a_gradient_that_is_not_finite_is_named(
    tmp_path: Path, model: Path, guilty: list[str], named: str
) -> None:
    core = make(tmp_path)
    try:
        await core.start(WeightSource(0, str(model)), core=True)
        await core.accumulate(batch("bad", do="nan", guilty=guilty))
        await core.add_contribution(await core.export_contribution("guilty", 1, str(tmp_path)))
        await core.accumulate(batch("good", add=1.0))
        await core.add_contribution(await core.export_contribution("fine", 1, str(tmp_path)))
        skipped = (await core.step(1.0)).skipped or ""
        assert "guilty" in skipped
        assert f"micro-batch bad (executions {named})" in skipped
        assert "fine" not in skipped
        with pytest.raises(InfrastructureError, match=r"a\.weight"):
            await core.restore(str(broken(tmp_path, model)))
    finally:
        await core.close()


def broken(tmp_path: Path, model: Path) -> Path:
    """A checkpoint of another model, complete in itself."""
    from gyre_core.ranks.files import OPTIMIZER, seal

    folder = tmp_path / "other"
    folder.mkdir()
    create(folder / "model.safetensors", [Entry("a.weight", "F32", (2, 2))])
    create(folder / OPTIMIZER, [Entry("exp_avg/a.weight", "F32", (2, 2))])
    seal(folder, {"version": 3, "steps": 3, "dtype": "float32"})
    return folder


async def test_ranks_that_cannot_start_say_why(tmp_path: Path, model: Path) -> None:
    plan = make(tmp_path).plan
    for trainer, said in (
        (make(tmp_path, fail=1), "no such accelerator"),
        (
            RankTrainer(OPTIONS, dataclasses.replace(plan, python=Path("/no/python")), "cpu"),
            "/no/python",
        ),
        (RankTrainer(OPTIONS, dataclasses.replace(plan, module="no_module"), "cpu"), "no_module"),
    ):
        with pytest.raises(InfrastructureError, match=said):
            await trainer.start(WeightSource(0, str(model)), core=False)
        await trainer.close()


async def test_ranks_end_with_the_process_that_drives_them(tmp_path: Path, model: Path) -> None:
    program = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path; import test_core_ranks as t\n"
        "async def main():\n"
        "    trainer = t.make(Path(sys.argv[2]))\n"
        "    await trainer.start(t.WeightSource(0, sys.argv[3]), core=False)\n"
        "    print(*trainer.pids, flush=True)\n"
        "    await trainer.accumulate(t.batch('a', do='hang'))\n"
        "asyncio.run(main())\n"
    )
    arguments = ["-c", program, str(Path(__file__).parent), str(tmp_path), str(model)]
    with tempfile.TemporaryDirectory() as sockets:  # whoever is killed leaves those behind
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=os.environ | {"TMPDIR": sockets}
        )
        assert process.stdout is not None
        pids = [int(word) for word in (await process.stdout.readline()).split()]
        assert len(pids) == 2
        process.kill()
        await process.wait()
        await gone(pids)


async def gone(pids: list[int]) -> None:
    """Wait until none of them runs."""
    deadline = time.monotonic() + 60
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {pids}"
        await asyncio.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_offloading_takes_the_model_down_and_brings_it_back(tmp_path: Path, model: Path) -> None:
    core = make(tmp_path, options=dataclasses.replace(OPTIONS, offload="rebuild"))
    try:
        await core.start(WeightSource(0, str(model)), core=True)
        await core.accumulate(batch("a", add=1.0))
        await core.add_contribution(await core.export_contribution("c", 1, str(tmp_path)))
        await core.step(1.0)
        await core.offload()
        with pytest.raises(InfrastructureError, match="onload"):
            await core.accumulate(batch("b", add=1.0))
        await core.onload()
        await core.publish(str(tmp_path / "weights"))
        assert numbers(tmp_path / "weights/v1/model.safetensors", "b.weight") == [i - 0.5 for i in range(5)]
    finally:
        await core.close()


def test_a_tensor_file_is_what_safetensors_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "x.safetensors"
    create(path, [Entry("b", "BF16", (3,)), Entry("f", "F32", (2, 2)), Entry("none", "F32", (0, 4))], {"k": "v"})
    with safetensors.safe_open(path, framework="np") as reader:
        assert sorted(reader.keys()) == ["b", "f", "none"]
        assert reader.metadata() == {"format": "pt", "k": "v"}
        assert reader.get_tensor("f").shape == (2, 2)
    with pytest.raises(FileExistsError):
        create(path, [])
    content = path.read_bytes()
    for cut in (0, 5, 40, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(InfrastructureError):
            TensorFile(path)


def test_shards_are_no_larger_than_asked_for() -> None:
    entries = [Entry(str(i), "F32", (10,)) for i in range(5)]
    assert list(shards(entries, 1 << 20)) == ["model.safetensors"]
    files = shards(entries, 80)
    assert list(files) == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert [[e.name for e in group] for group in files.values()] == [["0", "1"], ["2", "3"], ["4"]]


def test_the_interpreter_is_found_or_the_way_to_it_is_told(tmp_path: Path) -> None:
    description = tmp_path / "environment.toml"
    description.write_text('name = "nothing"\n[[step]]\npip = ["install", "nothing"]\n')
    assert interpreter("json", description, "", ".") == Path(sys.executable)
    assert interpreter("x", description, sys.executable, ".") == Path(sys.executable)
    with pytest.raises(ConfigError, match=r"engine_env.py nothing"):
        interpreter("no_such_library", description, "", ".")
    with pytest.raises(ConfigError):
        interpreter("x", description, "bin/python", str(tmp_path))
    assert local_device("cuda:0", 3) == "cuda:3"
    assert local_device("cpu", 3) == "cpu"
    assert ComponentContext("x", "y").accelerators == 0
