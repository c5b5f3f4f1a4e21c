"""What goes wrong inside the engine hits the calls it belongs to and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_core import (
    CapabilityError,
    ComponentContext,
    ConfigError,
    FinishReason,
    GenerateRequest,
    InfrastructureError,
    SamplingParams,
    WeightSource,
)
from gyre_local.options import LocalEngineOptions
from gyre_local.serve import passes, worker
from gyre_local.serve.engine import LocalEngine
from safetensors.torch import load_file, save_file

POISON = 319


@pytest.fixture
def poisoned(folder_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A model whose embedding of one token is NaN (untied, so that no logit is)."""
    folder = tmp_path / "poisoned"
    shutil.copytree(folder_of("qwen3-untied"), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("at", [0, 70, 129], ids=["first chunk", "a later chunk", "last token"])
async def test_nan_fails_its_own_call_and_leaves_no_trace(
    at: int, poisoned: Path, context: ComponentContext, oracle_of: Any, ask: Any
) -> None:
    engine = LocalEngine(LocalEngineOptions(kv_tokens=1024, prefill_tokens=64, max_running=3), context)
    await engine.start(WeightSource(4, str(poisoned)))
    prompt = [(7 * i) % 300 for i in range(130)]
    bad = [*prompt[:at], POISON, *prompt[at + 1 :]]
    neighbour = asyncio.create_task(ask(engine, prompt[:40], 40, name="good", session="g"))
    with pytest.raises(InfrastructureError, match=r"'bad' \(session 'b'\) under policy version 4.*not finite"):
        await ask(engine, bad, 5, name="bad", session="b")
    good = await neighbour
    ids, logprobs = oracle_of("qwen3-untied").greedy(prompt[:40], 40)
    assert good.ids == ids
    assert good.logprobs == pytest.approx(logprobs, abs=1e-4)
    for index in range(8):  # through every slot and block that the failed call had
        result = await ask(engine, prompt[index:], 3, name=f"after{index}")
        ids, _ = oracle_of("qwen3-untied").greedy(prompt[index:], 3)
        assert result.ids == ids
    with pytest.raises(InfrastructureError):
        await ask(engine, bad, 5, name="bad again")
    assert (await engine.load()).kv_tokens_used == 0
    await engine.close()


async def test_nan_of_a_sampled_token_fails_in_decoding(poisoned: Path, context: ComponentContext, ask: Any) -> None:
    """A call that samples the poisoned token keeps what it had: the error comes when that token is an input."""
    engine = LocalEngine(LocalEngineOptions(kv_tokens=1024, chunk_tokens=1), context)
    await engine.start(WeightSource(0, str(poisoned)))
    tensors = load_file(poisoned / "model.safetensors")
    tensors["lm_head.weight"][:] *= 0.01
    tensors["lm_head.weight"][POISON] = 0
    folder = poisoned.with_name("wants")
    shutil.copytree(poisoned, folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    await engine.update_weights(WeightSource(1, str(folder)))
    seen: list[int] = []

    async def run() -> None:
        request = GenerateRequest("a", "a", [1, 2, 3], SamplingParams(1000, temperature=1.0, seed=1))
        async for chunk in engine.generate(request):
            seen.extend(chunk.token_ids)

    with pytest.raises(InfrastructureError, match="not finite"):
        await run()
    assert seen[-1] == POISON
    assert await ask(engine, [5, 6], 1, name="b")
    await engine.close()


async def test_a_failing_pass_fails_its_calls_and_the_engine_goes_on(
    engines: Any, ask: Any, oracle_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await engines()
    real, left = passes.forward, [2]

    def forward(*args: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("out of memory, injected")
        return real(*args)

    monkeypatch.setattr(passes, "forward", forward)
    results = await asyncio.gather(
        ask(engine, [1, 2, 3], 9, name="a"), ask(engine, [4, 5], 9, name="b"), return_exceptions=True
    )
    assert all(isinstance(result, InfrastructureError) for result in results)
    assert "out of memory, injected" in str(results[0])
    after = await ask(engine, [1, 2, 3], 9, name="c")
    assert after.ids == oracle_of().greedy([1, 2, 3], 9)[0]
    assert (await engine.load()).kv_tokens_used == 0


async def test_a_broken_core_leaves_nobody_waiting(engines: Any, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await engines()

    def step(core: Any) -> bool:
        raise AssertionError("injected") if core.waiting else RuntimeError("injected")

    monkeypatch.setattr(worker, "step", step)
    with pytest.raises(InfrastructureError):
        await asyncio.wait_for(ask(engine, [1, 2, 3], 9), 60)
    for question in (engine.load(), engine.pause(), engine.kv_pin("s"), ask(engine, [1], 2, name="later")):
        with pytest.raises(InfrastructureError, match="ended"):
            await asyncio.wait_for(question, 60)


async def test_a_request_id_is_used_once_at_a_time(engines: Any, ask: Any) -> None:
    engine = await engines()
    await engine.pause()
    first = asyncio.create_task(ask(engine, [1, 2, 3], 60, name="same"))
    while (await engine.load()).waiting < 1:
        await asyncio.sleep(0.001)
    with pytest.raises(ValueError, match="running already"):
        await asyncio.wait_for(ask(engine, [1, 2], 4, name="same"), 60)
    await engine.resume()
    assert len((await first).ids) == 60
    assert len((await ask(engine, [1, 2], 4, name="same")).ids) == 4


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"use_sliding_window": True}, "sliding"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value,
)
async def test_a_model_it_would_compute_wrongly_is_refused(
    change: dict[str, Any], match: str, folder_of: Callable[..., Path], tmp_path: Path, context: ComponentContext
) -> None:
    config = json.loads((folder_of() / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    with pytest.raises(ConfigError, match=match):
        await LocalEngine(None, context).start(WeightSource(0, str(tmp_path)))


async def test_weights_that_are_cut_or_of_another_model_are_refused(
    engines: Any, ask: Any, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    engine = await engines()
    before = await ask(engine, [1, 2, 3], 5, name="a")
    cut = tmp_path / "cut"
    shutil.copytree(folder_of("qwen3", 1), cut)
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[: len(content) // 2])
    missing = tmp_path / "missing"
    shutil.copytree(folder_of("qwen3", 1), missing)
    tensors = load_file(missing / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, missing / "model.safetensors")
    more = tmp_path / "more"
    shutil.copytree(folder_of("qwen3", 1), more)
    tensors = load_file(more / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(96)
    save_file(tensors, more / "model.safetensors")
    bad = ((cut, "cut"), (missing, "up_proj"), (more, r"up_proj\.bias"), (folder_of("llama"), "architecture"))
    for folder, match in bad:
        with pytest.raises(InfrastructureError, match=match):
            await engine.update_weights(WeightSource(1, str(folder)))
    with pytest.raises(CapabilityError):
        await engine.update_weights(WeightSource(1, "somewhere", "collective"))
    assert engine.version == 0
    await engine.flush_cache()
    assert (await ask(engine, [1, 2, 3], 5, name="b")).ids == before.ids


async def test_sleep_is_refused_while_somebody_reads_the_pool(engines: Any, ask: Any, folder_of: Any) -> None:
    engine = await engines(move_patience=0.05)
    await ask(engine, list(range(40)), 4, session="s")
    pinned = await engine.kv_pin("s")
    with pytest.raises(InfrastructureError, match="'s'"):
        await engine.sleep()
    await engine.kv_release("s", pinned.generation, forget=False)
    assert await engine.kv_reserve("t", 20, 0) is not None
    with pytest.raises(InfrastructureError, match="'t'"):
        await engine.sleep()
    await engine.kv_cancel("t")
    await engine.sleep()
    assert engine.timings["sleep"] >= 0
    await engine.wake(WeightSource(1, str(folder_of())))


async def test_sleep_waits_for_a_move_that_is_about_to_end(engines: Any, ask: Any) -> None:
    engine = await engines(move_patience=60.0)
    await ask(engine, list(range(40)), 4, session="s")
    pinned = await engine.kv_pin("s")
    sleeping = asyncio.create_task(engine.sleep())
    await asyncio.sleep(0.1)
    assert not sleeping.done()
    await engine.kv_release("s", pinned.generation, forget=False)
    await asyncio.wait_for(sleeping, 60)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_sleep_gives_the_memory_back(engines: Any, ask: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    engine = await engines(kv_tokens=400_000)  # about 220 MB
    await ask(engine, [1, 2, 3], 4)
    awake = resident()
    pool = sum(region.nbytes for region in engine.kv_regions())
    assert pool > 200e6
    await engine.sleep()
    assert awake - resident() > 0.8 * pool
    assert (await engine.load()).slots_total == 0


async def test_a_closed_event_loop_strands_nothing(folder_of: Callable[..., Path], context: ComponentContext) -> None:
    """A caller whose loop is gone (its thread died) must not stop the engine for the others."""
    engine = LocalEngine(LocalEngineOptions(kv_tokens=4096, chunk_tokens=1), context)
    await engine.start(WeightSource(0, str(folder_of())))

    def caller() -> None:
        loop = asyncio.new_event_loop()

        async def first_chunk() -> None:
            stream = engine.generate(GenerateRequest("lost", "l", [1, 2, 3], SamplingParams(900)))
            await anext(stream)
            streams.append(stream)

        loop.run_until_complete(first_chunk())
        loop.close()

    streams: list[Any] = []
    await asyncio.to_thread(caller)
    for _ in range(3000):
        if (await engine.load()).slots_running == 0:
            break
        await asyncio.sleep(0.02)
    request = GenerateRequest("mine", "m", [4, 5], SamplingParams(5))
    chunks = [chunk async for chunk in engine.generate(request)]
    assert chunks[-1].finish is FinishReason.LENGTH
    assert (await engine.load()).slots_running == 0
    await engine.close()
