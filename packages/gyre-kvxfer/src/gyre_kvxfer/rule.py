"""`MoveRule`: is moving a session's KV cheaper than prefilling its tokens again? Pure, from measured numbers.

A move is modelled as `setup + bytes / bandwidth`, a prefill of tokens [c, n) as `setup + a (n - c) + b (n² - c²)`:
the attention of later tokens looks at more of them. Both are fitted by least squares on relative errors, old
measurements fading, so the rule follows the machine it runs on. No real prefill has that shape over four decades of
length (kernels change with the batch, caches overflow), so what was measured near a length corrects the fit there.

Invariant: coefficients are never negative, and a correction is never more than what was measured near by differed.
Without any measurement the given priors decide. It knows no clock: callers report what moves (`MoveReport.bytes`,
`.seconds`) and prefills took.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.errors import KVError, explain

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: its features and the seconds it took."""

    features: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Least squares on relative errors for seconds = coefficients · features, no coefficient below 0.

    `prior`: coefficients believed before any measurement; they count like `trust` measurements at each feature row of
    `anchors`. The newest `window` samples count, each `memory` times as much as the one after it. With a `width`, a
    predicted time is corrected by what samples of about the same second feature differed from the fit; at a ratio of
    exp(width) a sample counts 0.6 times as much as at the same size.
    """

    prior: tuple[float, ...]
    anchors: tuple[tuple[float, ...], ...]
    memory: float = 0.97
    trust: float = 0.02
    window: int = 128
    width: float = 0.0
    samples: tuple[Sample, ...] = ()

    def observe(self, features: tuple[float, ...], seconds: float) -> Fit:
        """This measurement counted in. Raises `KVError` for a time or features that cannot be."""
        if not 0 < seconds < float("inf") or len(features) != len(self.prior):
            came = f"{seconds} s for {features}"
            raise KVError(explain("measuring a move or prefill", came, "a positive time", "Report what was measured."))
        return replace(self, samples=(*self.samples, Sample(features, seconds))[-self.window :])

    def coefficients(self) -> tuple[float, ...]:
        """The best coefficients. Errors are relative to the fit itself, so it is found in a few rounds."""
        if not self.samples:
            return self.prior
        n = len(self.samples)
        rows = np.array([*self.anchors, *(s.features for s in self.samples)], np.float64)
        times = np.array([*(np.dot(a, self.prior) for a in self.anchors), *(s.seconds for s in self.samples)])
        weights = np.array([*(self.trust for _ in self.anchors), *(self.memory ** (n - 1 - i) for i in range(n))])
        scale = times
        best = np.array(self.prior)
        for _ in range(5):
            best = _nonnegative(rows, times, weights / scale**2)
            scale = np.maximum(rows @ best, 1e-9)
        return tuple(best.tolist())

    def seconds(self, features: tuple[float, ...]) -> float:
        """The predicted time."""
        return float(self.times(np.array([features], np.float64))[0])

    def times(self, rows: Floats) -> Floats:
        """The predicted times for rows of features, [n, features] -> [n]."""
        best = np.array(self.coefficients())
        fitted: Floats = rows @ best
        if not self.width or not self.samples:
            return fitted
        seen = np.array([sample.features for sample in self.samples])
        differed = np.log([sample.seconds for sample in self.samples]) - np.log(np.maximum(seen @ best, 1e-12))
        apart = np.log(np.maximum(rows[:, 1:2], 1.0)) - np.log(np.maximum(seen[:, 1], 1.0))
        counts = self.memory ** np.arange(len(seen) - 1, -1, -1) * np.exp(-((apart / self.width) ** 2) / 2)
        corrected: Floats = fitted * np.exp(counts @ differed / (counts.sum(axis=1) + self.trust))
        return corrected


def _nonnegative(rows: Floats, times: Floats, weights: Floats) -> Floats:
    """Weighted least squares with all coefficients 0 or more: every subset is tried (there are at most three)."""
    norm = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    a = rows / norm * np.sqrt(weights)[:, None]
    y = times * np.sqrt(weights)
    gram, pull = a.T @ a, a.T @ y
    best, best_cost = np.zeros(len(norm)), np.inf
    for size in range(len(norm), 0, -1):
        for at in map(list, combinations(range(len(norm)), size)):
            try:
                part = np.linalg.solve(gram[np.ix_(at, at)], pull[at])
            except np.linalg.LinAlgError:
                continue
            cost = float(part @ gram[np.ix_(at, at)] @ part - 2 * pull[at] @ part)
            if (part >= 0).all() and cost < best_cost - 1e-9 * abs(best_cost if best_cost < np.inf else 0.0):
                best, best_cost = np.zeros(len(norm)), cost
                best[at] = part
    out: Floats = best / norm
    return out


@dataclass(frozen=True, slots=True)
class Advice:
    """What the rule says: `move` or prefill, and the two predicted times in seconds."""

    move: bool
    move_seconds: float
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class MoveRule:
    """Fits for moves and prefills of one pair of cells (or one kind of pair).

    `margin`: a move must be this much cheaper (1.0: as soon as it is cheaper at all).
    """

    moves: Fit
    prefills: Fit
    margin: float = 1.0

    @classmethod
    def of(
        cls,
        *,
        bandwidth: float = 2e9,
        setup_seconds: float = 5e-3,
        prefill_tokens_per_second: float = 5e3,
        prefill_setup_seconds: float = 5e-3,
        margin: float = 1.0,
    ) -> MoveRule:
        """A rule from guesses: `bandwidth` bytes/s, the rest as named. Measurements soon outweigh them."""
        moves = Fit((setup_seconds, 1 / bandwidth), ((1.0, 1e6), (1.0, 1e9)))
        prefills = Fit(
            (prefill_setup_seconds, 1 / prefill_tokens_per_second, 0.0),
            ((1.0, 1e2, 1e4), (1.0, 1e4, 1e8), (1.0, 1e5, 1e10)),
            width=float(np.log(2)),
        )
        return cls(moves, prefills, margin)

    def moved(self, nbytes: int, seconds: float) -> MoveRule:
        """A move of `nbytes` took `seconds` in all."""
        return replace(self, moves=self.moves.observe((1.0, float(nbytes)), seconds))

    def prefilled(self, tokens: int, seconds: float, cached: int = 0) -> MoveRule:
        """Prefilling up to `tokens`, of which the first `cached` were there, took `seconds`."""
        return replace(self, prefills=self.prefills.observe(_prefill(tokens, cached), seconds))

    def advise(self, tokens: int, token_nbytes: int, cached: int = 0) -> Advice:
        """Move or prefill `tokens` tokens of `token_nbytes` bytes each, `cached` of them at the destination
        already.
        """
        move = self.moves.seconds((1.0, float((tokens - cached) * token_nbytes)))
        prefill = self.prefills.seconds(_prefill(tokens, cached))
        return Advice(move * self.margin < prefill, move, prefill)

    def break_even(self, token_nbytes: int, longest: int = 1 << 22) -> int | None:
        """The fewest tokens from which on a move is cheaper; None if it never is up to `longest`."""
        grid = np.unique(np.geomspace(1, longest, 4000).astype(np.int64))
        dear = np.flatnonzero(~self._cheaper(grid, token_nbytes))
        if dear.size and dear[-1] == len(grid) - 1:
            return None
        if not dear.size:
            return 1
        between = np.arange(grid[dear[-1]] + 1, grid[dear[-1] + 1] + 1)
        return int(between[np.argmax(self._cheaper(between, token_nbytes))])

    def _cheaper(self, tokens: npt.NDArray[np.int64], token_nbytes: int) -> npt.NDArray[np.bool_]:
        n = tokens.astype(np.float64)
        move = self.moves.times(np.stack([np.ones_like(n), n * token_nbytes], 1))
        prefill = self.prefills.times(np.stack([np.ones_like(n), n, n**2], 1))
        out: npt.NDArray[np.bool_] = move * self.margin < prefill
        return out


def _prefill(tokens: int, cached: int) -> tuple[float, float, float]:
    return 1.0, float(tokens - cached), float(tokens) ** 2 - float(cached) ** 2
