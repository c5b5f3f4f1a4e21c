"""Weights, pauses and sleep against the fake, whose tokens tell which weights sampled them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gyre_core import (
    CapabilityError,
    ComponentContext,
    FinishReason,
    InfrastructureError,
    PauseMode,
    WeightSource,
    seed_of,
)
from gyre_vllm.engine import VLLMEngine
from gyre_vllm.labels import VersionLabels
from gyre_vllm.weights import read_version
from gyre_weights import publish_full
from hypothesis import given, settings
from hypothesis import strategies as st


def assert_true_versions(fake: ModuleType, prompt: list[int], result: Any) -> None:
    """Each token and logprob is that of the weights its version names: the one check nothing can hide from."""
    ids = list(prompt)
    for token, version, logprob in zip(result.ids, result.versions, result.logprobs, strict=True):
        assert token == fake.token_after(ids, 10 + version), f"token {len(ids) - len(prompt)} labelled {version}"
        assert logprob == fake.logprob_of(10 + version)
        ids.append(token)


async def until(chunks: list[Any], count: int, task: asyncio.Task[Any]) -> None:
    while len(chunks) < count and not task.done():
        await asyncio.sleep(0.001)


CASES = [
    {"every": 1, "hold": 0.0}, {"every": 6, "hold": 0.0}, {"every": 1, "hold": 0.03},
    {"every": 1, "hold": 0.0, "on_update": "recompute"}, {"every": 4, "hold": 0.02, "on_update": "recompute"},
    {"every": 1, "hold": 0.01, "extension": False}, {"every": 5, "hold": 0.0, "extension": False},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_each_token_bears_the_version_that_sampled_it(
    served: Any, ask: Any, fake: ModuleType, sources: list[WeightSource], case: dict[str, Any]
) -> None:
    """Also when tokens reach us long after they were sampled, when calls wait for a slot, and three times over."""
    options = {"stream_tokens": case["every"], "on_update": case.get("on_update", "keep")}
    server, engine = await served(options, extension=case.get("extension", True))
    server.hold_s, server.most = case["hold"], 50  # of 60: the first change comes before any end
    prompts = [[i, 3 * i + 1] for i in range(9)]
    into: list[list[Any]] = [[] for _ in prompts]
    tasks = [
        asyncio.create_task(ask(engine, p, 60, name=f"c{i}", into=into[i], temperature=0.0))
        for i, p in enumerate(prompts)
    ]
    for source in (sources[1], sources[2], sources[0]):
        await until(into[0], len(into[0]) + 2, tasks[0])
        await engine.update_weights(source)
        assert engine.version == source.version
        server.most = 60
    results = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for prompt, result in zip(prompts, results, strict=True):
        assert len(result.ids) == 60
        assert result.finish is FinishReason.LENGTH
        assert_true_versions(fake, prompt, result)
    assert len(set(results[0].versions)) > 1, "the changes came too late to test anything"
    assert not engine._state.calls


async def test_no_kv_of_old_weights_is_found(served: Any, ask: Any, sources: list[WeightSource]) -> None:
    """Not of ended calls, not of calls that waited or ran through the change, not after going back."""
    _, engine = await served(slots=1)
    prompt = list(range(50))
    await ask(engine, prompt, 4, name="fill")
    chunks: list[Any] = []
    holder = asyncio.create_task(ask(engine, [9], 80, name="holder", into=chunks))
    await until(chunks, 2, holder)
    waiting = asyncio.create_task(ask(engine, prompt, 4, name="waiting"))
    await asyncio.sleep(0.01)
    await engine.update_weights(sources[1])
    found = await waiting
    assert found.versions == [1] * 4
    assert found.cached == 0
    await holder
    await engine.update_weights(sources[0])
    assert (await ask(engine, prompt, 4, name="back")).cached == 0
    assert (await ask(engine, prompt, 4, name="again")).cached > 0
    await engine.flush_cache()
    assert (await ask(engine, prompt, 4, name="flushed")).cached == 0


async def test_no_kv_of_another_engine_is_found(
    served: Any, ask: Any, context: ComponentContext, sources: list[WeightSource]
) -> None:
    """On a server that was in use before and refuses to drop its prefix cache; under the same version's number."""
    server, first = await served()
    prompt = list(range(50))
    await ask(first, prompt, 4)
    assert (await ask(first, prompt, 4)).cached > 0
    await first.close()
    server.faults.add("reset-refused")
    second = VLLMEngine(first.options, context)
    await second.start(WeightSource(0, sources[1].location))
    assert (await ask(second, prompt, 4)).cached == 0
    await second.close()


