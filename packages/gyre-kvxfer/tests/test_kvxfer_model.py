"""Exactly one owner, over message loss, duplication, reordering and death of either side."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("kvxfer_world", Path(__file__).with_name("kvxfer_world.py"))
w = sys.modules["kvxfer_world"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(w)

SMALL = {
    "at once": w.Scenario(freeze_below=1 << 20, until=3),
    "at once, deaths, faults": w.Scenario(freeze_below=1 << 20, until=2, deaths=True, faults=True),
    "pre-copy": w.Scenario(until=2),
    "pre-copy, deaths": w.Scenario(until=1, deaths=True),
}
LARGE = {
    "at once, long": w.Scenario(freeze_below=1 << 20, until=6),
    "at once, long, deaths, faults": w.Scenario(freeze_below=1 << 20, until=3, deaths=True, faults=True),
    "pre-copy, long": w.Scenario(until=3),
    "pre-copy, deaths, faults": w.Scenario(until=2, deaths=True, faults=True),
}


def run(scenario, settle_every: int) -> tuple[int, set]:
    """All reachable worlds: their number and the pairs of states seen."""
    states, ends = 0, set()
    for world, problems in w.explore(scenario, 10**9, settle_every):
        assert not problems, (problems, world.trace)
        states += 1
        ends.add((world.src.state, world.dst.state))
    return states, ends


def check(scenario, settle_every: int) -> None:
    states, ends = run(scenario, settle_every)
    assert states > 500
    assert any(d == "owner" for _, d in ends)
    assert any(s == "moved" for s, _ in ends)
    if scenario.until >= 3:
        assert ("aborted", "failed") in ends
        assert any(d == "unknown" for _, d in ends)


@pytest.mark.parametrize("name", SMALL)
def test_no_reachable_world_has_two_owners_or_loses_the_session(name):
    check(SMALL[name], 40)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LARGE)
def test_the_same_over_longer_times_with_deaths_and_faults(name):
    check(LARGE[name], 200)


BREAKS = {
    "the source answers Released before it stops": (
        w.s.SourceMachine,
        "_commit",
        lambda self, m, now: [w.s.Send(w.s.Released(self.move, m.seq))],
    ),
    "the lease also ends a session that was given": (
        w.s.SourceMachine,
        "_expire",
        lambda self: [*self._abort("lease"), w.s.DoUnfreeze()],
    ),
    "the destination trusts its own entry": (w.d.DestinationMachine, "_entered", lambda self, now: self._own()),
    "the destination ignores the lease": (w.d.DestinationMachine, "_copy_done", None),
}


@pytest.mark.parametrize("name", BREAKS)
def test_the_explorer_finds_broken_machines(name, monkeypatch):
    kind, method, broken = BREAKS[name]
    if broken is None:
        old = kind._copy_done

        def broken(self, now):
            self._lease_from = now
            return old(self, now)

    monkeypatch.setattr(kind, method, broken)
    scenario = w.Scenario(freeze_below=1 << 20, until=4)
    assert any(problems for _, problems in w.explore(scenario, 30000, 40))
