"""Numbers and sparklines as people read them; used by the live view, plain lines and the report.

Pure text. Invariant: nothing here is longer than a few characters, whatever the number.
"""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """A count with three digits: 950, 1.2k, 34k, 1.5M."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            scaled = value / size
            return f"{scaled:.1f}{unit}" if abs(scaled) < 10 else f"{scaled:.0f}{unit}"
    return f"{value:.0f}"


def size(nbytes: float) -> str:
    """Bytes: 900 B, 1.2 kB, 34 MB."""
    text = count(nbytes)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def clock(seconds: float) -> str:
    """A duration as m:ss or h:mm:ss."""
    whole = max(0, int(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def seconds(value: float) -> str:
    """A short duration: 12 ms, 1.25 s, 34 s, 2 min."""
    if value < 0.995:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """One block character a value, from `low` to `high` (the values' own range when absent)."""
    if not values:
        return ""
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    if top <= bottom:
        return _BARS[0] * len(values)
    steps = len(_BARS) - 1
    return "".join(_BARS[max(0, min(steps, round((v - bottom) / (top - bottom) * steps)))] for v in values)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, its end marked when it was cut."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
