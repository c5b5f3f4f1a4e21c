"""Weights on the real server: every way a version can come, and what happens to calls that run meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, FinishReason, InfrastructureError, PauseMode, WeightSource
from gyre_core.testing.engine_rig import EngineRig, Watched, assert_greedy, call, request_of
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.options import VLLMOptions
from gyre_weights import Publisher
from gyre_weights.collective import broadcast_version
from gyre_weights.groups import StoreServer, form_group

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture
async def engine(real_server: Any, context: ComponentContext) -> Any:
    made = VLLMEngine(VLLMOptions(url=real_server.url), context)
    await made.start(real_server.sources[0])
    yield made
    await made.close()


def rig_of(real_server: Any, *more: WeightSource) -> EngineRig:
    return EngineRig(lambda: None, [*real_server.sources, *more], real_server.vocab)  # type: ignore[arg-type, return-value]


def tensors_of(source: WeightSource) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(Path(source.location) / "model.safetensors"))


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Callable[[str], Publisher]]:
    made: list[Publisher] = []

    def make(kind: str) -> Publisher:
        made.append(Publisher(kind, tmp_path / kind))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("kind", ["disk", "shm", "delta"])
async def test_a_published_version_gives_the_logprobs_of_transformers(
    engine: VLLMEngine, real_server: Any, publisher: Any, kind: str
) -> None:
    """Two versions in a row; the second of kind delta holds only what changed. The tied output layer follows."""
    models = [tensors_of(source) for source in real_server.sources[1:]]
    for name in list(models[1])[3:]:
        models[1][name] = models[0][name]  # so that the delta is one
    config = {"config.json": Path(real_server.sources[0].location) / "config.json"}
    publish = publisher(kind)
    for index, model in enumerate(models):
        published = publish.publish(index + 5, lambda model=model: model.items(), config)
        source = WeightSource(index + 5, published.location, published.kind)
        await engine.update_weights(source)
        whole = Path(published.location)
        if published.kind == "delta":
            from safetensors.torch import save_file

            whole = whole.parent / "whole"
            whole.mkdir()
            save_file(model, whole / "model.safetensors")
            (whole / "config.json").write_bytes(config["config.json"].read_bytes())
        rig = rig_of(real_server, WeightSource(index + 5, str(whole)))
        result = await call(engine, rig.prompt(40), 12, name=f"{kind}{index}")
        assert result.versions == [index + 5] * 12
        assert_greedy(rig, 3, rig.prompt(40), result)
    assert (kind == "delta") == (published.kind == "delta")


async def test_a_broadcast_version_arrives_in_place(engine: VLLMEngine, real_server: Any) -> None:
    """The trainer's process is member 0, the server's worker member 1; a call that runs goes on."""
    rig = rig_of(real_server)
    running = Watched(engine, request_of(rig.prompt(20), real_server.max_context - 40, name="running"))
    await running.until(3)
    store = StoreServer()
    location = f"group://{store.host}:{store.port}/v1?first=1&size=2"

    def send() -> None:
        with form_group((store.host, store.port), "v1", 0, 2, timeout_s=60) as group:
            broadcast_version(group, 1, tensors_of(real_server.sources[1]))

    sending = asyncio.create_task(asyncio.to_thread(send))
    await engine.update_weights(WeightSource(1, location, "collective"))
    await sending
    result = await call(engine, rig.prompt(40), 12, name="after")
    assert_greedy(rig, 1, rig.prompt(40), result)
    mixed = await rig.within(running.task)
    assert mixed.versions == sorted(mixed.versions)
    assert set(mixed.versions) == {0, 1}
    store.close()


async def test_a_broadcast_that_does_not_fit_leaves_the_old_weights(engine: VLLMEngine, real_server: Any) -> None:
    rig, store = rig_of(real_server), StoreServer()
    wrong = tensors_of(real_server.sources[1])
    wrong["model.norm.weight"] = wrong["model.norm.weight"][:7].clone()

    def send() -> None:
        with form_group((store.host, store.port), "bad", 0, 2, timeout_s=60) as group:
            broadcast_version(group, 1, wrong)

    sending = asyncio.create_task(asyncio.to_thread(send))
    with pytest.raises(InfrastructureError, match=r"model\.norm\.weight"):
        await engine.update_weights(
            WeightSource(1, f"group://{store.host}:{store.port}/bad?first=1&size=2", "collective")
        )
    await asyncio.gather(sending, return_exceptions=True)
    assert engine.version == 0
    assert_greedy(rig, 0, rig.prompt(40), await call(engine, rig.prompt(40), 12, name="after"))
    store.close()


async def _cached(engine: VLLMEngine) -> int:
    server = engine._state.server
    assert server is not None
    return (await server.client.load()).cached


@pytest.mark.parametrize("way", ["running", "pause", "abort"])
async def test_no_cached_token_is_used_after_a_change(engine: VLLMEngine, real_server: Any, way: str) -> None:
    """By the server's own counters. Calls run through the change, are kept by a pause, or end and are asked anew."""
    rig = rig_of(real_server)
    # Few and long, so that they are still under way when the change is made; even so they are not always.
    prompts = [rig.prompt(100, seed) for seed in range(2)]
    for index, prompt in enumerate(prompts):
        await call(engine, prompt, 4, name=f"fill{index}")
    before = await _cached(engine)
    again = await call(engine, prompts[0], 4, name="hit")
    assert await _cached(engine) - before == again.cached >= 96
    length = real_server.max_context - 110  # long enough to be under way still when the change arrives
    running = [Watched(engine, request_of(p, length, name=f"r{i}", session=f"s{i}")) for i, p in enumerate(prompts)]
    await asyncio.gather(*(watched.until(4) for watched in running))
    if way != "running":
        await engine.pause(PauseMode.KEEP if way == "pause" else PauseMode.ABORT)
    cut = [await rig.within(w.task) for w in running] if way == "abort" else []
    before = await _cached(engine)
    await engine.update_weights(real_server.sources[1])
    if way != "running":
        await engine.resume()
    if way == "abort":
        contexts = [[*p, *c.ids] for p, c in zip(prompts, cut, strict=True) if c.finish is FinishReason.ABORT]
        if not contexts:
            pytest.skip("every call had ended before the pause was made: this run shows nothing")
        ended = [await call(engine, context, 20, name=f"on{i}") for i, context in enumerate(contexts)]
        for context, result in zip(contexts, ended, strict=True):
            assert result.cached == 0
            assert_greedy(rig, 1, context, result)
        assert await _cached(engine) == before
        await engine.flush_cache()
    else:
        results = [await rig.within(watched.task) for watched in running]
        borders = [result.versions.count(0) for result in results]
        if min(borders) == length:
            pytest.skip("every call had ended before the change was made: this run shows nothing")
        for prompt, result, border in zip(prompts, results, borders, strict=True):
            assert result.versions == [0] * border + [1] * (length - border)
            assert border >= 4
            oracle = rig.oracle(0)
            assert oracle.margin(prompt, result.ids[:border]) <= rig.tolerance
            expected = oracle.of_sampled(prompt, result.ids[:border])
            assert result.logprobs[:border] == pytest.approx(expected, abs=rig.tolerance)
            # The next token comes from mixed KV, which no oracle has; it must not be the old weights' own.
            old = oracle.of_sampled(prompt, result.ids)[border:]
            gaps = [abs(a - b) for a, b in zip(old, result.logprobs[border:], strict=True)]
            assert border == length or max(gaps) > 0.1
    for index, prompt in enumerate(prompts):
        result = await call(engine, prompt, 4, name=f"new{index}")
        assert result.versions == [1] * 4
        assert result.cached == 0
        assert_greedy(rig, 1, prompt, result)
    assert await _cached(engine) == before
    assert (await call(engine, prompts[0], 4, name="hit again")).cached >= 96
