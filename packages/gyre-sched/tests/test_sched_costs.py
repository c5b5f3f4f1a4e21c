"""What moves cost: set-up and rate are found from the moves, and decide about sessions of other sizes."""

from __future__ import annotations

import pytest
from gyre_sched import CostPriors
from gyre_sched.costs import Costs
from gyre_sched.transfers import MoveFit
from hypothesis import given, settings
from hypothesis import strategies as st

MB = 1_000_000
TOKEN = 100_000
"""Bytes of KV of a token."""


def measured(setup_s: float, rate: float, sizes: list[int], priors: CostPriors | None = None) -> Costs:
    """Costs that have seen moves of these sizes on such a machine."""
    costs = Costs(priors or CostPriors())
    for size in sizes:
        costs.moved(size, size // TOKEN, setup_s + size / rate)
    return costs


@pytest.mark.parametrize(("setup_s", "rate"), [(0.01, 1e9), (2.0, 1e8), (0.0005, 2e10), (0.3, 5e9)])
def test_set_up_and_rate_are_those_of_the_machine_whatever_was_believed(setup_s: float, rate: float) -> None:
    costs = measured(setup_s, rate, [MB, 100 * MB, 1000 * MB, 10_000 * MB] * 3)
    for size in (MB, 50 * MB, 5000 * MB):
        assert costs.move_seconds(size // TOKEN) == pytest.approx(setup_s + size / rate, rel=0.1)
    table = costs.table()
    assert table.kv_setup_s == pytest.approx(setup_s, rel=0.1)
    assert table.kv_bytes_per_s == pytest.approx(rate, rel=0.1)
    assert dict(table.measured)["kv_setup_s"] == dict(table.measured)["kv_bytes_per_s"] == 12


def test_one_move_is_believed_at_its_own_size() -> None:
    for seconds in (0.004, 0.1, 20.0):
        costs = Costs(CostPriors())
        costs.moved(60 * MB, 600, seconds)
        assert costs.move_seconds(600) == pytest.approx(seconds, rel=0.1)


def test_figures_follow_a_machine_that_changes() -> None:
    costs = measured(0.01, 1e9, [MB, 100 * MB] * 10)
    for size in [MB, 100 * MB] * 8:
        costs.moved(size, size // TOKEN, 0.5 + size / 1e8)
    assert costs.move_seconds(10) == pytest.approx(0.51, rel=0.15)
    assert costs.move_seconds(1000) == pytest.approx(1.5, rel=0.15)


def test_a_measured_set_up_decides_about_small_sessions() -> None:
    """Both machines take 1.1 s for 1,000 tokens; only where most of it is set-up are 100 tokens prefilled instead."""
    priors = CostPriors(prefill_tps=500.0)
    slow_to_begin = measured(1.0, 1e9, [100 * MB, 200 * MB] * 4, priors)
    slow_link = measured(0.01, 92e6, [100 * MB, 200 * MB] * 4, priors)
    assert slow_to_begin.move_seconds(1000) == pytest.approx(slow_link.move_seconds(1000), rel=0.1)
    assert slow_to_begin.carry_pays(1000)
    assert slow_link.carry_pays(1000)
    assert not slow_to_begin.carry_pays(100)
    assert slow_link.carry_pays(100)


moves = st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-6, 1e4)), min_size=1, max_size=40)


@settings(deadline=None)
@given(moves)
def test_a_larger_session_never_looks_cheaper(seen: list[tuple[int, float]]) -> None:
    fit, again = MoveFit(0.05, 1e10), MoveFit(0.05, 1e10)
    for size, seconds in seen:
        fit.moved(size, seconds)
        assert fit.setup_s >= 0.0
        assert 0.0 < fit.rate < float("inf")
        assert 0.0 < fit.seconds(1e3) <= fit.seconds(1e6) <= fit.seconds(1e12)
    for size, seconds in seen:
        again.moved(size, seconds)
    assert (again.setup_s, again.rate) == (fit.setup_s, fit.rate)
