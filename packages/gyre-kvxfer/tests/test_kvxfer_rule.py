"""The move-or-prefill rule finds the machine it is fed with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer.errors import KVError
from gyre_kvxfer.rule import MoveRule
from hypothesis import given, settings
from hypothesis import strategies as st


def feed(rule: MoveRule, bandwidth, setup, a, b, noise, seed, n=80) -> MoveRule:
    rng = np.random.default_rng(seed)
    for _ in range(n):
        tokens = int(100 * 300 ** rng.random())
        wobble = 1 + noise * rng.standard_normal(2)
        rule = rule.moved(tokens * 1000, (setup + tokens * 1000 / bandwidth) * wobble[0])
        rule = rule.prefilled(tokens, (a * tokens + b * tokens**2) * wobble[1])
    return rule


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.floats(2e8, 2e10), st.floats(1e-4, 5e-2), st.floats(2e-5, 1e-3), st.floats(0, 1e-8), st.integers(0, 99))
def test_its_choices_cost_little_more_than_the_best(bandwidth, setup, a, b, seed):
    rule = feed(MoveRule.of(), bandwidth, setup, a, b, 0.02, seed)
    for tokens in (300, 1000, 3000, 10000, 30000):
        move, prefill = setup + tokens * 1000 / bandwidth, a * tokens + b * tokens**2
        assert (move if rule.advise(tokens, 1000).move else prefill) <= 1.3 * min(move, prefill)


def test_break_even_is_found():
    rule = feed(MoveRule.of(), 1e9, 2e-2, 5e-6, 1e-9, 0.02, 3)
    tokens = np.arange(1, 100000)
    true = int(tokens[np.argmax(2e-2 + tokens * 1e-6 < 5e-6 * tokens + 1e-9 * tokens.astype(float) ** 2)])
    assert 500 < true < 30000
    assert rule.break_even(1000) == pytest.approx(true, rel=0.2)


VLLM = {
    64: (0.085, 0.022), 128: (0.087, 0.072), 256: (0.076, 0.246), 512: (0.080, 0.503), 1024: (0.089, 1.097),
    2048: (0.073, 1.717), 4096: (0.130, 4.956), 8192: (0.094, 8.626), 16384: (0.129, 17.14),
}  # fmt: skip
"""Tokens -> seconds of a move and of a prefill, as two vLLM servers on a CPU gave them; 3,072 bytes of KV a token."""


def test_lengths_at_which_a_machine_is_another_are_told_from_their_neighbours():
    """Fed with every second length; up to 64 tokens a token takes a third of the time it takes beyond."""
    rule = MoveRule.of()
    for tokens in sorted(VLLM)[::2] * 4:
        move, prefill = VLLM[tokens]
        rule = rule.moved(tokens * 3072, move).prefilled(tokens, prefill)
    low, high = (VLLM[n][0] - VLLM[n][1] for n in (128, 256))
    crossing = 128 + 128 * low / (low - high)
    without = MoveRule(rule.moves, replace(rule.prefills, width=0.0))
    assert rule.break_even(3072) == pytest.approx(crossing, rel=0.1)
    assert without.break_even(3072) != pytest.approx(crossing, rel=0.2)


def test_a_correction_stays_within_what_was_measured():
    rule = MoveRule.of()
    for n in (100, 1000, 10_000):
        rule = rule.prefilled(n, n * 1e-3 * (3 if n == 1000 else 1))
    fit = rule.prefills
    tokens = np.geomspace(10, 100_000, 200)
    plain = replace(fit, width=0.0)
    rows = np.stack([np.ones_like(tokens), tokens, tokens**2], 1)
    ratio = fit.times(rows) / plain.times(rows)
    differed = [sample.seconds / plain.seconds(sample.features) for sample in fit.samples]
    assert min(differed) <= ratio.min() < 1 < ratio.max() <= max(differed)


def test_priors_decide_before_anything_is_known():
    rule = MoveRule.of(bandwidth=1e9, setup_seconds=0.01, prefill_tokens_per_second=1000, prefill_setup_seconds=0.0)
    advice = rule.advise(1000, 1000)
    assert advice.move
    assert advice.move_seconds == pytest.approx(0.011, rel=1e-3)
    assert advice.prefill_seconds == pytest.approx(1.0, rel=1e-3)
    assert not rule.advise(5, 1000).move


def test_it_follows_a_machine_that_changes():
    rule = feed(MoveRule.of(), 1e10, 1e-3, 1e-3, 0, 0.01, 1)
    assert rule.advise(5000, 1000).move
    for _ in range(300):
        rule = rule.moved(5_000_000, 20.0)
    assert not rule.advise(5000, 1000).move


def test_what_is_cached_there_makes_both_cheaper():
    rule = feed(MoveRule.of(), 1e9, 1e-3, 1e-4, 1e-9, 0.0, 2)
    whole, rest = rule.advise(20000, 1000), rule.advise(20000, 1000, cached=15000)
    assert rest.move_seconds < whole.move_seconds
    assert rest.prefill_seconds < whole.prefill_seconds


def test_a_margin_asks_for_more():
    rule = MoveRule.of(bandwidth=1e6, setup_seconds=0.0, prefill_tokens_per_second=900, prefill_setup_seconds=0.0)
    assert rule.advise(1000, 1000).move
    assert not MoveRule(rule.moves, rule.prefills, margin=2.0).advise(1000, 1000).move


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_impossible_times_are_refused(seconds):
    with pytest.raises(KVError):
        MoveRule.of().moved(10, seconds)


def test_never_cheaper_is_said():
    rule = MoveRule.of(bandwidth=1.0, setup_seconds=1.0)
    assert rule.break_even(1 << 20) is None
