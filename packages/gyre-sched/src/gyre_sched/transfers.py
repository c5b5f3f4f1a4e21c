"""What moving KV costs here: a set-up and a rate, fitted to the moves that were made.

A move of ``size`` bytes is modelled as ``setup + size / rate``. Both are found by least absolute errors of the
logarithm: a move that took fifty times as long as it should pulls no harder than one that took twice as long, so one
that stalled spoils nothing. A machine that has changed is followed within a few moves, since each counts more than the
one before it. What the moves leave open (one cannot tell a set-up from a rate) two anchors decide, which count little:
what was believed beforehand, made as much slower or faster as the moves were.

Invariant: the set-up is never negative and the rate above 0, so a larger session never looks cheaper to move. Pure: the
same moves in the same order give the same figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["MoveFit"]

_MEMORY = 0.75
_WINDOW = 16
_TRUST = 0.002
_ANCHORS = (1e6, 1e9)
"""Sizes in bytes at which the belief counts."""
_NEAR = 0.1
"""Errors below this share of the fit count by their square, as noise does; the median of few moves would jump."""
_ROUNDS = 24


class MoveFit:
    """The fit and the newest moves it rests on."""

    __slots__ = ("_believed", "_moves", "_slope", "setup_s")

    def __init__(self, setup_s: float, rate: float) -> None:
        self.setup_s, self._slope = setup_s, 1.0 / rate
        self._believed = (setup_s, 1.0 / rate)
        self._moves: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return 1.0 / self._slope

    def seconds(self, size: float) -> float:
        """What moving ``size`` bytes takes."""
        return self.setup_s + size * self._slope

    def moved(self, size: int, seconds: float) -> None:
        """A move of ``size`` bytes, above 0, took ``seconds``, above 0. The fit is found in rounds, from the belief at
        the pace of most moves: each is by least squares, and a point counts the less, the further it was from the last.
        """
        self._moves.append((float(size), seconds))
        newest = len(self._moves) - 1
        rows = [(x, y, _MEMORY ** (newest - i)) for i, (x, y) in enumerate(self._moves)]
        setup_s, slope = self._believed
        pace = _median((y / (setup_s + x * slope), w) for x, y, w in rows)
        self.setup_s, self._slope = pace * setup_s, pace * slope
        rows += [(x, pace * (setup_s + x * slope), _TRUST) for x in _ANCHORS]
        for _ in range(_ROUNDS):
            self.setup_s, self._slope = _line([(x, y, w * self._pull(x, y)) for x, y, w in rows])

    def _pull(self, size: float, seconds: float) -> float:
        """What makes a squared error count like the absolute error of the logarithm."""
        fit = self.seconds(size)
        return 1.0 / (fit * max(abs(seconds - fit), _NEAR * fit))


def _median(values: Iterable[tuple[float, float]]) -> float:
    """Of (value, weight), at least one: the first value with half the weight at or below it."""
    ordered = sorted(values)
    left = sum(w for _, w in ordered) / 2.0
    for value, w in ordered:
        left -= w
        if left <= 0.0:
            return value
    return ordered[-1][0]


def _line(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Intercept and slope through (x, y, weight), neither below 0 and the slope above it."""
    one = x = xx = y = xy = 0.0
    for at, value, w in rows:
        one, x, xx = one + w, x + w * at, xx + w * at * at
        y, xy = y + w * value, xy + w * at * value
    spread = one * xx - x * x
    if spread <= 1e-12 * one * xx:  # one size counts for all: nothing tells a set-up from a rate
        return 0.0, xy / xx
    setup, slope = (xx * y - x * xy) / spread, (one * xy - x * y) / spread
    if slope <= 0.0:  # all took about as long: a byte costs next to nothing
        return y / one, 1e-6 * y / x
    return (setup, slope) if setup >= 0.0 else (0.0, xy / xx)
