"""Three ways to compute, one result."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_loss import (
    ExecutionRecord,
    PolicyLoss,
    TreeBatch,
    accumulate,
    assemble_group,
    centre,
    partition,
    token_logprobs,
    tree_loss,
)
from gyre_loss.aggregate import Constant, group_token_mean, sequence_mean, token_mean, two_level
from gyre_loss.compute import Options
from gyre_loss.kl import k1, k2, k3
from gyre_loss.layout import Layout
from gyre_loss.objective import KLPenalty
from gyre_loss.ratios import ExecutionMasked, Masked, Truncated, current_is_proximal, recorded_proximal
from gyre_loss.surrogates import Clip, ClippedWeight, Reinforce, SequenceClip
from hypothesis import given, settings
from hypothesis import strategies as st


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DATA = _load("test_loss_data")
random_forest = DATA.random_forest
build_model = _load("conftest").build_model

DEFAULT = Options()


@pytest.fixture(params=[0, 9, 256], ids=lambda limit: f"clusters of {limit}")
def cluster_limit(request, monkeypatch):
    monkeypatch.setattr("gyre_loss.attention.CLUSTER_LIMIT", request.param)


METHODS = [
    ("packed", Options(attention="dense")),
    ("packed", Options(attention="blocked")),
    ("dfs", Options(chunk_tokens=3)),
    ("dfs", Options(chunk_tokens=1000)),
]
OBJECTIVES = {
    "ppo": PolicyLoss(),
    "dapo": PolicyLoss(Clip(0.2, 0.28, dual=3.0)),
    "gspo": PolicyLoss(SequenceClip()),
    "cispo": PolicyLoss(ClippedWeight()),
    "reinforce": PolicyLoss(Reinforce()),
    "kl1": PolicyLoss(kl=KLPenalty(k1, 0.1)),
    "kl2": PolicyLoss(kl=KLPenalty(k2, 0.1)),
    "kl3 entropy": PolicyLoss(kl=KLPenalty(k3, 0.1), entropy_coefficient=0.05),
    "decoupled truncated": PolicyLoss(proximal=recorded_proximal, correction=Truncated(1.5)),
    "current masked": PolicyLoss(proximal=current_is_proximal, correction=Masked(0.5, 1.5)),
    "execution masked": PolicyLoss(proximal=current_is_proximal, correction=ExecutionMasked(0.2, 2.0)),
}


def gradient(model, batch, objective, method, options=DEFAULT, call=tree_loss):
    model.zero_grad()
    result = call(model, batch, objective, method=method, options=options)
    if result.loss.requires_grad:
        result.loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return result.loss.item(), torch.cat([g.flatten() for g in grads]), result.metrics


def filled(batch, seed):
    rng = np.random.default_rng(seed)
    return batch.with_logprobs(
        proximal=(batch.entry_logprob - rng.random(batch.entries) * 0.5).astype(np.float32),
        reference=(-rng.random(batch.entries) * 3).astype(np.float32),
    )


def relative(a, b):
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_objective_has_one_gradient(name, seed, model64):
    batch = filled(random_forest(seed, 3, 6), seed)
    if not batch.entries:
        return
    loss, grad, metrics = gradient(model64, batch, OBJECTIVES[name], "branches")
    for method, options in METHODS:
        for call in (tree_loss, accumulate):
            other, other_grad, other_metrics = gradient(model64, batch, OBJECTIVES[name], method, options, call)
            assert other == pytest.approx(loss, rel=1e-10, abs=1e-12)
            assert relative(other_grad, grad) < 1e-10
            assert other_metrics.sums == pytest.approx(metrics.sums, rel=1e-9, abs=1e-12)
            assert other_metrics.versions == metrics.versions


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10**6), kind=st.sampled_from(["qwen3", "llama"]))
def test_float32_agrees_too(seed, kind):
    batch = random_forest(seed, 3, 8)
    if not batch.entries:
        return
    model = build_model(kind, torch.float32)
    _, grad, _ = gradient(model, batch, PolicyLoss(Reinforce()), "branches")
    for method, options in METHODS:
        assert relative(gradient(model, batch, PolicyLoss(Reinforce()), method, options)[1], grad) < 1e-5


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_library_norms_untouched_bf16_and_float32(kind):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config = {"vocab_size": 11, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(0)
    made = (
        Qwen3ForCausalLM(Qwen3Config(head_dim=8, **config))
        if kind == "qwen3"
        else LlamaForCausalLM(LlamaConfig(**config))
    )
    batch = random_forest(5, 3, 8)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        model = made.to(dtype)
        want = token_logprobs(model, batch, method="branches")
        for method, options in METHODS[:3]:
            got = token_logprobs(model, batch, method=method, options=options)
            assert np.abs(got - want).max() < bound
            _, grad, _ = gradient(model, batch, PolicyLoss(Reinforce()), method, options)
            assert bool(torch.isfinite(grad).all())


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), slack=st.integers(0, 30))
def test_loss_and_gradient_do_not_depend_on_the_partition(seed, slack, model64):
    batch = random_forest(seed, 4, 6)
    if not batch.entries:
        return
    whole = gradient(model64, batch, PolicyLoss(), "packed")
    parts = partition(batch, Layout.of(batch).longest_path + slack).parts
    order = np.random.default_rng(seed).permutation(len(parts))
    losses, grads, metrics = zip(*(gradient(model64, parts[i], PolicyLoss(), "packed") for i in order), strict=True)
    assert sum(losses) == pytest.approx(whole[0], rel=1e-10, abs=1e-12)
    assert relative(sum(grads), whole[1]) < 1e-10
    total = metrics[0]
    for more in metrics[1:]:
        total = total + more
    assert total.sums == pytest.approx(whole[2].sums, rel=1e-9, abs=1e-12)
    assert total.counts == whole[2].counts
    assert total.maxima == pytest.approx(whole[2].maxima)


@pytest.mark.parametrize(
    "aggregation", [two_level, sequence_mean, token_mean, group_token_mean, Constant(7.0)], ids=lambda a: str(a)[:20]
)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_aggregation_is_its_formula_in_every_split(aggregation, seed, model64):
    """Two groups, cut and computed by any method: sum of -A logp times the formula's weight over its divisor."""
    rng = np.random.default_rng(seed)
    total, divisor, want = torch.zeros(()), 0.0, 0.0
    for group in range(2):
        trees = [DATA.random_tree(rng, int(rng.integers(1, 5))) for _ in range(3)]
        if any(not tree.sampled.any() for tree in trees):
            return
        records = [
            ExecutionRecord(f"{group}/{i}", "completed", float(score), tree)
            for i, (tree, score) in enumerate(zip(trees, (2.0, 1.0, 0.0), strict=True))
        ]
        made = assemble_group(records, trainer_version=3, estimator=centre, aggregation=aggregation)
        divisor += made.divisor
        counts = [int(tree.sampled.sum()) for tree in trees]
        for tree, count, advantage in zip(trees, counts, (1.0, 0.0, -1.0), strict=True):
            logp = token_logprobs(model64, TreeBatch.from_arrays(tree), method="branches")
            weight = {
                "two_level": 1 / (3 * count),
                "sequence_mean": 1 / count,
                "token_mean": 1.0,
                "group_token_mean": 1 / sum(counts),
            }.get(getattr(aggregation, "__name__", ""), 1 / 7)
            want -= weight * advantage * float(logp.sum())
        longest = Layout.of(made.batch).longest_path
        for index, part in enumerate(partition(made.batch, longest + int(rng.integers(0, 20))).parts):
            method, options = METHODS[index % len(METHODS)]
            total = total + tree_loss(model64, part, PolicyLoss(Reinforce()), method=method, options=options).loss
    shares = {"two_level": 2, "sequence_mean": 6, "group_token_mean": 2}
    name = getattr(aggregation, "__name__", "")
    if name in shares:
        assert divisor == shares[name]
    assert float(total.detach()) / divisor == pytest.approx(want / divisor, rel=1e-10, abs=1e-12)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    executions=st.integers(1, 6),
    nodes=st.integers(1, 16),
    name=st.sampled_from(sorted(OBJECTIVES)),
    slack=st.integers(0, 60),
    chunk=st.integers(1, 12),
    limit=st.sampled_from([0, 5, 256]),
)
def test_many_forests_objectives_and_splits(seed, executions, nodes, name, slack, chunk, limit, model64):
    """Whole and cut, in any order, by every method, with clusters of every size: one gradient."""
    from gyre_loss import attention

    batch = filled(random_forest(seed, executions, nodes), seed)
    if not batch.entries:
        return
    objective = OBJECTIVES[name]
    loss, grad, metrics = gradient(model64, batch, objective, "branches")
    before, attention.CLUSTER_LIMIT = attention.CLUSTER_LIMIT, limit
    try:
        ways = [*METHODS[:2], ("dfs", Options(chunk_tokens=chunk))]
        for method, options in ways:
            other, other_grad, _ = gradient(model64, batch, objective, method, options, accumulate)
            assert other == pytest.approx(loss, rel=1e-10, abs=1e-12)
            assert relative(other_grad, grad) < 1e-10
        if objective.whole_executions:
            return
        parts = partition(batch, Layout.of(batch).longest_path + slack).parts
        rng = np.random.default_rng(seed)
        found = [
            gradient(model64, parts[i], objective, *ways[int(rng.integers(3))], accumulate)
            for i in rng.permutation(len(parts))
        ]
        assert sum(one[0] for one in found) == pytest.approx(loss, rel=1e-10, abs=1e-12)
        assert relative(sum(one[1] for one in found), grad) < 1e-10
        assert sum(one[2].summary()["entries"] for one in found) == metrics.summary()["entries"]
    finally:
        attention.CLUSTER_LIMIT = before


