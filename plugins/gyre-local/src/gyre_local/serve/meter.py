"""Counters and measured speeds of an engine.

Invariant: counters only rise; a speed is None until a pass that shows it has run.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTH = 0.1
"""Weight of the newest pass in a running mean."""


@dataclass(slots=True)
class Meter:
    """What `EngineLoad` reports of the past. Times are seconds."""

    prefilled: int = 0
    cached: int = 0
    sampled: int = 0
    passes: int = 0
    preemptions: int = 0
    decode_rate: float | None = None
    """Tokens per second of the whole batch in passes without prefill."""
    prefill_rate: float | None = None
    _decode_pass: float | None = None

    def record(self, decoded: int, prefilled: int, seconds: float) -> None:
        """One pass took `seconds` for `decoded` rows and `prefilled` prompt tokens in chunks."""
        self.passes += 1
        if not prefilled:
            self.decode_rate = _mean(self.decode_rate, decoded / seconds)
            self._decode_pass = _mean(self._decode_pass, seconds)
            return
        own = seconds - (self._decode_pass or 0.0 if decoded else 0.0)
        self.prefill_rate = _mean(self.prefill_rate, prefilled / max(own, seconds / 10))


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTH * (new - old)