@pytest.mark.parametrize("how", ["connector", "recompute", "no extension"])
async def test_a_call_that_goes_on_under_new_weights_draws_other_random_numbers(
    served: Any, ask: Any, sources: list[WeightSource], how: str
) -> None:
    """A server counts a seed's random numbers from a segment's first token: those that the tokens before were drawn
    with must not come again. What is sent is a function of the call's own seed."""
    options = {"on_update": "recompute"} if how == "recompute" else {}
    server, engine = await served(options, extension=how != "no extension")
    if how == "connector":
        server.faults.add("connector")
        await engine.close()
        engine = VLLMEngine(engine.options, ComponentContext(".", "again"))
        await engine.start(sources[0])
    for seed in (7, None):
        server.bodies.clear()
        chunks: list[Any] = []
        server.most = 20
        task = asyncio.create_task(ask(engine, [4, 5], 60, name=f"c{seed}", into=chunks, seed=seed, temperature=1.0))
        await until(chunks, 3, task)
        await engine.update_weights(sources[1])
        server.most = 60
        assert len((await task).ids) == 60
        sent = [(len(body["token_ids"]) - 2, body["sampling_params"].get("seed")) for body in server.bodies]
        (before, first), (after, second) = sent
        assert (before, first) == (0, seed)
        assert after > 0
        assert second == (None if seed is None else seed_of(seed, after))
    await engine.close()


async def test_a_call_whose_answer_is_cut_behind_its_last_token_is_over(
    served: Any, ask: Any, sources: list[WeightSource]
) -> None:
    """There is nothing left to go on with."""
    server, engine = await served({"on_update": "recompute"})
    server.faults.add("late-end")
    task = asyncio.create_task(ask(engine, [4], 5))
    while server.totals["generation"] != 5:
        await asyncio.sleep(0.002)
    await engine.update_weights(sources[1])
    server.faults.clear()
    result = await asyncio.wait_for(task, 60)
    assert (result.versions, result.finish) == ([0] * 5, FinishReason.LENGTH)


async def test_an_update_that_cannot_be_read_does_not_even_pause(
    served: Any, ask: Any, fake: ModuleType, sources: list[WeightSource], tmp_path: Path
) -> None:
    server, engine = await served()
    short = Path(fake.write_weights(tmp_path / "short", 50)) / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-3])
    other = fake.write_weights(tmp_path / "other", 50, names=("w", "lm_head.weight", "extra"))
    for location in (str(tmp_path / "missing"), str(short.parent), other):
        with pytest.raises(InfrastructureError):
            await engine.update_weights(WeightSource(9, location))
    with pytest.raises(CapabilityError):
        await engine.update_weights(WeightSource(9, sources[1].location, "pigeon"))
    assert "pause" not in server.log[server.log.index("resume") :]
    assert engine.version == 0
    assert (await ask(engine, [1], 5)).versions == [0] * 5


async def test_a_version_of_other_contents_is_refused(
    served: Any, serves: Any, tmp_path: Path, sources: list[WeightSource]
) -> None:
    """A run that was set back publishes a version a second time: whoever has heard of one must not load the other."""
    names, config = ("w", "lm_head.weight"), (Path(sources[1].location) / "config.json").read_bytes()
    tensors = ((name, np.asarray([11], np.int64)) for name in names)
    published = publish_full(tmp_path / "published", 1, tensors, extras={"config.json": config})
    _, engine = await served()
    with pytest.raises(InfrastructureError, match="contents"):
        await engine.update_weights(WeightSource(1, published.location, digest="0" * 16))
    await serves(engine, 0, [1])
    told = WeightSource(1, published.location, digest=published.digest)
    assert read_version(told, "reading").digest == published.digest


@pytest.mark.parametrize("fault", ["load-fails", "worker-error"])
async def test_a_load_that_fails_brings_the_old_weights_back(
    served: Any, ask: Any, fake: ModuleType, sources: list[WeightSource], fault: str
) -> None:
    """Whether the server says so or a worker's own answer does."""
    server, engine = await served()
    chunks: list[Any] = []
    task = asyncio.create_task(ask(engine, [4], 120, into=chunks))
    await until(chunks, 2, task)
    server.faults.add(fault)
    with pytest.raises(InfrastructureError, match=r"load failed|worker failed"):
        await engine.update_weights(sources[1])
    assert engine.version == 0
    result = await task
    assert result.versions == [0] * 120
    assert_true_versions(fake, [4], result)


