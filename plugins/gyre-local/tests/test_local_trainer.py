"""The trainer: contributions add, steps equal AdamW, files are whole or refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gyre_loss as gl
import numpy as np
import pytest
import torch
from gyre_core import (
    CapabilityError,
    ComponentContext,
    ConfigError,
    InfrastructureError,
    MicroBatch,
    TrainerCapability,
    WeightSource,
)
from gyre_core.testing.support import load_module
from gyre_local.options import LocalTrainerOptions
from gyre_local.train import replica
from gyre_local.train.replica import chosen_objective
from gyre_local.train.trainer import LocalTrainer
from gyre_weights import open_version
from safetensors.torch import load_file, save_file


@pytest.fixture
def make_batches(batches: Any) -> Any:
    return batches


@pytest.fixture
async def trainers(context: ComponentContext, folder_of: Callable[..., Path]) -> Any:
    made: list[LocalTrainer] = []

    async def make(*, core: bool = True, kind: str = "qwen3", **options: Any) -> LocalTrainer:
        trainer = LocalTrainer(LocalTrainerOptions(**({"learning_rate": 1e-2} | options)), context)
        await trainer.start(WeightSource(0, str(folder_of(kind))), core=core)
        made.append(trainer)
        return trainer

    yield make
    for trainer in made:
        await trainer.close()


async def contribute(trainer: LocalTrainer, batches: list[MicroBatch], name: str, folder: Path) -> Any:
    for batch in batches:
        await trainer.accumulate(batch)
    return await trainer.export_contribution(name, batches[0].step, str(folder))


def weights_of(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer._replica.parameters.items()}


def relative_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max(float((a[n] - b[n]).detach().norm() / b[n].detach().norm().clamp(min=1e-300)) for n in b)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_core_and_satellites_give_the_gradient_of_the_core_alone(
    make_batches: Any, kind: str, trainers: Any, tmp_path: Path
) -> None:
    batches = make_batches(count=8)
    assert len(batches) > 4
    alone = await trainers(kind=kind, dtype="float64")
    core = await trainers(kind=kind, dtype="float64")
    satellites = [await trainers(kind=kind, dtype="float64", core=False) for _ in range(2)]
    whole = await contribute(alone, batches, "all", tmp_path / "alone")
    shares = [batches[0::3][::-1], batches[1::3], batches[2::3]]
    parts = [
        await contribute(who, share, f"c{i}", tmp_path / "parts")
        for i, (who, share) in enumerate(zip([core, *satellites], shares, strict=True))
    ]
    summed: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, tensor in load_file(part.location).items():
            summed[name] = summed.get(name, 0) + tensor
    assert relative_gap(summed, load_file(whole.location)) < 1e-10
    await alone.add_contribution(whole)
    for part in (parts[2], parts[0], parts[1]):
        await core.add_contribution(part)
    one, many = await alone.step(2.0), await core.step(2.0)
    assert one.version == many.version == 1
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-10)
    assert relative_gap(weights_of(core), weights_of(alone)) < 1e-10
    assert sum(p.stats.trained_tokens for p in parts) == whole.stats.trained_tokens


def held_bytes(trainer: LocalTrainer) -> dict[str, int]:
    """By kind, what lies on the device."""
    made = trainer._replica
    found = {
        "weights": list(made.parameters.values()),
        "gradients": [p.grad for p in made.parameters.values() if p.grad is not None],
        "open sum": list(made._open.values()),
    }
    if trainer._optimizer is not None:
        state = trainer._optimizer.state()
        found["moments"] = [tensor for name, tensor in state.items() if name.startswith("exp_avg")]
        found["masters"] = [tensor for name, tensor in state.items() if name.startswith("master/")]
    return {kind: sum(t.nbytes for t in tensors) for kind, tensors in found.items() if tensors}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("core", [False, True])
async def test_the_memory_that_the_check_counts_is_what_it_holds(
    make_batches: Any, trainers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, core: bool
) -> None:
    trainer, (first, *more) = await trainers(core=core, dtype=dtype), make_batches()
    if core:
        await trainer.add_contribution(await contribute(trainer, [first], "c", tmp_path))
        await trainer.step(1.0)
        more = [dataclasses.replace(batch, step=1) for batch in more]
    add, at_the_peak = trainer._replica._add, {}

    def watched(gradients: Any) -> None:
        add(gradients)
        at_the_peak.update(held_bytes(trainer))

    monkeypatch.setattr(trainer._replica, "_add", watched)
    await trainer.accumulate(more[0])
    weights = sum(p.numel() for p in trainer._replica.parameters.values())
    kept = trainer.options.kept(8, core=core)
    assert at_the_peak == {kind: size * weights for kind, (size, _, _) in kept.items()}
    assert {count for _, *shards in kept.values() for count in shards} == {1}


async def test_the_result_does_not_depend_on_the_order_of_arrival(
    make_batches: Any, trainers: Any, tmp_path: Path
) -> None:
    batches = make_batches()
    found = []
    for order in ([0, 1, 2], [2, 0, 1]):
        core = await trainers()
        parts = [await contribute(core, [b], f"c{i}", tmp_path / str(order)) for i, b in enumerate(batches[:3])]
        for index in order:
            await core.add_contribution(parts[index])
        await core.step(1.0)
        found.append(weights_of(core))
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


async def test_a_step_is_adamw_on_the_oracles_gradient(
    make_batches: Any, trainers: Any, tiny: Any, tmp_path: Path
) -> None:
    batches = make_batches()
    core = await trainers(dtype="float64", weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2)
    model = tiny.build("qwen3").double()
    from gyre_local.train.exact import use_exact_norms

    assert use_exact_norms(model) > 0
    wide = [p for p in model.parameters() if p.ndim > 1]
    flat = [p for p in model.parameters() if p.ndim <= 1]
    adam = torch.optim.AdamW(
        [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    for step in range(3):
        adam.zero_grad()
        for batch in batches:
            tree = gl.from_bytes(batch.blob)
            gl.tree_loss(model, tree, gl.PolicyLoss(), method="branches").loss.backward()
        for parameter in model.parameters():
            parameter.grad /= 2.0
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        adam.step()
        await core.add_contribution(await contribute(core, batches, f"s{step}", tmp_path))
        result = await core.step(2.0)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        assert result.version == step + 1
    assert relative_gap(weights_of(core), dict(model.named_parameters())) < 1e-4


async def test_published_weights_are_the_weights(
    make_batches: Any, trainers: Any, tmp_path: Path, context: Any, folder_of: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder_of("qwen3").joinpath("tokenizer_config.json").write_text("{}")
    core = await trainers(keep_versions=2)
    for step in range(4):
        await core.add_contribution(await contribute(core, make_batches(step), f"s{step}", tmp_path))
        await core.step(1.0)
        source = await core.publish(str(tmp_path / "weights"))
    digest = open_version(source.location).digest
    assert source == WeightSource(4, str(tmp_path / "weights" / "v4"), "disk", digest)
    assert digest
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v3", "v4"]
    assert (Path(source.location) / "tokenizer_config.json").exists()
    model = AutoModelForCausalLM.from_pretrained(source.location, dtype=torch.float32)
    for name, tensor in weights_of(core).items():
        assert torch.equal(dict(model.named_parameters())[name], tensor)
    satellite = await trainers(core=False)
    await satellite.load_weights(source)
    assert satellite.version == 4
    assert relative_gap(weights_of(satellite), weights_of(core)) == 0
    again = await core.publish(str(tmp_path / "weights"))
    assert again == source


async def test_engine_and_trainer_agree_on_logprobs(trainers: Any, engines: Any, ask: Any, tmp_path: Path) -> None:
    trainer = await trainers(core=False, temperature=0.8)
    engine = await engines()
    prompt = list(range(20, 50))
    result = await ask(engine, prompt, 12, temperature=0.8)
    ids = prompt + result.ids
    sampled = [False] * len(prompt) + [True] * 12
    nan = float("nan")
    batch = gl.TreeBatch.from_arrays(
        node_parent=[-1], node_start=[0, len(ids)], token_ids=ids, sampled=sampled,
        logprobs=[nan] * len(prompt) + result.logprobs, versions=[-1] * len(prompt) + [0] * 12,
    )  # fmt: skip
    found = await trainer.logprobs(MicroBatch("b", 1, len(ids), gl.to_bytes(batch)))
    assert found == pytest.approx(result.logprobs, abs=1e-4)


async def test_what_counts_once_counts_once(make_batches: Any, trainers: Any, tmp_path: Path) -> None:
    batches = make_batches()
    core = await trainers()
    first = await contribute(core, batches[:2], "first", tmp_path)
    second = await contribute(core, batches[1:3], "second", tmp_path)
    await core.add_contribution(first)
    with pytest.raises(ValueError, match="added already"):
        await core.add_contribution(first)
    with pytest.raises(ValueError, match="b1"):
        await core.add_contribution(second)
    with pytest.raises(ValueError, match="version 3"):
        await core.add_contribution(dataclasses.replace(second, version=3))
    with pytest.raises(ValueError, match="batch_ids"):
        await core.add_contribution(dataclasses.replace(second, batch_ids=("b2",)))
    await core.accumulate(batches[0])
    with pytest.raises(ValueError, match="has it already"):
        await core.accumulate(batches[0])
    with pytest.raises(ValueError, match="step"):
        await core.accumulate(dataclasses.replace(batches[1], step=2))
    await core.discard_contribution()
    with pytest.raises(ValueError, match="no micro-batch"):
        await core.export_contribution("x", 1, str(tmp_path))
    with pytest.raises(ValueError, match="path separators"):
        await core.export_contribution("../x", 1, str(tmp_path))
    await core.step(1.0)
    with pytest.raises(ValueError, match="version 0"):
        await core.add_contribution(second)


async def test_a_bad_micro_batch_leaves_no_trace(make_batches: Any, trainers: Any, tmp_path: Path) -> None:
    batches = make_batches()
    core = await trainers()
    clean = await contribute(core, batches[:2], "clean", tmp_path)
    await core.accumulate(batches[0])
    with pytest.raises(ValueError, match="checksum"):
        await core.accumulate(dataclasses.replace(batches[1], blob=batches[1].blob[:-9] + b"\0" * 9))
    tree = gl.from_bytes(batches[1].blob)
    foreign = dataclasses.replace(tree, token_ids=tree.token_ids + 10_000)
    with pytest.raises((ValueError, IndexError)):
        await core.accumulate(dataclasses.replace(batches[1], blob=gl.to_bytes(foreign)))
    await core.accumulate(batches[1])
    again = await core.export_contribution("again", 1, str(tmp_path))
    assert relative_gap(load_file(again.location), load_file(clean.location)) == 0


async def test_a_nan_gradient_steps_nothing_and_is_named(make_batches: Any, trainers: Any, tmp_path: Path) -> None:
    batches = make_batches()
    core, satellite = await trainers(), await trainers(core=False)
    with torch.no_grad():
        embed = satellite._replica.parameters["model.embed_tokens.weight"]
        embed[int(gl.from_bytes(batches[1].blob).token_ids[0])] = float("nan")
    good = await contribute(core, batches[:1], "good", tmp_path)
    bad = await contribute(satellite, batches[1:2], "bad", tmp_path)
    before = weights_of(core)
    await core.add_contribution(good)
    await core.add_contribution(bad)
    result = await core.step(1.0)
    assert result.version == core.version == 1
    assert result.skipped is not None
    assert "contribution bad" in result.skipped
    assert "micro-batch b1" in result.skipped
    assert "g0e" in result.skipped
    assert "good" not in result.skipped
    assert relative_gap(weights_of(core), before) == 0
    await core.add_contribution(await contribute(core, batches[:1], "again", tmp_path))
    assert (await core.step(1.0)).skipped is None


async def test_the_guilty_execution_is_named_and_not_its_batch_mates(
    make_batches: Any, tiny: Any, folder_of: Any, context: ComponentContext, tmp_path: Path
) -> None:
    """Attention carries NaN to every execution of the micro-batch; each computed alone shows whose it is."""
    batch, execution, token = load_module(Path(__file__).with_name("tree_batches.py")).only_in_one(make_batches())
    core, satellite = (LocalTrainer(LocalTrainerOptions(), context) for _ in range(2))
    await core.start(WeightSource(0, str(folder_of("qwen3-untied"))), core=True)
    poisoned = tiny.poison(folder_of("qwen3-untied"), tmp_path / "poisoned", token)
    await satellite.start(WeightSource(0, str(poisoned)), core=False)
    await core.add_contribution(await contribute(satellite, [batch], "bad", tmp_path))
    assert f"micro-batch {batch.id} (executions {execution})" in ((await core.step(1.0)).skipped or "")
    for trainer in (core, satellite):
        await trainer.close()


async def test_a_mixture_of_experts_is_refused(trainers: Any) -> None:
    with pytest.raises(ConfigError, match=r"experts.*deepspeed or megatron"):
        await trainers(kind="qwen3-moe")
    plain = await trainers()
    assert TrainerCapability.ROUTER_REPLAY not in plain.capabilities
    assert not plain.facts.router_replay
    assert not plain.options.router_replay


async def test_a_step_without_a_gradient_is_skipped_and_counted(trainers: Any) -> None:
    core = await trainers()
    before = weights_of(core)
    result = await core.step(1.0)
    assert (result.version, result.skipped) == (1, "no contribution")
    assert relative_gap(weights_of(core), before) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_restore_goes_on_exactly(make_batches: Any, dtype: str, trainers: Any, tmp_path: Path) -> None:
    core = await trainers(dtype=dtype)
    for step in range(2):
        await core.add_contribution(await contribute(core, make_batches(step), f"s{step}", tmp_path))
        await core.step(1.0)
    await core.save(str(tmp_path / "ckpt"))
    await core.save(str(tmp_path / "ckpt"))
    other = await trainers(dtype=dtype)
    await other.restore(str(tmp_path / "ckpt"))
    assert other.version == 2
    for who in (core, other):
        await who.add_contribution(await contribute(who, make_batches(7), f"n{id(who)}", tmp_path))
        await who.step(1.0)
    left, right = weights_of(core), weights_of(other)
    assert all(torch.equal(left[n], right[n]) for n in left)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


async def test_a_checkpoint_that_is_cut_short_is_refused(trainers: Any, tmp_path: Path) -> None:
    core = await trainers()
    await core.save(str(tmp_path / "ckpt"))
    before = weights_of(core)
    for name in ("model.safetensors", "optimizer.state", "state.json"):
        path = tmp_path / "ckpt" / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(InfrastructureError, match="restoring"):
            await core.restore(str(tmp_path / "ckpt"))
        path.unlink()
        with pytest.raises(InfrastructureError, match="restoring"):
            await core.restore(str(tmp_path / "ckpt"))
        path.write_bytes(whole)
    await core.restore(str(tmp_path / "ckpt"))
    assert relative_gap(weights_of(core), before) == 0


async def test_a_contribution_that_is_cut_or_foreign_is_refused(
    make_batches: Any, trainers: Any, tmp_path: Path
) -> None:
    core = await trainers()
    made = await contribute(core, make_batches()[:1], "c", tmp_path)
    whole = Path(made.location).read_bytes()
    Path(made.location).write_bytes(whole[:-10])
    with pytest.raises(InfrastructureError, match="contribution 'c'"):
        await core.add_contribution(made)
    Path(made.location).unlink()
    with pytest.raises(InfrastructureError, match="contribution 'c'"):
        await core.add_contribution(made)
    header = {"id": "c", "step": 1, "version": 0, "batch_ids": list(made.batch_ids), "format": 1}
    save_file({"other": torch.zeros(2)}, made.location, {"gyre": json.dumps(header)})
    with pytest.raises(InfrastructureError, match="differ from this model"):
        await core.add_contribution(made)


async def test_a_satellite_never_steps(make_batches: Any, trainers: Any, tmp_path: Path) -> None:
    satellite = await trainers(core=False)
    made = await contribute(satellite, make_batches()[:1], "c", tmp_path)
    for action in (
        satellite.step(1.0), satellite.add_contribution(made), satellite.publish(str(tmp_path)),
        satellite.save(str(tmp_path / "x")), satellite.restore(str(tmp_path / "x")),
    ):  # fmt: skip
        with pytest.raises(CapabilityError):
            await action


async def test_the_event_loop_answers_while_it_computes(
    make_batches: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, answered, real = await trainers(core=False), threading.Event(), replica.accumulate

    def accumulate(*args: Any, **how: Any) -> Any:
        assert answered.wait(60), "the loop stands still until this is computed"
        return real(*args, **how)

    monkeypatch.setattr(replica, "accumulate", accumulate)
    task = asyncio.create_task(trainer.accumulate(make_batches()[0]))
    for _ in range(6):
        await asyncio.sleep(0)
    assert not task.done()
    answered.set()
    assert (await task).seconds > 0


async def test_offload_and_back_changes_nothing(make_batches: Any, trainers: Any, tmp_path: Path) -> None:
    core = await trainers()
    await core.add_contribution(await contribute(core, make_batches(), "a", tmp_path))
    await core.step(1.0)
    before = weights_of(core)
    await core.offload()
    await core.onload()
    assert relative_gap(weights_of(core), before) == 0
    assert core.timings.keys() >= {"offload", "onload", "step", "export"}


@pytest.mark.parametrize("method", ["packed", "dfs", "branches"])
async def test_methods_agree(make_batches: Any, method: str, trainers: Any, tmp_path: Path) -> None:
    trainer, oracle = await trainers(core=False, method=method), await trainers(core=False, method="branches")
    found = await contribute(trainer, make_batches(), "c", tmp_path / "a")
    expected = await contribute(oracle, make_batches(), "c", tmp_path / "b")
    assert relative_gap(load_file(found.location), load_file(expected.location)) < 1e-4


def test_objectives_by_name() -> None:
    logits = {name: chosen_objective(name, {}) for name in ("ppo", "dapo", "gspo", "cispo", "reinforce")}
    assert logits["dapo"].surrogate.high == 0.28
    assert chosen_objective("ppo", {"low": 0.1, "kl": "k3", "kl_coefficient": 0.1}).kl.coefficient == 0.1
    assert chosen_objective("ppo", {"proximal": "current", "correction": "truncated"}).correction.cap == 2.0
    for name, options, match in (
        ("pppo", {}, "Did you mean 'ppo'"),
        ("ppo", {"hihg": 1}, "Did you mean 'high'"),
        ("reinforce", {"low": 0.1}, "reinforce"),
        ("ppo", {"kl": "k1"}, "both"),
        ("ppo", {"correction": "truncated"}, "proximal"),
    ):
        with pytest.raises(ConfigError, match=match):
            chosen_objective(name, options)


def test_metrics_add_up(tmp_path: Path) -> None:
    from gyre_core import BatchStats
    from gyre_local.train.contributions import merge_stats

    one = BatchStats(1.0, 10, 5, 0.5, {"entries": 5.0, "ratio:max": 1.2})
    two = BatchStats(2.0, 20, 6, 0.25, {"entries": 6.0, "ratio:max": 1.1})
    assert merge_stats([one, two]) == BatchStats(3.0, 30, 11, 0.75, {"entries": 11.0, "ratio:max": 1.2})


async def test_time_is_measured(trainers: Any) -> None:
    started = time.perf_counter()
    trainer = await trainers(core=False)
    assert 0 < trainer.timings["start"] <= time.perf_counter() - started
    assert np.isfinite(list(trainer.timings.values())).all()
