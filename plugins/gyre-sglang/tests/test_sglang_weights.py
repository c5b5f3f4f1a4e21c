"""Policy versions into a server: by order in its workers, from disk, as deltas; what is refused and what is undone."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gyre_core import CapabilityError, ComponentContext, InfrastructureError, WeightSource
from gyre_core.testing.engine_rig import Watched, call, request_of
from gyre_sglang import loading
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions
from gyre_sglang.weights import Meeting, read_meeting
from gyre_weights import HostTensor, Published, Shadow, open_version, publish_delta, publish_full

PROMPT = list(range(30))


def tensor(fill: int, rows: int = 320) -> HostTensor:
    return HostTensor("F32", (rows, 4), np.full(rows * 4, fill, np.float32).view(np.uint8))


class Trainer:
    """Publishes versions of two tensors; a delta changes one of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.extras = {"config.json": json.dumps({"vocab_size": 320, "max_position_embeddings": 1024}).encode()}

    def full(self, version: int, kind: str = "disk") -> WeightSource:
        made = publish_full(
            self.root, version, {"embed": tensor(version), "norm": tensor(0, 2)}.items(), kind=kind, extras=self.extras
        )
        return self._source(made)

    def delta(self, base: int, version: int) -> WeightSource:
        shadow = Shadow(base, open_version(self.root / f"v{base}").digest, open_version(self.root / f"v{base}"))
        tensors = {"embed": tensor(version), "norm": tensor(0, 2)}
        return self._source(publish_delta(self.root, version, tensors.items(), shadow, extras=self.extras))

    def _source(self, made: Published) -> WeightSource:
        return WeightSource(made.version, made.location, made.kind)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


@pytest.fixture
def by_order(context: ComponentContext, interpreter: str) -> Callable[..., SGLangEngine]:
    """An engine whose server has the loader."""

    def make(fault: str = "") -> SGLangEngine:
        arguments = ("--fault", fault) if fault else ()
        return SGLangEngine(SGLangOptions(python=interpreter, arguments=arguments, chunk_s=0.0), context)

    return make


async def test_a_launched_server_takes_versions_by_order(by_order: Any, trainer: Trainer) -> None:
    engine = by_order()
    await engine.start(trainer.full(0))
    assert engine._server.orders is not None
    running = Watched(engine, request_of(PROMPT, 120, name="a"))
    await running.until(3)
    await engine.update_weights(trainer.full(1, "shm"))
    result = await running.task
    border = result.versions.count(0)
    assert 3 <= border < 120
    assert result.versions == [0] * border + [1] * (120 - border)
    order = json.loads((engine._server.orders / "order.json").read_text())
    assert (order["kind"], order["all"]) == ("rest", True)
    await engine.close()


async def test_replicas_take_versions_from_disk(context: ComponentContext, interpreter: str, trainer: Trainer) -> None:
    """SGLang gives no tensors to replicas, not even none, so our loader would never be called."""
    place = replace(context, device="cuda", accelerators=2)
    engine = SGLangEngine(SGLangOptions(python=interpreter, dp=2, chunk_s=0.0), place)
    await engine.start(trainer.full(0))
    assert (await engine.load()).kv_tokens_total == 2 * 8192
    for version, source in enumerate((trainer.delta(0, 1), trainer.full(2, "shm")), 1):
        running = Watched(engine, request_of(PROMPT, 120, name=f"a{version}"))
        await running.until(3)
        await engine.update_weights(source)
        assert set((await running.task).versions) == {version - 1, version}
    with pytest.raises(CapabilityError, match="without replicas"):
        await engine.update_weights(WeightSource(3, "group://127.0.0.1:1234/g1?first=1&size=2", "collective"))
    await engine.sleep()
    await engine.wake(trainer.full(4))
    assert (await call(engine, PROMPT, 3)).versions == [4] * 3
    await engine.close()