@pytest.mark.usefixtures("cluster_limit")
@pytest.mark.parametrize("seed", range(4))
def test_blocked_attention_with_and_without_clusters(seed, model64):
    batch = random_forest(seed, 5, 12)
    _, want, _ = gradient(model64, batch, PolicyLoss(Reinforce()), "packed", Options(attention="dense"))
    _, got, _ = gradient(model64, batch, PolicyLoss(Reinforce()), "packed", Options(attention="blocked"))
    assert relative(got, want) < 1e-10


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), limit=st.integers(0, 40))
def test_clusters_are_whole_subtrees_and_tile_with_the_rest(seed, limit):
    from gyre_loss import attention
    from gyre_loss.layout import segments

    found = segments(random_forest(seed, 4, 9))
    before, attention.CLUSTER_LIMIT = attention.CLUSTER_LIMIT, limit
    alone, clusters = attention.cluster(found)
    attention.CLUSTER_LIMIT = before
    pieces = sorted([(s.start, s.stop) for s in alone] + clusters)
    assert [stop for _, stop in pieces][:-1] == [start for start, _ in pieces][1:]
    assert (pieces[0][0], pieces[-1][1]) == (0, found[-1].stop)
    for start, stop in clusters:
        assert stop - start <= limit
        assert all(s.end <= stop for s in found if start <= s.start < stop)


