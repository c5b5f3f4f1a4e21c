"""Did cached prompt tokens outlive the policy that computed them?

A call that goes on from an older policy's turn and reports cached tokens is sound only if somebody computed those very
tokens under the new policy first: a group mate with the same prompt, a repeated call, the call that was in flight when
the weights changed. This module looks for that somebody among all recorded calls. Invariant: a call is reported only if
no call of any execution, begun before it ended, can have left those tokens in a cache under its own version.

Prefixes are compared by polynomial digests modulo 2^64 of every `_BLOCK`-th of them (Karp and Rabin, 1987), so that a
store of millions of tokens is a few array operations. Pure: rollouts in, findings out. Which cell served a call is not
recorded, so this shows that a clean cache was possible, not that it was the same cell's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_tito.findings import Finding
from gyre_tito.rollouts import Ids, Rollout, Turn

_BLOCK = 8
_BASE = np.uint64(0x9E3779B97F4A7C15)

Marks = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class _Path:
    """Digests of the prefixes of one turn's prompt and sampled tokens; those up to `begin` are `before`'s.

    `own[k]` uint64 names the prefix of length `begin + k + 1`.
    """

    before: _Path | None
    begin: int
    own: Marks

    @property
    def length(self) -> int:
        return self.begin + len(self.own)

    def at(self, length: int) -> np.uint64:
        """The digest of the first `length` tokens."""
        path: _Path = self
        while length <= path.begin and path.before is not None:
            path = path.before
        return path.own[length - path.begin - 1] if length else np.uint64(0)

    def blocks(self, low: int, high: int) -> list[int]:
        """Digests of the prefixes whose length is a multiple of the block size and in (low, high]."""
        out: list[int] = []
        path: _Path | None = self
        top = min(high, self.length)
        while path is not None and low < top:
            first = max(low, path.begin) // _BLOCK * _BLOCK + _BLOCK
            out.extend(path.own[first - path.begin - 1 : top - path.begin : _BLOCK].tolist())
            top = min(top, path.begin)
            path = path.before
        return out


@dataclass(frozen=True, slots=True, eq=False)
class _Suspect:
    """A turn whose cached tokens must have been computed under `version`, though the turn before it is `older`."""

    rollout: Rollout
    number: int
    path: _Path
    version: int
    older: int


def check_cache(rollouts: Sequence[Rollout]) -> Iterator[Finding]:
    """`cache-across-versions`, over all rollouts of a file or store at once."""
    if not any(_doubt(rollout, number) for rollout in rollouts for number in range(len(rollout.turns))):
        return
    powers = _Powers()
    computed: list[tuple[float, Turn, _Path]] = []
    suspects: list[tuple[float, _Suspect]] = []
    for rollout in rollouts:
        for number, (turn, path) in enumerate(zip(rollout.turns, _paths(rollout, powers), strict=True)):
            computed.append((-math.inf if turn.started_at is None else turn.started_at, turn, path))
            if doubt := _doubt(rollout, number):
                ended = math.inf if turn.ended_at is None else turn.ended_at
                suspects.append((ended, _Suspect(rollout, number, path, *doubt)))
    yield from _unexplained(computed, suspects)


def _unexplained(
    computed: list[tuple[float, Turn, _Path]], suspects: list[tuple[float, _Suspect]]
) -> Iterator[Finding]:
    """The suspects whose cached prefix nobody had computed under their version, in order of time."""
    computed.sort(key=lambda one: one[0])
    wanted = {suspect.version for _, suspect in suspects}
    known: dict[int, set[int]] = defaultdict(set)
    at = 0
    for ended, suspect in sorted(suspects, key=lambda one: one[0]):
        while at < len(computed) and computed[at][0] <= ended:
            _learn(known, wanted, computed[at][1], computed[at][2])
            at += 1
        turn = suspect.rollout.turns[suspect.number]
        needed = suspect.path.blocks(0, min(turn.cached or 0, suspect.path.length - len(turn.sampled)))
        missing = sum(mark not in known[suspect.version] for mark in needed)
        if missing:
            message = (
                f"{turn.cached} prompt tokens came from a cache and were continued under version {suspect.version}; "
                f"the turn before ran under {suspect.older}, and no recorded call computed {missing * _BLOCK} "
                f"of them under {suspect.version}"
            )
            place = turn.place or suspect.rollout.place
            yield Finding("cache-across-versions", suspect.rollout.execution, message, place, suspect.number)


def _learn(known: dict[int, set[int]], wanted: set[int], turn: Turn, path: _Path) -> None:
    """What a call has put into caches: what was not cached, under its first version. If its version changed on the
    way, an engine may have computed everything again, which is taken for true of every later version."""
    versions = _versions(turn)
    for version in set(versions) & wanted:
        fresh = turn.cached or 0 if version == versions[0] else 0
        known[version].update(path.blocks(fresh // _BLOCK * _BLOCK, path.length))


def _doubt(rollout: Rollout, number: int) -> tuple[int, int] | None:
    """(version, older version) of a turn with cached tokens that goes on from a turn of an older policy."""
    turn = rollout.turns[number]
    before = turn_before(rollout, number)
    now, then = _versions(turn), [] if before is None else _versions(before)
    if not turn.cached or not now or not then or now[0] <= max(then):
        return None
    return now[0], max(then)


def turn_before(rollout: Rollout, number: int) -> Turn | None:
    """The turn that a turn continues: the one it names, else the last of its session."""
    turn = rollout.turns[number]
    if turn.parent is not None:
        return rollout.turns[turn.parent]
    return next((one for one in reversed(rollout.turns[:number]) if one.session == turn.session), None)


def _versions(turn: Turn) -> list[int]:
    return [] if turn.versions is None else [int(one) for one in turn.versions if one >= 0]


def _paths(rollout: Rollout, powers: _Powers) -> list[_Path]:
    paths: list[_Path] = []
    for turn in rollout.turns:
        before = paths[turn.parent] if turn.parent is not None and turn.continues else None
        begin = turn.continues or 0
        start = np.uint64(0) if before is None else before.at(begin)
        paths.append(_Path(before, begin, powers.digests(start, begin, turn.prompt, turn.sampled)))
    return paths


class _Powers:
    """Powers of the base, grown as needed."""

    def __init__(self) -> None:
        self._powers: Marks = np.ones(1, dtype=np.uint64)

    def digests(self, start: np.uint64, begin: int, *parts: Ids) -> Marks:
        """Digests of the prefixes that grow from one of length `begin` by the ids in `parts`."""
        ids = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]).astype(np.uint64)
        if begin + len(ids) > len(self._powers):
            size = 2 * (begin + len(ids))
            self._powers = np.cumprod(np.full(size, _BASE), dtype=np.uint64)
        terms = _mixed(ids) * self._powers[begin : begin + len(ids)]
        return np.asarray(start + np.cumsum(terms, dtype=np.uint64), dtype=np.uint64)


def _mixed(ids: Marks) -> Marks:
    """Ids spread over 64 bits (the finalizer of SplitMix64), so that small ids do not make alike digests."""
    out = (ids + np.uint64(1)) * _BASE
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))
