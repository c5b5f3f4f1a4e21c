"""Pages that servers share: where they lie, when they go, and what a page is worth that has gone or is damaged."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gyre_core import ComponentContext, ConfigError, FinishReason, InfrastructureError, WeightSource
from gyre_core.testing.engine_rig import Watched, call, request_of
from gyre_core.testing.support import load_module
from gyre_sglang import sharing
from gyre_sglang.driver import LOADS
from gyre_sglang.facts import ModelFacts
from gyre_sglang.launch import Starter
from gyre_sglang.options import SGLangOptions
from gyre_sglang.plan import SERVER_SIDE
from gyre_sglang.sharing import SharedFolder, shared_folder

PAGES = SERVER_SIDE / "gyre_sglang_server" / "pages.py"
PROMPT = [(7 * i + 3) % 320 for i in range(90)]


# The folder


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What stands for this machine's shared memory."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(sharing, "MEMORY", folder)
    return folder


def test_the_folder_goes_with_the_last_cell_of_the_machine(memory: Path) -> None:
    a, b = SharedFolder("/run", "", "."), SharedFolder("/run", "", ".")
    a.hold()
    b.hold()
    b.hold()
    assert a.path == b.path == shared_folder("/run")
    assert a.path.parent == memory
    assert a.path.stat().st_mode & 0o777 == 0o700
    (a.path / "page").write_bytes(b"x")
    a.let_go()
    a.let_go()
    assert (b.path / "page").exists()
    b.let_go()
    assert list(memory.iterdir()) == []
    SharedFolder("/run", "", ".").let_go()


def test_a_cell_that_comes_while_the_last_one_goes_has_its_folder(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened the lock of a folder that is removed before the lock is its own."""
    old, new = SharedFolder("/run", "", "."), SharedFolder("/run", "", ".")
    old.hold()
    lock, waits = sharing.fcntl.flock, [old]

    def flock(handle: int, how: int) -> None:
        if how == sharing.fcntl.LOCK_SH and waits:
            waits.pop().let_go()
        lock(handle, how)

    monkeypatch.setattr(sharing.fcntl, "flock", flock)
    new.hold()
    assert new.path.is_dir()
    third = SharedFolder("/run", "", ".")
    third.hold()
    third.let_go()
    assert new.path.is_dir(), "it is held"
    new.let_go()
    assert list(memory.iterdir()) == []


def test_a_folder_that_was_named_is_there_before_and_after(memory: Path, tmp_path: Path) -> None:
    named = SharedFolder("/run", "pages", str(tmp_path))
    with pytest.raises(ConfigError, match="kv_share_folder"):
        named.hold()
    (tmp_path / "pages").mkdir()
    named.hold()
    assert named.path.parent == tmp_path / "pages"
    assert named.path != SharedFolder("/other", "pages", str(tmp_path)).path
    named.let_go()
    assert named.path.is_dir()
    assert list(memory.iterdir()) == []
    with pytest.raises(ValueError, match="kv_share_folder"):
        SGLangOptions(kv_share_folder="pages")


async def test_a_server_is_told_the_folder_and_a_cell_that_shares_nothing_makes_none(
    memory: Path, tmp_path: Path, interpreter: str
) -> None:
    source = WeightSource(0, str(tmp_path))
    model = ModelFacts(vocab=320, positions=1024, layers=3, experts_per_token=0, tied=True)
    context = ComponentContext(str(tmp_path / "run"), "cell-0", base_dir=str(tmp_path))
    shares = Starter(SGLangOptions(python=interpreter, kv_share_gb=1, kv_share_folder="pages"), context)
    folder = shared_folder(context.run_dir, "pages", str(tmp_path))
    assert any(f'"folder": "{folder}"' in word for word in shares._plan(source, model).argv)
    with pytest.raises(ConfigError, match="kv_share_folder"):
        await shares.start(source, model)
    alone = Starter(SGLangOptions(python="/no/such/program"), context)
    with pytest.raises((ConfigError, InfrastructureError, OSError)):
        await alone.start(source, model)
    assert list(memory.iterdir()) == []
    await alone.close()


# Pages that were found and cannot be read


async def test_a_call_goes_on_when_shared_pages_could_not_be_read(engine_of: Callable[..., Any], toy: Any) -> None:
    engine, fake = await engine_of()
    await call(engine, PROMPT, 4, name="warm")
    before = await engine.load()
    fake.lost_loads = LOADS
    result = await call(engine, PROMPT, 6, name="x")
    assert result.ids == toy.tokens(PROMPT, ["0"] * 6)
    assert (result.finish, result.cached, fake.lost_loads) == (FinishReason.LENGTH, 80, 0)
    after = await engine.load()
    assert after.prefilled_tokens - before.prefilled_tokens == len(PROMPT) - 80
    assert after.cached_tokens - before.cached_tokens == 80


