"""Cells that cannot start, cannot load weights or cannot work: tried again, told, and in the end given up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from gyre_core import CellId, ComponentContext, ConfigError, InfrastructureError, Kind, Role, WeightSource
from gyre_rl.cell import host as cell_host
from gyre_rl.cell.leases import LeaseWorker
from gyre_rl.cell.messages import CellBody, CellReady, Lease
from gyre_rl.config import load
from gyre_rl.procs.child import ChildSpec
from gyre_rl.run import driver, parts
from gyre_rl.run.atrest import weights_at_rest
from gyre_rl.run.cells import Cells, index_of, name_of
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.driver import RunDriver
from gyre_rl.run.parts import Parts
from gyre_sched import CellId as SchedCell
from gyre_weights import Publisher, open_version

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
FAULT = InfrastructureError("loading weights", got="a memory that is full")


class Asked:
    """A cells' end that cannot load weights until it is told that it can."""

    def __init__(self) -> None:
        self.fault: InfrastructureError | None = FAULT
        self.ended: list[CellId] = []

    async def sync(self, cell: CellId, version: int) -> float:
        if self.fault:
            raise self.fault
        return 0.1

    async def end(self, cell: CellId) -> None:
        self.ended.append(cell)


async def test_a_cell_that_cannot_load_weights_is_told_once_and_ended_after_a_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cells, notices = Asked(), []
    bus: Any = SimpleNamespace(notice=notices.append, emit=lambda event: None)
    nothing: Any = None
    made, cell = RunDriver(cells, nothing, nothing, bus, nothing), SchedCell("cell-2", 1)  # type: ignore[arg-type]

    async def fails() -> None:
        with pytest.raises(InfrastructureError):
            await made.sync_weights(cell, 3)
        now[0] += driver.STUCK_S / 4

    for _ in range(4):
        await fails()
    assert (len(notices), cells.ended) == (1, [])
    cells.fault = None
    await made.sync_weights(cell, 3)
    cells.fault = FAULT
    for _ in range(5):
        await fails()
    assert cells.ended == [], "one success in between begins the time anew"
    await fails()
    assert cells.ended == [CellId("cell-2", 1)]
    assert len(notices) == 3
    assert "is ended" in notices[-1]


class Starting:
    """Cells of which the first `failing` starts fail."""

    def __init__(self, failing: int) -> None:
        self.failing, self.starts = failing, 0
        self.sources: dict[int, WeightSource] = {0: WeightSource(0, "gone")}

    async def start(self, name: str, role: Role, source: WeightSource, *, core: bool, restore: str | None) -> CellId:
        self.starts += 1
        self.source = source
        if self.starts <= self.failing:
            raise InfrastructureError(f"starting {name}", got="no route to its host")
        return CellId(name, self.starts)


@pytest.mark.parametrize(("failing", "starts", "back"), [(0, 1, True), (2, 3, True), (99, 3, False)])
async def test_a_cell_is_started_again_as_often_as_the_run_allows(tmp_path, monkeypatch, failing, starts, back):
    monkeypatch.setattr(parts, "RESTART_S", 0.0)
    joined: list[CellId] = []
    monkeypatch.setattr(Parts, "join", lambda self, cell: joined.append(cell))
    cells, notices = Starting(failing), []
    nothing: Any = None
    config = load(QUICKSTART, ["cells.restarts=3"])
    bus: Any = SimpleNamespace(notice=notices.append, emit=notices.append)
    made = Parts(config, RunDirectory(tmp_path), nothing, bus, asyncio.get_running_loop().create_future())
    training: Any = SimpleNamespace(applied=0)
    made.cells, made.training, made.restarts = cells, training, {"cell-1": 1}  # type: ignore[assignment]
    await asyncio.wait_for(made._restart("cell-1", False), 60)
    assert cells.starts == starts
    assert bool(joined) == back
    assert len(notices) == min(failing, 3) + (not back)
    assert not back or not any("no try is left" in notice for notice in notices)


async def test_a_core_begins_anew_from_what_is_at_rest(tmp_path, monkeypatch):
    """Not from the memory that its trainer gave back."""
    monkeypatch.setattr(Parts, "join", lambda self, cell: None)
    cells, nothing = Starting(0), None
    config: Any = load(QUICKSTART)
    bus: Any = SimpleNamespace(notice=print, emit=print)
    made = Parts(config, RunDirectory(tmp_path), nothing, bus, asyncio.get_running_loop().create_future())  # type: ignore[arg-type]
    training: Any = SimpleNamespace(applied=2)
    made.cells, made.training = cells, training  # type: ignore[assignment]
    cells.sources[2] = WeightSource(2, "/dev/shm/given-back/v2", "shm")
    RunDirectory(tmp_path).checkpoint(2).mkdir(parents=True)
    monkeypatch.setattr(RunDirectory, "versions_saved", lambda self: [1, 2])
    await made._restart("cell-0", True)
    assert cells.source == cells.sources[2] == weights_at_rest(config, RunDirectory(tmp_path), 2)
    assert cells.source.location == str(RunDirectory(tmp_path).checkpoint(2))