async def test_a_pause_keeps_calls_and_holds_new_ones(
    served: Any, ask: Any, fake: ModuleType, sources: list[WeightSource]
) -> None:
    _, engine = await served()
    chunks: list[Any] = []
    kept = asyncio.create_task(ask(engine, [4], 100, name="kept", into=chunks))
    await until(chunks, 2, kept)
    await engine.pause()
    sampled = (await engine.load()).sampled_tokens
    late = asyncio.create_task(ask(engine, [5], 5, name="late"))
    doomed = asyncio.create_task(ask(engine, [6], 5, name="doomed"))
    await asyncio.sleep(0.05)
    load = await engine.load()
    assert load.sampled_tokens == sampled
    assert load.waiting == 2
    assert await engine.abort("doomed") is True
    assert (await doomed).finish is FinishReason.ABORT
    await engine.update_weights(sources[1])
    await engine.resume()
    assert (await late).versions == [1] * 5
    result = await kept
    assert_true_versions(fake, [4], result)
    assert set(result.versions) == {0, 1}


async def test_a_pause_may_end_the_calls(served: Any, ask: Any) -> None:
    _, engine = await served(slots=1)
    into: list[list[Any]] = [[], [], []]
    tasks = [asyncio.create_task(ask(engine, [i], 200, name=f"c{i}", into=into[i])) for i in range(3)]
    await until(into[0], 2, tasks[0])
    await engine.pause(PauseMode.ABORT)
    assert all(result.finish is FinishReason.ABORT for result in await asyncio.wait_for(asyncio.gather(*tasks), 60))
    await engine.resume()
    assert len((await ask(engine, [1], 5)).ids) == 5


async def test_sleep_and_wake(served: Any, ask: Any, sources: list[WeightSource]) -> None:
    server, engine = await served()
    prompt = list(range(40))
    await ask(engine, prompt, 4)
    chunks: list[Any] = []
    task = asyncio.create_task(ask(engine, [4], 200, name="run", into=chunks))
    await until(chunks, 2, task)
    await engine.sleep()
    assert (await task).finish is FinishReason.ABORT
    assert server.asleep
    assert (await engine.load()).slots_total == 0
    with pytest.raises(InfrastructureError):
        await ask(engine, [1], 2)
    with pytest.raises(InfrastructureError):
        await engine.sleep()
    await engine.wake(sources[2])
    with pytest.raises(InfrastructureError):
        await engine.wake(sources[2])
    result = await ask(engine, prompt, 4)
    assert result.versions == [2] * 4
    assert result.cached == 0
    assert set(engine.timings) == {"start", "sleep", "wake"}


async def test_workers_are_given_no_time_for_their_answers(served: Any, ask: Any, sources: list[WeightSource]) -> None:
    """They answer in order and without names: an answer that vLLM's executor has given up is taken for the next one."""
    server, engine = await served()
    await ask(engine, [1], 3)
    await engine.update_weights(sources[1])
    await engine.sleep()
    await engine.wake(sources[2])
    assert {"gyre_load", "gyre_sleep", "gyre_wake"} <= {order["method"] for order in server.orders}
    assert not [order for order in server.orders if order.get("timeout") is not None]


async def test_somebody_elses_change_of_weights_is_found_out(served: Any, ask: Any) -> None:
    """The server's own spans are compared with ours at the end of each answer."""
    server, engine = await served()
    server.faults.add("spans")
    with pytest.raises(InfrastructureError, match="Somebody else"):
        await ask(engine, [1], 5)


async def test_a_newer_server_is_warned_of(served: Any, sources: Any, caplog: pytest.LogCaptureFixture) -> None:
    server, engine = await served(start=False)
    server.faults.add("newer")
    with caplog.at_level(logging.WARNING, "gyre.vllm"):
        await engine.start(sources[0])
    assert "0.33.1" in caplog.text
    assert "0.32" in caplog.text


@given(changes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8), cuts=st.lists(st.integers(1, 7)))
@settings(max_examples=200)
def test_labels_do_not_depend_on_how_tokens_arrive(changes: list[tuple[int, int]], cuts: list[int]) -> None:
    labels, oracle, floor = VersionLabels(), [9] * 40, 0
    labels.change(0, 9)
    for step, version in changes:
        floor = max(floor, step)
        labels.change(floor, version)
        oracle[floor:] = [version] * (40 - floor)
    at = 0
    for cut in cuts:
        count = min(cut, 40 - at)
        assert list(labels.of(at, count)) == oracle[at : at + count]
        at += count