async def test_a_server_that_never_gets_over_it_fails_the_call(engine_of: Callable[..., Any]) -> None:
    engine, fake = await engine_of()
    fake.lost_loads = LOADS + 1
    with pytest.raises(InfrastructureError, match="External KV cache load failed"):
        await Watched(engine, request_of(PROMPT, 6, name="x")).task
    assert fake.lost_loads == 0


# The linker itself, with what it takes from SGLang stood in for


@pytest.fixture
def linker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`linker(...)`: a cache linker with a pool of 8 pages of 4 slots, all of `value`."""
    storage, base, runtime = ModuleType("storage"), ModuleType("base"), ModuleType("runtime")
    storage.PoolName = SimpleNamespace(KV="kv")  # type: ignore[attr-defined]
    base.UnifiedCacheLinker = object  # type: ignore[attr-defined]
    runtime.get_serving = lambda: SimpleNamespace(weight_version="3")  # type: ignore[attr-defined]
    for name, module in {
        "sglang": ModuleType("sglang"), "sglang.srt": ModuleType("srt"), "sglang.srt.mem_cache": ModuleType("mem"),
        "sglang.srt.mem_cache.hicache_storage": storage, "sglang.srt.mem_cache.unified_cache": ModuleType("unified"),
        "sglang.srt.mem_cache.unified_cache.unified_cache_linker": base, "sglang.srt.runtime_context": runtime,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    pages = load_module(PAGES)

    def make(value: float = 0.0, limit: int = 1 << 20) -> Any:
        pool = SimpleNamespace(k_buffer=[torch.full((32, 2), value)], v_buffer=[torch.full((32, 2), -value)])
        params = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool), page_size=4)
        return pages.SharedPages(
            None, params, components=None, extra_config={"folder": str(tmp_path / "p"), "limit_bytes": limit}
        )

    return make


def moved(keys: list[str]) -> list[Any]:
    """SGLang's word for these pages in the first slots."""
    return [SimpleNamespace(keys=keys, device_indices=torch.arange(4 * len(keys)))]


def loaded(linker: Any, keys: list[str]) -> bool:
    linker.load("r", moved(keys))
    return bool(linker.finish_layer_wise_loading(linker.start_layer_wise_loading()))


def test_pages_go_from_one_server_to_another(linker: Callable[..., Any]) -> None:
    a, b = linker(2.0), linker()
    assert b.lookup("r", moved(["x", "y"])) == []
    a.offload(moved(["x", "y"]), "s@2")
    assert b.lookup("r", moved(["x"])) == [], "it began under other weights"
    a.offload(moved(["x", "y"]), "s@3")
    assert b.lookup("r", moved(["x", "y", "z"])) == [1, 2]
    assert loaded(b, ["x", "y"])
    assert b._buffers[0][:8].eq(2.0).all()
    assert b._buffers[1][:8].eq(-2.0).all()
    assert b._buffers[0][8:].eq(0.0).all()


@pytest.mark.parametrize("how", ["gone", "cut", "damaged", "another's"])
def test_a_page_that_cannot_be_read_is_not_looked_up_again(how: str, linker: Callable[..., Any]) -> None:
    a, b = linker(2.0), linker()
    a.offload(moved(["x", "y"]), "s@3")
    path = a._path("y")
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "damaged":
        path.write_bytes(b"\1" + path.read_bytes()[1:])
    else:
        path.write_bytes(a._path("x").read_bytes())
    assert not loaded(b, ["x", "y"])
    assert not path.exists()
    path.write_bytes(b"as a file system tells that has heard of nothing yet")
    assert b.lookup("r", moved(["x", "y"])) == [1]
    path.unlink()
    b.offload(moved(["x", "y"]), "s@3")
    assert b.lookup("r", moved(["x", "y"])) == [1, 2], "it has written the page anew"


def test_a_folder_that_fails_costs_computing_and_not_the_server(
    linker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = linker(2.0)
    a.offload(moved(["x"]), "s@3")

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError(116, "Stale file handle")

    for name in ("stat", "iterdir", "read_bytes"):
        monkeypatch.setattr(Path, name, fails)
    monkeypatch.setattr(os, "open", fails)
    assert a.lookup("r", moved(["x"])) == []
    assert a.offload(moved(["y", "z"]), "s@3")
    a._written = 255
    assert a.offload(moved(["w"]), "s@3")
    assert not loaded(a, ["x"])


def test_the_pages_used_longest_ago_go_first(linker: Callable[..., Any]) -> None:
    a = linker(2.0, limit=300)
    a.offload(moved(["a", "b", "c", "d"]), "s@3")
    for age, key in enumerate("dcba"):
        os.utime(a._path(key), (1000.0 - age, 1000.0 - age))
    assert loaded(a, ["a"])
    a._trim()
    assert [key for key in "abcd" if a._path(key).exists()] == ["a", "c", "d"]