def test_weights_at_rest_are_what_every_machine_can_open(tmp_path):
    config: Any = SimpleNamespace(model_dir=tmp_path / "model")
    directory = RunDirectory(tmp_path)
    assert weights_at_rest(config, directory, 0).location == str(tmp_path / "model")
    published, memory = directory.weights / "v3", tmp_path / "memory"
    assert weights_at_rest(config, directory, 3).location == str(directory.checkpoint(3))
    tensors = {"a": np.ones((512, 512), np.float32)}
    Publisher("disk", memory).publish(3, lambda: tensors)
    published.parent.mkdir()
    published.symlink_to(memory / "v3")
    assert weights_at_rest(config, directory, 3).location == str(directory.checkpoint(3))
    published.unlink()
    published.mkdir()
    assert weights_at_rest(config, directory, 3).location == str(directory.checkpoint(3)), "nothing is in it"
    publisher = Publisher("delta", directory.weights)
    publisher.publish(3, lambda: tensors)
    digest = open_version(published).digest
    assert weights_at_rest(config, directory, 3) == WeightSource(3, str(published), "disk", digest)
    tensors["a"][0, 0] = 2
    assert publisher.publish(4, lambda: tensors).kind == "delta"
    assert weights_at_rest(config, directory, 4).location == str(directory.checkpoint(4)), "which is whole"


@pytest.mark.parametrize("error", [InfrastructureError, ConfigError, asyncio.CancelledError])
async def test_a_start_that_fails_leaves_no_process(tmp_path, error):
    stopped = []

    async def start(name: str, host: str, body: Any, **more: Any) -> Any:
        assert more["cell"] == 7
        return SimpleNamespace(id=CellId(name, 1))

    async def ready(child: Any, kind: type, timeout_s: float) -> CellReady:
        raise error(f"starting {child.id}")

    async def stop(child: Any) -> None:
        stopped.append(child.id)

    fleet: Any = SimpleNamespace(start=start, ready=ready, stop=stop)
    cells = Cells(fleet, load(QUICKSTART), tmp_path, tmp_path)
    with pytest.raises(error):
        await cells.start("cell-7", Role.ROLLOUT, WeightSource(0, "x"), core=False, restore=None)
    assert stopped == [CellId("cell-7", 1)]
    assert cells.infos == {}
    assert [index_of(name_of(index)) for index in (0, 12)] == [0, 12]


async def test_a_cell_that_cannot_work_gives_leases_back_ever_more_slowly(monkeypatch):
    waits: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await real(0)

    monkeypatch.setattr("gyre_rl.cell.leases.asyncio.sleep", sleep)

    class Trainer:
        version = 0
        discarded = 0

        async def load_weights(self, source: WeightSource) -> None:
            raise FAULT

        async def discard_contribution(self) -> None:
            self.discarded += 1

    class Near:
        async def near(self, source: WeightSource) -> WeightSource:
            return source

    told: list[Any] = []

    class Link:
        async def send(self, topic: str, message: Any) -> None:
            told.append(message)

    trainer: Any = Trainer()
    near: Any = Near()
    worker = LeaseWorker(trainer, CellId("cell-1", 1), near)
    link: Any = Link()
    worker.open(link)
    for number in range(14):
        worker.take(Lease(number, 1, WeightSource(1, "x"), "folder", ()))
    began = time.monotonic()
    while len(told) < 14:
        assert time.monotonic() - began < 60
        await real(0.01)
    await worker.close()
    assert [done.contribution for done in told] == [None] * 14
    assert waits[:3] == [0.0, 0.5, 1.0]
    assert max(waits) == waits[-1] == 5.0


async def test_what_a_failed_lease_summed_up_is_gone_before_the_next_or_the_next_fails_too(monkeypatch):
    """The worker lives on when discarding fails as well: each lease ends, and no sum mixes two of them."""
    real = asyncio.sleep
    monkeypatch.setattr("gyre_rl.cell.leases.asyncio.sleep", lambda seconds: real(0))

    class Trainer:
        version = 1
        broken = 2
        open: ClassVar[list[Any]] = []

        async def accumulate(self, batch: Any) -> None:
            self.open.append(batch)
            if batch == "bad":
                raise ValueError("bad micro-batch")

        async def discard_contribution(self) -> None:
            if self.broken:
                self.broken -= 1
                raise FAULT
            self.open.clear()

        async def export_contribution(self, name: str, step: int, folder: str) -> Any:
            done, self.open[:] = list(self.open), []
            return done

    told: list[Any] = []

    class Link:
        async def send(self, topic: str, message: Any) -> None:
            told.append(message)

    trainer: Any = Trainer()
    near: Any = None
    worker = LeaseWorker(trainer, CellId("cell-1", 1), near)
    link: Any = Link()
    worker.open(link)
    for number, batch in enumerate(("bad", "a", "b")):
        worker.take(Lease(number, 1, WeightSource(1, "x"), "folder", (batch,)))
    await asyncio.wait_for(worker.flush(), 60)
    await worker.close()
    assert [done.lease for done in told] == [0, 1, 2]
    assert [done.contribution for done in told] == [None, None, ["b"]]


async def test_no_two_cells_and_no_two_lives_of_one_sample_with_the_same_seed(monkeypatch, tmp_path):
    """The trainer's seed is the run's: all must begin with the same parameters."""
    seeds: dict[Any, list[int]] = {Kind.ENGINE: [], Kind.TRAINER: []}

    class Plugins:
        def create(self, kind: Any, name: str, options: Any, context: ComponentContext) -> Any:
            seeds[kind].append(context.seed)

    monkeypatch.setattr(cell_host.PluginManager, "installed", Plugins)
    monkeypatch.setattr(cell_host, "installed_transports", lambda *_: {})
    body = CellBody(Role.ROLLOUT, False, WeightSource(0, "nowhere"), "e", "t", seed=3)
    for name, life in (("cell-1", 1), ("cell-2", 1), ("cell-1", 2), ("cell-1", 1)):
        spec = ChildSpec("m:f", name, life, "http://x", "token", str(tmp_path), msgspec.to_builtins(body))
        await cell_host.make(spec)
    engines = seeds[Kind.ENGINE]
    assert len(set(engines)) == 3
    assert engines[0] == engines[3], "the same in each attempt"
    assert seeds[Kind.TRAINER] == [3] * 4
