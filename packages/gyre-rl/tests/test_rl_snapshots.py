"""Weights from the nearest holder: this machine's own folder, else fetched once for the machine. Real sockets; another
machine's folders stand under another name here."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gyre_core import InfrastructureError, WeightSource
from gyre_rl.cell import snapshots
from gyre_rl.cell.snapshots import ENDPOINT, Snapshots
from gyre_rl.procs.child import ChildSpec
from gyre_weights import Publisher, open_version


def tensors(version: int) -> dict[str, np.ndarray]:
    changing = np.ones((512, 512), np.float32)
    changing[0, 0] = version  # little, so that a delta is worth it
    return {"a": changing, "b": np.arange(7, dtype=np.float32)}


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChildSpec:
    """A cell of a run of several machines, whose network is this machine's loopback."""
    monkeypatch.setattr(snapshots, "is_loopback", lambda address: False)
    (tmp_path / "run").mkdir()
    return ChildSpec("h", "cell-0", 1, "http://x", "token", str(tmp_path / "run"))


@pytest.fixture
def core(spec: ChildSpec, tmp_path: Path):
    """Its publications lie where only its machine looks."""
    made = Snapshots(spec)
    made.offer(str(tmp_path / "there"))
    return made


def publish(folder: Path, kind: str, versions: int) -> list[WeightSource]:
    """Sources as the run knows them, then the folder is moved to where other machines do not find it."""
    publisher, found = Publisher(kind, folder, keep=9), []
    for version in range(1, versions + 1):
        made = publisher.publish(version, lambda version=version: tensors(version))
        found.append(WeightSource(version, made.location.replace("there", "gone"), made.kind, made.digest))
    return found


async def test_what_this_machine_has_is_taken_where_it_is(spec, core, tmp_path):
    (source,) = publish(tmp_path / "there", "disk", 1)
    here = replace(source, location=source.location.replace("gone", "there"))
    cell = Snapshots(spec)
    assert await cell.near(here) == here
    await cell.close()
    await core.close()


@pytest.mark.parametrize("kind", ["disk", "delta"])
async def test_what_it_has_not_is_fetched_whole_and_goes_with_the_cell(spec, core, tmp_path, kind):
    *_, source = publish(tmp_path / "there", kind, 3)
    cell = Snapshots(spec)
    near = await cell.near(source)
    assert near.version == 3
    assert near.kind == ("shm" if kind == "disk" else "delta")
    assert Path(near.location).is_relative_to("/dev/shm")
    opened = open_version(near.location, version=3)
    assert all(np.array_equal(opened[name].numpy(), value) for name, value in tensors(3).items())
    await cell.close()
    assert not Path(near.location).exists()
    await core.close()
    assert not (Path(spec.run_dir) / ENDPOINT).exists()


async def test_cells_of_one_machine_fetch_once(spec, core, tmp_path):
    (source,) = publish(tmp_path / "there", "disk", 1)
    cells = [Snapshots(spec) for _ in range(4)]
    near = await asyncio.gather(*(cell.near(source) for cell in cells))
    assert len({found.location for found in near}) == 1
    assert core._holder.given == {1: 1}
    await asyncio.gather(*(cell.close() for cell in cells))
    await core.close()


async def test_what_lies_at_the_place_from_an_earlier_life_is_not_taken_for_it(spec, core, tmp_path):
    """As in shared memory, whose place is the same on every machine and in every life of a run."""
    (source,) = publish(tmp_path / "there", "disk", 1)
    stale = Publisher("disk", tmp_path / "gone")
    stale.publish(1, lambda: tensors(9))
    cell = Snapshots(spec)
    near = await cell.near(source)
    assert near.location != source.location
    assert open_version(near.location)["a"].numpy()[0, 0] == 1
    await core.close()
    assert await cell.near(source) == near, "told apart by its contents, so nobody has to be asked"
    await cell.close()


@pytest.mark.parametrize("first", [True, False])
async def test_a_cell_that_ends_takes_nothing_from_one_that_goes_on(spec, core, tmp_path, first):
    """Of one machine, in processes of their own."""
    (source,) = publish(tmp_path / "there", "disk", 1)
    cell = Snapshots(spec)
    near = await cell.near(source)
    other = (
        "import asyncio, sys\n"
        "from gyre_core import WeightSource\n"
        "from gyre_rl.cell import snapshots\n"
        "from gyre_rl.procs.child import ChildSpec\n"
        "snapshots.is_loopback = lambda address: False\n"
        "async def main():\n"
        f"    cell = snapshots.Snapshots(ChildSpec('h', 'cell-1', 1, '', '', {spec.run_dir!r}))\n"
        f"    near = await cell.near(WeightSource(1, {source.location!r}, 'disk', {source.digest!r}))\n"
        "    print(near.location, flush=True)\n"
        "    sys.stdin.readline()\n"
        "    await cell.close()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", other, stdin=PIPE, stdout=PIPE)
    assert (await process.stdout.readline()).decode().strip() == near.location
    leaving, staying = (cell.close, lambda: process.communicate(b"\n"))[:: 1 if first else -1]
    await leaving()
    assert Path(near.location).exists()
    await staying()
    assert not Path(near.location).exists()
    await core.close()


async def test_a_new_cores_place_is_left_by_the_old_one(spec, core, tmp_path):
    new = Snapshots(spec)
    new.offer(str(tmp_path / "there"))
    await core.close()
    assert (Path(spec.run_dir) / ENDPOINT).exists()
    await new.close()
    assert not (Path(spec.run_dir) / ENDPOINT).exists()


async def test_what_nobody_has_is_an_error_that_says_what_to_do(spec, core, tmp_path):
    publish(tmp_path / "there", "disk", 1)
    cell = Snapshots(spec)
    with pytest.raises(InfrastructureError, match=r"finding policy version 7.*not held here.*take the newest one"):
        await cell.near(WeightSource(7, str(tmp_path / "gone" / "v7")))
    await core.close()
    with pytest.raises(InfrastructureError, match="finding policy version 1 for a cell at"):
        await cell.near(WeightSource(1, str(tmp_path / "gone" / "v1")))
    await cell.close()


async def test_a_place_that_somebody_else_made_is_refused(spec, core, tmp_path, monkeypatch):
    (source,) = publish(tmp_path / "there", "disk", 1)
    cell = Snapshots(spec)
    monkeypatch.setattr("os.getuid", lambda: 54_321)
    with pytest.raises(InfrastructureError, match="a folder of user 54321"):
        await cell.near(source)
    await cell.close()
    for left in Path("/dev/shm").glob("gyre-weights-54321-*"):
        left.rmdir()
    await core.close()


async def test_a_run_of_one_machine_opens_nothing_and_changes_no_source(tmp_path):
    cell = Snapshots(ChildSpec("h", "cell-0", 1, "http://x", "token", str(tmp_path)))
    cell.offer(str(tmp_path))
    source = WeightSource(1, str(tmp_path / "gone"))
    assert await cell.near(source) == source
    assert list(tmp_path.iterdir()) == []
    await cell.close()
