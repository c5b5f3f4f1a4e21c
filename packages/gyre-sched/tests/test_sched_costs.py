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


SETUP_S, RATE = 0.01, 1e9
SIZES = [MB, 400 * MB, 20 * MB, 1000 * MB, 5 * MB] * 3


def good(fit: MoveFit, sizes: list[int]) -> None:
    for size in sizes:
        fit.moved(size, SETUP_S + size / RATE)


def near(fit: MoveFit, rel: float) -> None:
    assert fit.setup_s == pytest.approx(SETUP_S, rel=rel)
    assert fit.rate == pytest.approx(RATE, rel=rel)


@pytest.mark.parametrize("size", [MB, 100 * MB, 1000 * MB])
@pytest.mark.parametrize("factor", [50.0, 1e4])
def test_a_move_that_stalled_spoils_nothing_wherever_it_comes(size: int, factor: float) -> None:
    wrong = factor * (SETUP_S + size / RATE)
    last = MoveFit(0.05, 1e10)
    good(last, SIZES)
    last.moved(size, wrong)
    near(last, 0.5)
    middle = MoveFit(0.05, 1e10)
    good(middle, SIZES[:8])
    middle.moved(size, wrong)
    near(middle, 0.5)
    good(middle, SIZES[8:11])
    near(middle, 0.2)
    first = MoveFit(0.05, 1e10)
    first.moved(size, wrong)
    good(first, SIZES[:5])
    near(first, 0.1)
    good(first, SIZES[5:])
    near(first, 0.02)


@pytest.mark.parametrize("size", [MB, 100 * MB, 1000 * MB])
@pytest.mark.parametrize("seconds", [1e-6, 1e-3])
def test_a_move_that_seemed_to_take_no_time_is_forgotten_after_some_good_ones(size: int, seconds: float) -> None:
    for before in (0, 8, 15):
        fit = MoveFit(0.05, 1e10)
        good(fit, SIZES[:before])
        fit.moved(size, seconds)
        good(fit, SIZES[:5])
        near(fit, 0.2)


def test_a_machine_that_became_slower_or_faster_is_followed_within_a_few_moves() -> None:
    fit = MoveFit(0.05, 1e10)
    good(fit, SIZES)
    for size in [MB, 100 * MB] * 3:
        fit.moved(size, 0.5 + size / 1e8)
    assert fit.seconds(MB) == pytest.approx(0.51, rel=0.1)
    assert fit.seconds(100 * MB) == pytest.approx(1.5, rel=0.1)
    good(fit, [MB, 100 * MB] * 3)
    assert fit.seconds(MB) == pytest.approx(0.011, rel=0.1)
    assert fit.seconds(100 * MB) == pytest.approx(0.11, rel=0.1)


def rounds(costs: Costs, sessions: int, seconds: float) -> list[int]:
    """Sessions of 30 tokens change their cells; those that are carried take so long. Which ones were carried."""
    carried = []
    for number in range(sessions):
        if costs.carries(30):
            costs.carried(30)
            costs.moved(30 * TOKEN, 30, seconds)
            carried.append(number)
        else:
            costs.left_behind(30)
    return carried


def test_small_sessions_are_moved_again_after_a_first_move_that_stalled() -> None:
    costs = Costs(CostPriors(prefill_tps=500.0))
    costs.moved(100 * MB, 1000, 2.0)
    assert not costs.carry_pays(30), "0.06 s of prefill"
    carried = rounds(costs, 60, 0.013)
    assert carried == list(range(carried[0], 60)), "one trial was enough"
    assert carried[0] == 16


def test_trials_in_vain_come_ever_more_seldom_and_none_is_made_on_a_mere_belief() -> None:
    costs = Costs(CostPriors(prefill_tps=500.0))
    costs.moved(100 * MB, 1000, 2.0)
    assert rounds(costs, 300, 2.0) == [16, 16 + 33, 16 + 33 + 65, 16 + 33 + 65 + 129]
    assert rounds(Costs(CostPriors(prefill_tps=500.0, kv_setup_s=2.0)), 300, 2.0) == []
    assert not Costs(CostPriors()).carries(0)
