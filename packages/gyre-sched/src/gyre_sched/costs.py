"""What things cost here, measured.

Keeps exponentially weighted means of switches per direction, weight syncs, KV moves, prefill and training, starting
from priors, and answers the two questions that depend on them: move or prefill, and does a switch pay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .config import CostPriors
from .ids import Role
from .transfers import MoveFit

__all__ = ["CostTable", "Costs"]

_WEIGHT = 0.25
_TRY_FIRST = 16
"""Sessions in a row that are prefilled because moves seem dear, before one is moved all the same."""


@dataclass(frozen=True, slots=True)
class CostTable:
    """Costs as they are believed now, for people and policies. Seconds, bytes per second, tokens per second."""

    to_train_s: float
    to_rollout_s: float
    sync_s: float
    kv_setup_s: float
    kv_bytes_per_s: float
    kv_bytes_per_token: float
    prefill_tps: float
    train_tps: float
    step_s: float
    """Seconds from one published version to the next."""
    measured: tuple[tuple[str, int], ...]
    """How often each figure was measured; 0 means it is still the prior."""


class Costs:
    """Running means. The first measurement replaces the prior, later ones move it by a quarter of the difference.
    Set-up and rate of KV moves are fitted together (`MoveFit`). Only a move can tell that moves have become cheap, so
    one is tried now and then where they seem too dear; each in vain makes the wait for the next twice as long.
    """

    __slots__ = ("_moves", "_prior", "_refused", "_try_after", "_value", "counts")

    def __init__(self, priors: CostPriors) -> None:
        self._prior = priors
        self._moves = MoveFit(priors.kv_setup_s, priors.kv_bytes_per_s)
        self._value: dict[str, float] = {
            "to_train_s": priors.to_train_s,
            "to_rollout_s": priors.to_rollout_s,
            "sync_s": priors.sync_s,
            "kv_setup_s": priors.kv_setup_s,
            "kv_bytes_per_s": priors.kv_bytes_per_s,
            "kv_bytes_per_token": priors.kv_bytes_per_token,
            "prefill_tps": priors.prefill_tps,
            "train_tps": priors.train_tps,
            "step_s": priors.step_s,
        }
        self.counts = dict.fromkeys(self._value, 0)
        self._refused, self._try_after = 0, _TRY_FIRST

    def _learn(self, name: str, value: float) -> None:
        old = self._value[name]
        self._value[name] = value if not self.counts[name] else old + _WEIGHT * (value - old)
        self.counts[name] += 1

    def __getitem__(self, name: str) -> float:
        return self._value[name]

    def switched(self, role: Role, seconds: float) -> None:
        """A switch to ``role`` took ``seconds``."""
        self._learn("to_train_s" if role is Role.TRAIN else "to_rollout_s", seconds)

    def synced(self, seconds: float) -> None:
        """A weight load took ``seconds``."""
        self._learn("sync_s", seconds)

    def moved(self, size: int, tokens: int, seconds: float) -> None:
        """A KV move of ``size`` bytes for ``tokens`` took ``seconds``."""
        if size > 0 and seconds > 0:
            self._moves.moved(size, seconds)
            for name, value in (("kv_setup_s", self._moves.setup_s), ("kv_bytes_per_s", self._moves.rate)):
                self._value[name] = value
                self.counts[name] += 1
        if size > 0 and tokens > 0:
            self._learn("kv_bytes_per_token", size / tokens)

    def prefilled(self, tps: float) -> None:
        """An engine reported its prefill speed."""
        self._learn("prefill_tps", tps)

    def trained(self, tokens: int, seconds: float) -> None:
        """A contribution over ``tokens`` took ``seconds`` on one cell."""
        if tokens > 0 and seconds > 0:
            self._learn("train_tps", tokens / seconds)

    def stepped(self, seconds: float) -> None:
        """A step took ``seconds`` from the version before it to its own."""
        self._learn("step_s", seconds)

    def round_trip(self) -> float:
        """Seconds of a cell that a loan costs: there and back."""
        return self._value["to_train_s"] + self._value["to_rollout_s"]

    def move_seconds(self, tokens: int) -> float:
        """``bytes/bandwidth + set-up`` for a context of ``tokens``."""
        return self._moves.seconds(tokens * self._value["kv_bytes_per_token"])

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to prefill a context of ``tokens``, quadratic part included."""
        slow = 1.0 + self._prior.prefill_quadratic * tokens / 2.0
        return tokens / self._value["prefill_tps"] * slow

    def carry_pays(self, tokens: int) -> bool:
        """The move-or-prefill rule."""
        return tokens > 0 and self.move_seconds(tokens) < self.prefill_seconds(tokens)

    def carries(self, tokens: int) -> bool:
        """Whether to carry a context of ``tokens`` now: where it pays, and where a trial is due."""
        return self.carry_pays(tokens) or (tokens > 0 and self._refused >= self._try_after)

    def carried(self, tokens: int) -> None:
        """A session with a context of ``tokens`` sets out with its KV."""
        self._refused = 0
        self._try_after = _TRY_FIRST if self.carry_pays(tokens) else 2 * self._try_after

    def left_behind(self, tokens: int) -> None:
        """A session changed its cell without its KV of ``tokens``. It asks for a trial only if moves that were made
        say that moving does not pay: what was merely believed beforehand is the user's word.
        """
        if tokens > 0 and self.counts["kv_setup_s"] and not self.carry_pays(tokens):
            self._refused += 1

    def train_seconds(self, tokens: float) -> float:
        """Seconds of one cell to train ``tokens``."""
        return tokens / self._value["train_tps"]

    def table(self) -> CostTable:
        """All figures, for people."""
        return CostTable(**self._value, measured=tuple(self.counts.items()))

    def snapshot(self) -> tuple[tuple[str, float, int], ...]:
        """For comparing machines."""
        figures = tuple((k, v, self.counts[k]) for k, v in self._value.items() if not math.isnan(v))
        return (*figures, ("try_after", float(self._try_after), self._refused))