def test_the_model_is_as_it_was(model64):
    before = model64.config._attn_implementation
    tree_loss(model64, random_forest(1), PolicyLoss())
    assert model64.config._attn_implementation == before


def test_flex_forward_equals_the_others_and_refuses_a_backward_on_cpu(model64):
    for seed in range(3):
        batch = random_forest(seed, 6, 80)
        want = token_logprobs(model64, batch, options=Options(attention="dense"))
        assert batch.tokens > 128
        got = token_logprobs(model64, batch, options=Options(attention="flex"))
        assert np.abs(got - want).max() < 1e-10
    with pytest.raises(ValueError, match="FlexAttention with gradients on CPU"):
        tree_loss(model64, batch, PolicyLoss(), options=Options(attention="flex"))


def test_temperature_divides_the_logits(model64):
    batch = random_forest(2, 2, 5)
    for method in ("packed", "dfs", "branches"):
        hot = token_logprobs(model64, batch, method=method, temperature=1e6)
        assert np.abs(hot + np.log(11)).max() < 1e-3


def test_gradient_of_dfs_scales_and_adds(model64):
    batch = random_forest(3, 2, 6)
    _, grad, _ = gradient(model64, batch, PolicyLoss(Reinforce()), "packed")
    model64.zero_grad()
    for _ in range(2):
        (3.0 * tree_loss(model64, batch, PolicyLoss(Reinforce()), method="dfs").loss).backward()
    again = torch.cat([p.grad.flatten() for p in model64.parameters()])
    assert relative(again, 6.0 * grad) < 1e-10
