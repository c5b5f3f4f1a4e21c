"""Sessions move between two cells over the transport that the run names, or that a plugin brings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gyre_core import ComponentContext, Kind, PluginManager, Registration, hookimpl
from gyre_kvxfer import HostPool, Transport, presets
from gyre_kvxfer.transports.process_vm import ProcessVmExporter, ProcessVmReader
from gyre_rl.cell import moves as cell_moves
from gyre_rl.cell.messages import KVSettings, PullSession
from gyre_rl.cell.moves import Moves, installed_transports
from gyre_rl.procs.child import ChildSpec

SHAPE: Any = {"layers": 2, "kv_heads": 2, "head_dim": 8, "num_blocks": 32, "dtype": "float32"}
TOKENS = np.arange(100, dtype=np.int32)


class Engine:
    """A pool of KV where an engine would be."""

    version = 3

    def __init__(self) -> None:
        self.pool = HostPool(presets.paged(block_size=8, **SHAPE), version=3)


class Pigeon:
    """process_vm under another name."""

    name = "pigeon"

    def __init__(self, options: None, context: ComponentContext) -> None:
        self.opened = 0

    def export(self, regions: Any) -> ProcessVmExporter:
        return ProcessVmExporter()

    def open(self, meta: str, source: Any, own: Any) -> ProcessVmReader:
        self.opened += 1
        return ProcessVmReader.probe(meta, source)


class Plugin:
    @hookimpl
    def gyre_register(self):
        yield Registration(Kind.TRANSPORT, "pigeon", f"{__name__}:Pigeon")
        yield Registration(Kind.TRANSPORT, "absent", "nowhere:Absent", requires=("no_such_module_here",))


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept() -> None:
        """Pools keep digests by themselves."""

    def pool(engine: Engine, digest: str = "") -> HostPool:
        engine.pool.keep_digests = kept  # type: ignore[attr-defined]
        return engine.pool

    monkeypatch.setattr(cell_moves, "EngineKV", pool)


async def moved(settings: KVSettings, extra: tuple[Transport, ...] = ()) -> str:
    """Move one session; the transport that carried it."""
    source, sink = Engine(), Engine()
    kv = np.random.default_rng(0).standard_normal(100 * source.pool.layout().token_nbytes // 4).astype(np.float32)
    source.pool.append("s", TOKENS, kv.view(np.uint8))
    there = Moves(ChildSpec("m:f", "cell-1", 1, "http://x", "token", "."), settings, extra)
    here = Moves(ChildSpec("m:f", "cell-2", 1, "http://x", "token", "."), settings, extra)
    endpoint = await there.serve(source)  # type: ignore[arg-type]
    try:
        told = await here.pull(sink, PullSession("s", endpoint))  # type: ignore[arg-type]
    finally:
        await there.close()
        await here.close()
    assert told.carried, told.why
    assert (sink.pool.read("s")[1] == kv.view(np.uint8)).all()
    return told.transport


@pytest.mark.parametrize("name", ["tcp", "shm", "process_vm"])
async def test_a_named_transport_carries_it(name: str) -> None:
    assert await moved(KVSettings(name, digest="fast", finite=True)) == name


async def test_a_plugins_transport_is_tried_first_and_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = PluginManager()
    manager.add(Plugin())
    monkeypatch.setattr(manager, "load", lambda kind, name: Pigeon)
    context = ComponentContext(".", "cell-1")
    assert installed_transports(manager, context, "tcp") == (), "one that the run does not use is not made"
    extra = installed_transports(manager, context, "auto")
    assert [each.name for each in extra] == ["pigeon"], "one that lacks its modules is left out"
    (pigeon,) = extra
    for settings, opened in ((KVSettings(), 1), (KVSettings("pigeon"), 2), (KVSettings("tcp"), 2)):
        await moved(settings, extra)
        assert pigeon.opened == opened
