"""`cache-across-versions`: said only where no recorded call can have computed the cached tokens under their version."""

from __future__ import annotations

import numpy as np
from gyre_tito.check_cache import check_cache
from gyre_tito.rollouts import Rollout, Turn
from hypothesis import given, settings
from hypothesis import strategies as st

SYSTEM = list(range(100, 124))
TASK = list(range(200, 216))


def turn(prompt, sampled, version, **more):
    versions = version if isinstance(version, list) else [version] * len(sampled)
    return Turn(prompt, sampled, [-0.5] * len(sampled), versions, **more)


def found(*rollouts):
    return [(one.execution, one.call) for one in check_cache(rollouts)]


def crossing(name="e", cached=40, begin=10.0, end=11.0):
    """A rollout whose second turn runs under version 2 with `cached` prompt tokens; its first ran under 1."""
    first = [*range(300, 310)]
    return Rollout(
        name,
        (
            turn([*SYSTEM, *TASK], first, 1, cached=0, started_at=0.0, ended_at=1.0),
            turn([5] * 9, [6], 2, cached=cached, parent=0, continues=50, started_at=begin, ended_at=end),
        ),
    )


def mate(begin, **more):
    more.setdefault("cached", 0)
    return Rollout("mate", (turn([*SYSTEM, *TASK], [7] * 8, more.pop("version", 2), started_at=begin, **more),))


def test_a_cache_that_nobody_filled_again_is_reported():
    assert found(crossing()) == [("e", 1)]


def test_a_group_mate_that_computed_the_prompt_before_explains_it():
    assert found(crossing(), mate(5.0)) == []


def test_one_that_came_later_or_was_cached_itself_or_ran_under_another_version_does_not():
    assert found(crossing(), mate(12.0)) == [("e", 1)]
    assert found(crossing(), mate(5.0, cached=32)) == [("e", 1)]
    assert found(crossing(), mate(5.0, version=3)) == [("e", 1)]


def test_a_mate_explains_only_the_tokens_that_it_shares():
    assert found(crossing(cached=40), mate(5.0)) == []
    assert found(crossing(cached=50), mate(5.0)) == [("e", 1)]


def test_two_calls_do_not_excuse_each_other():
    assert sorted(found(crossing("a"), crossing("b"))) == [("a", 1), ("b", 1)]


def test_a_call_in_flight_at_the_change_may_have_computed_everything_again():
    assert found(crossing(), mate(0.5, cached=40, version=[1] * 4 + [2] * 4)) == []


def brute_force(rollouts):
    """The rule token by token: is every cached prefix one that some call's own work covers?"""
    paths = {}
    for rollout in rollouts:
        for number, one in enumerate(rollout.turns):
            head = paths[rollout.execution, one.parent][: one.continues] if one.parent is not None else []
            paths[rollout.execution, number] = [*head, *one.prompt, *one.sampled]
    out = []
    for rollout in rollouts:
        for number, one in enumerate(rollout.turns):
            if one.parent is None or one.versions[0] <= max(rollout.turns[one.parent].versions) or not one.cached:
                continue
            version, mine = one.versions[0], paths[rollout.execution, number]
            done = set()
            for other in rollouts:
                for place, two in enumerate(other.turns):
                    if version not in two.versions or two.started_at > one.ended_at:
                        continue
                    begin = two.cached // 8 * 8 if two.versions[0] == version else 0
                    theirs = paths[other.execution, place]
                    done |= {tuple(theirs[:size]) for size in range(begin + 1, len(theirs) + 1)}
            if any(tuple(mine[:size]) not in done for size in range(8, one.cached + 1, 8)):
                out.append((rollout.execution, number))
    return sorted(out)


@st.composite
def stores(draw):
    """A few executions of a few turns over few tokens, so that prefixes are often shared, with cuts and versions."""
    out = []
    for name in range(draw(st.integers(1, 4))):
        turns, sizes = [], []
        for number in range(draw(st.integers(1, 4))):
            parent = draw(st.integers(0, number - 1)) if number else None
            continues = draw(st.integers(0, sizes[parent] // 8)) * 8 if number else 0
            chunk = st.sampled_from([[1] * 8, [2] * 8, [1] * 5])
            prompt, sampled = draw(chunk), draw(chunk)
            at = draw(st.integers(1, 3))
            versions = sorted(draw(st.lists(st.integers(at, 3), min_size=len(sampled), max_size=len(sampled))))
            cached = draw(st.integers(0, continues + len(prompt)))
            begin = draw(st.integers(0, 9))
            sizes.append(continues + len(prompt) + len(sampled))
            times = {"started_at": float(begin), "ended_at": float(begin + draw(st.integers(0, 3)))}
            ids = np.array(prompt, np.int32)
            turns.append(turn(ids, sampled, versions, cached=cached, parent=parent, continues=continues, **times))
        out.append(Rollout(str(name), tuple(turns)))
    return out


@settings(max_examples=300, deadline=None)
@given(stores())
def test_it_finds_what_brute_force_finds(rollouts):
    assert sorted(found(*rollouts)) == brute_force(rollouts)