async def test_a_load_that_broke_the_weights_is_undone(by_order: Any, trainer: Trainer) -> None:
    engine = by_order("torn-1")
    await engine.start(trainer.full(0))
    running = Watched(engine, request_of(PROMPT, 80, name="a"))
    await running.until(2)
    with pytest.raises(InfrastructureError, match="out of memory"):
        await engine.update_weights(trainer.full(1))
    assert engine.version == 0
    assert (await running.task).versions == [0] * 80
    order = json.loads((engine._server.orders / "order.json").read_text())
    assert order["location"].endswith("v0")
    await engine.update_weights(trainer.full(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    await engine.close()


async def test_a_load_that_cannot_be_undone_fails_every_later_call(by_order: Any, trainer: Trainer) -> None:
    engine = by_order("torn-1")
    first = trainer.full(0)
    await engine.start(first)
    bad = trainer.full(1)
    (Path(first.location) / "model.safetensors").write_bytes(b"gone")
    for file in Path(first.location).glob("*.safetensors"):
        file.write_bytes(b"gone")
    with pytest.raises(InfrastructureError):
        await engine.update_weights(bad)
    with pytest.raises(InfrastructureError, match="out of memory"):
        await call(engine, PROMPT, 3)
    with pytest.raises(InfrastructureError, match="out of memory"):
        await engine.load()
    await engine.update_weights(trainer.full(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    await engine.close()


@pytest.mark.parametrize("way", ["order", "disk"])
async def test_a_delta_brings_only_what_changed(way: str, by_order: Any, engine_of: Any, trainer: Trainer) -> None:
    base, source = trainer.full(0), trainer.delta(0, 1)
    if way == "disk":
        engine, fake = await engine_of(source=base)
        await engine.update_weights(source)
        assert fake.loaded[-1] == ["embed"]
        assert not Path(fake.location).exists()
    else:
        engine = by_order()
        await engine.start(base)
        await engine.update_weights(source)
        order = json.loads((engine._server.orders / "order.json").read_text())
        assert (order["kind"], order["all"]) == ("rest", False)
    assert (await call(engine, PROMPT, 3)).versions == [1] * 3
    await engine.close()


@pytest.mark.parametrize("way", ["order", "disk"])
async def test_a_delta_on_another_version_than_the_one_held_is_loaded_whole(
    way: str, by_order: Any, engine_of: Any, trainer: Trainer
) -> None:
    """An engine that slept through a version would keep old values in what the later delta does not change."""
    base, _, later = trainer.full(0), trainer.delta(0, 1), trainer.delta(1, 2)
    if way == "disk":
        engine, fake = await engine_of(source=base)
        await engine.update_weights(later)
        assert fake.loaded[-1] == ["embed", "norm"]
    else:
        engine = by_order()
        await engine.start(base)
        await engine.update_weights(later)
        assert json.loads((engine._server.orders / "order.json").read_text())["all"] is True
    await engine.close()


@pytest.mark.parametrize("how", ["no answer", "given up"])
async def test_what_a_delta_was_made_into_stays_while_the_server_may_read_it(
    engine_of: Any, trainer: Trainer, how: str
) -> None:
    """SGLang reads a folder that it cannot read a second time, and does not survive that."""
    engine, fake = await engine_of(source=trainer.full(0), weights_timeout_s=1.0)
    delta = trainer.delta(0, 1)
    fake.loads_s = 3.0
    ended: list[bool] = []
    fake.die = lambda: ended.append(True)
    changing = asyncio.create_task(engine.update_weights(delta))
    while "/update_weights_from_disk" not in fake.counts or fake.counts["/update_weights_from_disk"] < 2:
        await asyncio.sleep(0.01)
    if how == "given up":
        changing.cancel()
    with pytest.raises((InfrastructureError, asyncio.CancelledError)):
        await changing
    loads = [body for path, body in fake.asked if path == "/update_weights_from_disk"]
    (folder,) = {Path(body["model_path"]) for body in loads if body["weight_version"] == "1"}
    while fake.loading.locked():
        assert folder.is_dir()
        await asyncio.sleep(0.01)
    assert not ended
    fake.loads_s = 0.01
    await engine.update_weights(trainer.full(2))
    assert (await call(engine, PROMPT, 3)).versions == [2] * 3
    assert not folder.parent.exists()


# What KV is named by


async def key_of(engine: SGLangEngine, fake: Any) -> str:
    await call(engine, PROMPT, 3)
    return [str(body["extra_key"]) for path, body in fake.asked if path == "/generate"][-1]


@pytest.mark.parametrize("told", [True, False])
async def test_two_folders_of_one_version_have_names_of_their_own(engine_of: Any, version: Any, told: bool) -> None:
    """A run is killed and resumed: its next version 1 is another, and pages of the old one may lie in a folder."""
    keys = []
    for byte in (1, 2):
        source = version(1)
        path = Path(source.location) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] = byte
        path.write_bytes(data)
        engine, fake = await engine_of(source=replace(source, digest=f"sha256:{byte:064x}" if told else ""))
        keys.append(await key_of(engine, fake))
    engine, fake = await engine_of(source=source)
    keys.append(await key_of(engine, fake))
    assert keys[0] != keys[1]
    assert (keys[1] == keys[2]) is not told  # the cells of a run find each other's


@pytest.mark.parametrize("told", [True, False])
async def test_two_broadcasts_of_one_version_have_names_of_their_own(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    async def loads(server: Any, prepared: Any) -> None:
        return None

    monkeypatch.setattr("gyre_sglang.engine.load_version", loads)
    keys = []
    for life in ("a", "b", "b"):
        engine, fake = await engine_of()
        group = f"group://127.0.0.1:1000/{life}?first=1&size=2"
        await engine.update_weights(WeightSource(1, group, "collective", f"sha256:{life * 64}" if told else ""))
        fake.version = "1"
        keys.append(await key_of(engine, fake))
    assert keys[0] != keys[1]
    assert (keys[1] == keys[2]) is told


@pytest.mark.parametrize("when", ["while it is made", "when it is made", "with the event loop"])
def test_a_whole_version_that_nobody_waits_for_any_more_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The thread that makes it out of a delta cannot be stopped, and may outlast the event loop."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def make(prepared: Any) -> Path:
        begun.set()
        go_on.wait(60)
        folder = tmp_path / "root" / "v1"
        folder.mkdir(parents=True)
        done.set()
        return folder

    async def last() -> None:
        try:
            await asyncio.Event().wait()
        finally:  # all that was left to the loop has been cancelled by now
            go_on.set()

    async def leave() -> None:
        prepared = SimpleNamespace(meeting=None, source=WeightSource(1, "/", "delta"))
        server = SimpleNamespace(orders=None)
        task = asyncio.create_task(loading.load_version(server, prepared))  # type: ignore[arg-type]
        while not begun.is_set():
            await asyncio.sleep(0.002)
        if when == "when it is made":
            go_on.set()
            done.wait(60)  # the loop hears of it after the task has been cancelled
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if when == "with the event loop":
            ending.append(asyncio.create_task(last()))
            await asyncio.sleep(0)
        else:
            go_on.set()
            await asyncio.get_running_loop().shutdown_default_executor()

    ending: list[asyncio.Task[None]] = []
    monkeypatch.setattr(loading, "materialise", make)
    asyncio.run(leave())  # it returns when its threads have ended
    assert done.is_set()
    assert not (tmp_path / "root").exists()


async def test_a_group_needs_our_loader(engine_of: Any) -> None:
    engine, fake = await engine_of()
    source = WeightSource(1, "group://127.0.0.1:1234/g1?first=1&size=2", "collective")
    with pytest.raises(CapabilityError, match="custom-weight-loader"):
        await engine.update_weights(source)
    assert not fake.paused
    assert (await call(engine, PROMPT, 3)).versions == [0] * 3


def test_meetings() -> None:
    def source(text: str) -> WeightSource:
        return WeightSource(3, text, "collective")

    text = "group://10.0.0.1:29500/run-v3?first=2&size=5&backend=nccl"
    assert read_meeting(source(text)) == Meeting("10.0.0.1", 29500, "run-v3", 2, 5, "nccl")
    for bad in (
        "", "/a/folder", "group://h:1/n?first=0&size=2", "group://h:1/n?first=2&size=2", "group://h:1/n?size=2",
        "group://h/n?first=1&size=2", "group://h:1?first=1&size=2", "group://h:x/n?first=1&size=2",
        "group://h:1/n?first=1&size=2&backend=mpi",
    ):  # fmt: skip
        with pytest.raises(InfrastructureError, match="group://HOST:PORT"):
            read_meeting(source(bad))
