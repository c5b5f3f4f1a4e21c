"""Against a real server with weights that move: versions, cached tokens, all ways a version can come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gyre_weights as gw
import pytest
import pytest_asyncio
import torch
from gyre_core import ComponentContext, FinishReason, InfrastructureError, PauseMode, WeightSource
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, request_of
from gyre_sglang.engine import SGLangEngine
from gyre_sglang.options import SGLangOptions
from gyre_weights.collective import broadcast_version
from gyre_weights.groups import StoreServer, form_group
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [(7 * i + 3) % 320 for i in range(90)]


@pytest.fixture(scope="module")
def rig(folder_of: Callable[..., Path]) -> EngineRig:
    return EngineRig(lambda: None, [WeightSource(n, str(folder_of(n))) for n in range(2)], vocab=320)  # type: ignore[arg-type, return-value]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def engine(python: str, rig: EngineRig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SGLangEngine]:
    """One engine, with a server of its own, for this file."""
    context = ComponentContext(str(tmp_path_factory.mktemp("run")), "cell-0", seed=7)
    options = SGLangOptions(python=python, dtype="float32", kv_tokens=8192, context_length=256, chunk_s=0.0)
    engine = SGLangEngine(options, context)
    await engine.start(rig.sources[0])
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def at_zero(engine: SGLangEngine, rig: EngineRig) -> SGLangEngine:
    await engine.update_weights(rig.sources[0])
    return engine


def tensors_of(source: WeightSource) -> dict[str, torch.Tensor]:
    return load_file(str(next(Path(source.location).glob("*.safetensors"))))


def extras_of(source: WeightSource) -> dict[str, Path]:
    return {"config.json": Path(source.location) / "config.json"}


async def test_each_token_has_its_version_and_no_old_cached_token_is_used(at_zero: Any, rig: EngineRig) -> None:
    """By the server's own counts of cached tokens; with an update in mid-call, one in a pause, one across an abort."""
    engine = at_zero
    before = await call(engine, PROMPT, 5, name="before")
    assert (await call(engine, PROMPT, 5, name="warm")).cached == 80
    running = Watched(engine, request_of(PROMPT, 150, name="r", temperature=1.0))
    await running.until(4)
    await engine.update_weights(rig.sources[1])
    result = await running.task
    border = result.versions.count(0)
    assert 4 <= border < 150
    assert result.versions == [0] * border + [1] * (150 - border)
    expected = rig.oracle(0).of_sampled(PROMPT, result.ids[:border])
    assert result.logprobs[:border] == pytest.approx(expected, abs=1e-3)
    after = await call(engine, PROMPT, 5, name="after")
    assert after.cached == 0
    assert_greedy(rig, 1, PROMPT, after)
    assert after.ids != before.ids
    assert (await call(engine, PROMPT, 5, name="again")).cached == 80


async def test_pause_update_resume_and_abort_update_go_on(at_zero: Any, rig: EngineRig) -> None:
    engine = at_zero
    kept = Watched(engine, request_of(PROMPT, 120, name="kept", temperature=1.0))
    cut = Watched(engine, request_of(PROMPT[:50], 120, name="cut", temperature=1.0))
    await asyncio.gather(kept.until(3), cut.until(3))
    assert await engine.abort("cut")
    part = await cut.task
    assert part.finish is FinishReason.ABORT
    await engine.pause(PauseMode.KEEP)
    await engine.update_weights(rig.sources[1])
    await engine.resume()
    result = await kept.task
    assert result.versions == sorted(result.versions)
    assert {0, 1} == set(result.versions)
    on = await call(engine, [*PROMPT[:50], *part.ids], 6, name="on")
    assert on.cached == 0
    assert on.versions == [1] * 6
    assert_greedy(rig, 1, [*PROMPT[:50], *part.ids], on)


