"""What moving KV costs here: a set-up and a rate, fitted to the moves that were made.

A move of ``size`` bytes is modelled as ``setup + size / rate``. Both are found by least squares on relative errors,
each move counting more than the one before it, so that the figures follow the machine. What the moves leave open (one
cannot tell a set-up from a rate) two anchors decide, which count little: what was believed beforehand, made as much
slower or faster as the moves were.

Invariant: the set-up is never negative and the rate above 0, so a larger session never looks cheaper to move. Pure: the
same moves in the same order give the same figures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

__all__ = ["MoveFit"]

_MEMORY = 0.75
_WINDOW = 16
_TRUST = 0.002
_ANCHORS = (1e6, 1e9)
"""Sizes in bytes at which the belief counts."""
_ROUNDS = 6


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
        """A move of ``size`` bytes, above 0, took ``seconds``, above 0. Errors are relative to the fit itself, so it is
        found in a few rounds; those of the anchors to the larger of the two, so that they never count more.
        """
        self._moves.append((float(size), seconds))
        newest = len(self._moves) - 1
        rows = [(x, y, _MEMORY ** (newest - i)) for i, (x, y) in enumerate(self._moves)]
        setup_s, slope = self._believed
        pace = sum(w * math.log(y / (setup_s + x * slope)) for x, y, w in rows) / sum(w for _, _, w in rows)
        anchors = [(x, math.exp(pace) * (setup_s + x * slope), _TRUST) for x in _ANCHORS]
        self.setup_s, self._slope = _line((x, y, w / y**2) for x, y, w in rows + anchors)
        for _ in range(_ROUNDS):
            weighed = [(x, y, w / self.seconds(x) ** 2) for x, y, w in rows]
            weighed += [(x, y, w / max(y, self.seconds(x)) ** 2) for x, y, w in anchors]
            self.setup_s, self._slope = _line(weighed)


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
