"""Fused log-probabilities: values, gradients, memory, vocabulary-parallel shards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gyre_loss.logprob import Tiling, linear_logprob
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode


def plain(hidden, weight, targets, bias, temperature):
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def make(rows, vocab, hidden, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    states = torch.randn(rows, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocab, dtype=dtype, requires_grad=True)
    return states, weight, bias, torch.randint(0, vocab, (rows,))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    vocab=st.integers(2, 17),
    row_chunk=st.integers(1, 10),
    vocab_chunk=st.integers(1, 20),
    keep=st.sampled_from([0, 300, 1 << 20]),
    temperature=st.sampled_from([1.0, 0.7]),
    with_bias=st.booleans(),
    entropy=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_equal_the_plain_ones(
    rows, vocab, row_chunk, vocab_chunk, keep, temperature, with_bias, entropy, seed
):
    states, weight, bias, targets = make(rows, vocab, 5, seed)
    wanted = [states, weight] + [bias] * with_bias
    shift = bias if with_bias else None
    mix = torch.randn(2, rows, dtype=torch.float64)
    mix[:, ::3] = 0
    logp, ent = plain(states, weight, targets, shift, temperature)
    want = torch.autograd.grad((mix[0] * logp + entropy * mix[1] * ent).sum(), wanted)
    got = linear_logprob(
        states,
        weight,
        targets,
        bias=shift,
        temperature=temperature,
        entropy=entropy,
        tiling=Tiling(row_chunk, vocab_chunk, keep),
    )
    torch.testing.assert_close(got.logp, logp, rtol=1e-12, atol=1e-12)
    total = (mix[0] * got.logp).sum()
    if entropy:
        torch.testing.assert_close(got.entropy, ent, rtol=1e-12, atol=1e-12)
        total = total + (mix[1] * got.entropy).sum()
    for _ in range(2):
        found = torch.autograd.grad(total, wanted, retain_graph=True)
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_bfloat16_accumulates_in_float32():
    states, weight, _, targets = make(64, 500, 32, dtype=torch.float32)
    states, weight = states.detach() * 0.3, weight.detach()
    want, _ = plain(states.bfloat16().double(), weight.bfloat16().double(), targets, None, 1.0)
    got = linear_logprob(states.bfloat16(), weight.bfloat16(), targets, tiling=Tiling(16, 100)).logp
    assert got.dtype == torch.float32
    assert float((got - want).abs().max()) < 0.05


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gave back, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_nothing_larger_than_a_tile_exists():
    states, weight, _, targets = make(512, 4000, 8)
    with Largest() as seen:
        result = linear_logprob(states, weight, targets, entropy=True, tiling=Tiling(32, 500, 0))
        (result.logp.sum() + result.entropy.sum()).backward()
    assert seen.numel <= max(32 * 500, weight.numel()), "a chunk size is obeyed"
    with Largest() as seen:
        plain(states, weight, targets, None, 1.0)
    assert seen.numel == 512 * 4000, "the watch sees full logits where there are some"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([0, 17])}, r"targets\[1\] = 17; expected a token below the vocabulary of 17"),
        ({"targets": torch.tensor([0])}, r"targets torch.int64\(1,\)"),
        ({"hidden": torch.zeros(2, 4)}, r"hidden \(2, 4\) and weight \(17, 5\)"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"bias": torch.zeros(3)}, r"bias \(3,\)"),
        ({"vocab": 18}, "vocab = 18; expected at least 1 and at most 17, the rows of the head"),
        ({"targets": torch.tensor([0, 16]), "vocab": 16}, r"targets\[1\] = 16; .* vocabulary of 16"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"hidden": torch.zeros(2, 5), "weight": torch.zeros(17, 5), "targets": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{**good, **change})


def test_chunk_sizes_must_be_positive():
    with pytest.raises(ValueError, match="chunks of 0 rows"):
        Tiling(0, 5)


def test_rows_that_pad_the_head_are_no_tokens():
    states, weight, bias, _ = make(7, 12, 5)
    targets = torch.arange(7)
    logp, _ = plain(states, weight[:9], targets, bias[:9], 1.0)
    want = torch.autograd.grad(logp.sum(), [states, weight, bias])
    got = linear_logprob(states, weight, targets, bias=bias, vocab=9, tiling=Tiling(3, 4)).logp
    for one, other in zip((got, *torch.autograd.grad(got.sum(), [states, weight, bias])), (logp, *want), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def _rank(rank: int, world: int, folder: str, vocabularies: Sequence[int]) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    for vocab in vocabularies:
        _compare(rank, vocab)
    torch.distributed.destroy_process_group()
    print("equal at", ", ".join(map(str, vocabularies)))


def _compare(rank: int, vocab: int) -> None:
    states, weight, bias, targets = make(7, 12, 5)
    targets = targets % vocab
    logp, ent = plain(states, weight[:vocab], targets, bias[:vocab], 0.9)
    mix = torch.linspace(-1, 1, 14, dtype=torch.float64).view(2, 7)
    want = torch.autograd.grad((mix[0] * logp + mix[1] * ent).sum(), [states, weight, bias])
    share = slice(rank * 6, rank * 6 + 6)
    local = weight.detach()[share].requires_grad_()
    local_bias = bias.detach()[share].requires_grad_()
    got = linear_logprob(
        states,
        local,
        targets,
        bias=local_bias,
        temperature=0.9,
        entropy=True,
        tiling=Tiling(3, 4),
        group=torch.distributed.group.WORLD,
        vocab=vocab,
    )
    found = torch.autograd.grad((mix[0] * got.logp + mix[1] * got.entropy).sum(), [states, local, local_bias])
    for one, other in [
        (got.logp, logp),
        (got.entropy, ent),
        (found[0], want[0]),
        (found[1], want[1][share]),
        (found[2], want[2][share]),
    ]:
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_vocabulary_parallel_equals_the_whole(tmp_path):
    """In processes of their own: a fork of this one may find torch's threads holding a lock. At 5 of 12 rows the second
    rank has padding only."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import {Path(__file__).stem} as t; t."
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"{code}_rank({rank}, 2, {str(tmp_path)!r}, (12, 11, 5))"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert all(text.splitlines()[-1] == "equal at 12, 11, 5" for text in told), told