async def paused_in_mid_call(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A call that is to be computed again when weights change."""
    monkeypatch.setattr(engine, "options", replace(engine.options, on_update="recompute"))
    running = Watched(engine, request_of(PROMPT, 120, name="again", temperature=1.0))
    await running.until(3)
    await engine.pause(PauseMode.KEEP)
    return running


async def test_what_is_computed_again_may_be_paused(
    at_zero: Any, rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = at_zero
    running = await paused_in_mid_call(engine, monkeypatch)
    async with asyncio.timeout(50):  # less than the engine's patience with a call that does not end
        await engine.update_weights(rig.sources[1])
    await engine.resume()
    result = await running.task
    assert result.versions == sorted(result.versions)
    assert {0, 1} == set(result.versions)
    border = result.versions.count(0)
    expected = rig.oracle(1).of_sampled([*PROMPT, *result.ids[:border]], result.ids[border:])
    assert result.logprobs[border:] == pytest.approx(expected, abs=1e-3)


async def test_what_fails_while_it_is_computed_again_leaves_it_paused(
    at_zero: Any, rig: EngineRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has to go on for a moment, and the change is given up in that moment."""
    engine = at_zero
    running = await paused_in_mid_call(engine, monkeypatch)
    changing = asyncio.create_task(engine.update_weights(rig.sources[1]))
    while not engine._server.running:
        await asyncio.sleep(0)
    changing.cancel()
    await asyncio.wait([changing])
    assert changing.cancelled()
    asking = Watched(engine, request_of(PROMPT, 5, name="later"))
    await asyncio.sleep(0.2)
    had = len(running.chunks)
    await asyncio.sleep(0.5)
    assert len(running.chunks) == had < 120
    assert not asking.chunks
    await engine.resume()
    assert (await running.task).versions == [0] * 120
    assert_greedy(rig, 0, PROMPT, await asking.task)


async def test_versions_in_shared_memory_and_as_deltas(at_zero: Any, rig: EngineRig, tmp_path: Path) -> None:
    engine, root = at_zero, tmp_path / "weights"
    tensors = tensors_of(rig.sources[0])
    torch.manual_seed(3)
    full = gw.publish_full(root, 5, tensors.items(), kind="shm", extras=extras_of(rig.sources[0]))
    await engine.update_weights(WeightSource(5, full.location, "shm"))
    shadow = gw.Shadow(5, full.digest, gw.open_version(full.location))
    for version in (6, 7):
        for name in [n for n in tensors if "mlp" in n or "embed" in n][:: version - 4]:
            rows = torch.randint(0, tensors[name].shape[0], (3,))
            tensors[name][rows] += 0.5 * torch.randn(3, tensors[name].shape[1])
        made = gw.publish_delta(root, version, tensors.items(), shadow, extras=extras_of(rig.sources[0]))
        await engine.update_weights(WeightSource(version, made.location, "delta"))
        order = (engine._server.orders / "order.json").read_text()
        assert '"all": false' in order
        expected = write_folder(tmp_path / f"x{version}", tensors, rig)
        assert_greedy_of(rig, expected, PROMPT, await call(engine, PROMPT, 8, name=f"d{version}"))
    await engine.sleep()
    await engine.wake(WeightSource(7, made.location, "delta"))
    awake = await call(engine, PROMPT, 8, name="awake")
    assert awake.versions == [7] * 8
    assert_greedy_of(rig, expected, PROMPT, awake)


async def test_no_two_lives_of_a_server_sample_the_same(at_zero: Any, rig: EngineRig) -> None:
    """Calls without a seed; each server would begin with the same random numbers under one seed."""
    engine, found = at_zero, []
    for life in range(2):
        await engine.sleep()
        await engine.wake(rig.sources[0])
        found.append((await call(engine, PROMPT, 30, name=f"life{life}", temperature=3.0)).ids)
    assert found[0] != found[1]


async def test_a_group_broadcasts_a_version(at_zero: Any, rig: EngineRig, tmp_path: Path) -> None:
    engine = at_zero
    tensors = {name: value + 0.2 * torch.randn_like(value) for name, value in tensors_of(rig.sources[0]).items()}
    store = StoreServer()
    location = f"group://{store.host}:{store.port}/v8?first=1&size=2&backend=gloo"
    sender = threading.Thread(target=broadcast, args=(store, "v8", 8, tensors))
    running = Watched(engine, request_of(PROMPT, 150, name="r", temperature=1.0))
    await running.until(3)
    sender.start()
    await engine.update_weights(WeightSource(8, location, "collective"))
    sender.join()
    assert set((await running.task).versions) == {0, 8}
    expected = write_folder(tmp_path / "x", tensors, rig)
    result = await call(engine, PROMPT, 8, name="g")
    assert result.versions == [8] * 8
    assert_greedy_of(rig, expected, PROMPT, result)
    wrong = {name: value[:1] for name, value in tensors.items()}
    sender = threading.Thread(target=broadcast, args=(store, "v9", 9, wrong))
    sender.start()
    with pytest.raises(InfrastructureError, match="expected"):
        await engine.update_weights(WeightSource(9, location.replace("v8", "v9"), "collective"))
    sender.join()
    store.close()
    again = await call(engine, PROMPT, 8, name="unharmed")
    assert (again.ids, again.versions) == (result.ids, result.versions)
    await engine.sleep()
    await engine.wake(rig.sources[1])
    assert_greedy(rig, 1, PROMPT, await call(engine, PROMPT, 5, name="awake"))


def broadcast(store: Any, name: str, version: int, tensors: dict[str, torch.Tensor]) -> None:
    with form_group((store.host, store.port), name, 0, 2, timeout_s=60) as group:
        try:
            broadcast_version(group, version, tensors)
        except gw.PeerError:
            assert name == "v9"


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], rig: EngineRig) -> Path:
    """A model folder for the oracle."""
    folder.mkdir()
    (folder / "config.json").write_bytes((Path(rig.sources[0].location) / "config.json").read_bytes())
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def assert_greedy_of(rig: EngineRig, folder: Path, prompt: list[int], result: Any) -> None:
    other = EngineRig(rig.make, [WeightSource(0, str(folder))], vocab=rig.vocab)
    assert_greedy(other, 0, prompt, result)


async def test_a_trainers_versions_give_the_same_logprobs_here_and_in_gyre_local(
    at_zero: Any, rig: EngineRig, tmp_path: Path
) -> None:
    """Random new weights through the embedded trainer's `publish`, into both engines."""
    local = pytest.importorskip("gyre_local.serve.engine")
    from gyre_local.options import LocalEngineOptions, LocalTrainerOptions
    from gyre_local.train.trainer import LocalTrainer

    engine = at_zero
    context = ComponentContext(str(tmp_path), "cell-1", seed=7)
    trainer = LocalTrainer(LocalTrainerOptions(dtype="float32"), context)
    await trainer.start(rig.sources[1], core=True)
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in trainer._replica.model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    source = await trainer.publish(str(tmp_path / "weights"))
    await trainer.close()
    other = local.LocalEngine(LocalEngineOptions(kv_tokens=4096), context)
    await other.start(source)
    await engine.update_weights(source)
    here = await call(engine, PROMPT, 40, name="h")
    there = await call(other, PROMPT, 40, name="t")
    assert here.ids == there.ids
    assert here.logprobs == pytest.approx(there.logprobs, abs=1e-3)
    assert here.versions == there.versions == [source.version] * 40
    await other.close()
