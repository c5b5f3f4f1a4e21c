"""Weights on the real server: every way a version can come, and what happens to calls that run meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, FinishReason, InfrastructureError, PauseMode, WeightSource
from gyre_core.testing.engine_rig import (
    Called,
    EngineRig,
    Watched,
    assert_greedy,
    call,
    eventually,
    is_idle,
    request_of,
)
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


_AFTER = 24
"""Tokens of the new version that a call shall have before it is left."""
_ATTEMPTS = 4
"""A starved server may tell its first tokens when all are sampled already: then the change met no call."""


async def _change_under(
    engine: VLLMEngine, rig: EngineRig, running: list[Watched], way: str, new: WeightSource
) -> list[Called]:
    """Make the change while the calls run; what they had at the end (`abort`) or `_AFTER` tokens later."""
    await asyncio.gather(*(watched.until(4) for watched in running))
    if way != "running":
        await engine.pause(PauseMode.KEEP if way == "pause" else PauseMode.ABORT)
    cut = [await rig.within(watched.task) for watched in running] if way == "abort" else []
    await engine.update_weights(new)
    if way != "running":
        await engine.resume()
    if way == "abort":
        return cut
    for watched in running:
        while not watched.task.done() and [v for c in watched.chunks for v in c.versions].count(new.version) < _AFTER:
            await rig.within(watched.until(len(Called(tuple(watched.chunks)).ids) + 1))
        watched.task.cancel()
    await asyncio.gather(*(watched.task for watched in running), return_exceptions=True)
    assert await eventually(functools.partial(is_idle, engine))
    return [Called(tuple(watched.chunks)) for watched in running]


def _assert_spans_both(rig: EngineRig, prompt: list[int], result: Called, versions: tuple[int, int]) -> None:
    """Tokens up to the border are the old weights' own, with their logprobs; those after it are not."""
    border = result.versions.count(versions[0])
    assert result.versions == [versions[0]] * border + [versions[1]] * (len(result.ids) - border)
    assert border >= 4
    oracle = rig.oracle(0)
    assert oracle.margin(prompt, result.ids[:border]) <= rig.tolerance
    old = oracle.of_sampled(prompt, result.ids)
    assert result.logprobs[:border] == pytest.approx(old[:border], abs=rig.tolerance)
    # The next token comes from mixed KV, which no oracle has; it must not be the old weights' own.
    gaps = [abs(a - b) for a, b in zip(old[border:], result.logprobs[border:], strict=True)]
    assert max(gaps) > 0.1


@pytest.mark.parametrize("way", ["running", "pause", "abort"])
async def test_no_cached_token_is_used_after_a_change(engine: VLLMEngine, real_server: Any, way: str) -> None:
    """By the server's own counters. Calls run through the change, are kept by a pause, or end and are asked anew."""
    rig, length = rig_of(real_server), real_server.max_context - 110
    prompts = [rig.prompt(100, seed) for seed in range(2)]
    for attempt in range(_ATTEMPTS):
        old, new = (WeightSource(2 * attempt + i, real_server.sources[i].location) for i in range(2))
        if attempt:
            await engine.update_weights(old)
        for index, prompt in enumerate(prompts):
            await call(engine, prompt, 4, name=f"fill{attempt}{index}")
        before = await _cached(engine)
        again = await call(engine, prompts[0], 4, name=f"hit{attempt}")
        assert await _cached(engine) - before == again.cached >= 96
        running = [
            Watched(engine, request_of(p, length, name=f"r{attempt}{i}", session=f"s{attempt}{i}"))
            for i, p in enumerate(prompts)
        ]
        # Read before they are cut: what runs has been looked up in the cache by then.
        await asyncio.gather(*(watched.until(1) for watched in running))
        before = await _cached(engine)
        met = await _change_under(engine, rig, running, way, new)
        if way == "abort":
            whole = [result.finish is not FinishReason.ABORT for result in met]
        else:
            whole = [new.version not in result.versions for result in met]
        if not any(whole):
            break
    else:
        pytest.fail(f"in {_ATTEMPTS} attempts a call of {length} tokens had always ended before the change was made")
    if way == "abort":
        contexts = [[*p, *c.ids] for p, c in zip(prompts, met, strict=True)]
        ended = [await call(engine, context, 20, name=f"on{i}") for i, context in enumerate(contexts)]
        for context, result in zip(contexts, ended, strict=True):
            assert result.cached == 0
            assert_greedy(rig, 1, context, result)
        assert await _cached(engine) == before
        await engine.flush_cache()
    else:
        for prompt, result in zip(prompts, met, strict=True):
            _assert_spans_both(rig, prompt, result, (old.version, new.version))
    for index, prompt in enumerate(prompts):
        result = await call(engine, prompt, 4, name=f"new{index}")
        assert result.versions == [new.version] * 4
        assert result.cached == 0
        assert_greedy(rig, 1, prompt, result)
    assert await _cached(engine) == before
    assert (await call(engine, prompts[0], 4, name="hit again")).cached >= 96
