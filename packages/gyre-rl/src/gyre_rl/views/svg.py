"""Charts as inline SVG: small pure functions from numbers to markup.

Invariant: the output is self-contained (no script, no font, no address), takes its colours from CSS variables so that
light and dark both work, and holds at most `MAX_POINTS` points a line however long the run was. Text is escaped here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

MAX_POINTS = 600
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        span = self.high - self.low or 1.0
        return self.start + (value - self.low) / span * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart's drawing area, in SVG units; the left and the bottom hold the axes' words."""

    width: int = 860
    height: int = 220
    left: int = 54
    right: int = 14
    top: int = 12
    bottom: int = 34

    def x(self, low: float, high: float) -> Scale:
        """Horizontal scale over the drawing area."""
        return Scale(low, high, self.left, self.width - self.right)

    def y(self, low: float, high: float) -> Scale:
        """Vertical scale over the drawing area, upwards."""
        return Scale(low, high, self.height - self.bottom, self.top)


@dataclass(frozen=True, slots=True)
class Line:
    """A series: its name in the legend, its points, its CSS colour class; `dash` draws it broken."""

    name: str
    points: Sequence[Point]
    style: str
    dash: bool = False
    area: bool = False
    step: bool = False
    """Hold each value until the next point."""
    dots: bool = False
    joined: bool = True
    """Draw the line between the points; without it they stand alone."""


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them; with `whole` no fractions."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(1, count)
    size = 10.0 ** math.floor(math.log10(raw))
    unit = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw * 0.999)
    first = math.ceil(low / unit - 1e-9)
    found = [round(i * unit, 10) for i in range(first, math.floor(high / unit + 1e-9) + 1)]
    return [value for value in found if value == round(value)] if whole else found


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about `limit` points: of each bucket of neighbours the lowest and the highest, in order."""
    if len(points) <= limit:
        return list(points)
    size = len(points) / (limit // 2)
    kept: list[Point] = []
    for i in range(limit // 2):
        bucket = points[int(i * size) : int((i + 1) * size)]
        if bucket:
            pair = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
            kept.extend(sorted(pair))
    return kept


def chart(
    lines: Sequence[Line],
    *,
    frame: Frame = Frame(),
    x_label: str = "",
    y_label: str = "",
    x_words: Callable[[float], str] = lambda v: f"{v:g}",
    y_words: Callable[[float], str] = lambda v: f"{v:g}",
    y_range: tuple[float, float] | None = None,
    x_range: tuple[float, float] | None = None,
    whole_x: bool = False,
) -> str:
    """A line chart; `whole_x` numbers only whole places of the x axis."""
    points = [p for line in lines for p in line.points]
    if not points:
        return empty(frame)
    low_x, high_x = x_range or _range([p[0] for p in points])
    low_y, high_y = y_range or _range([0.0, *(p[1] for p in points)], room=0.06)
    x, y = frame.x(low_x, high_x), frame.y(low_y, high_y)
    body = [axes(frame, x, y, x_words, y_words, x_label, y_label, whole_x)]
    body += [_line(line, x, y, frame) for line in lines if line.points]
    return svg(frame, "".join(body)) + legend(
        frame, [(line.name, line.style, line.dash) for line in lines if line.points]
    )


def bars(
    values: Sequence[tuple[float, float, str]],
    *,
    frame: Frame = Frame(),
    style: str = "c1",
    x_label: str = "",
    y_label: str = "",
    y_words: Callable[[float], str] = lambda v: f"{v:g}",
) -> str:
    """A bar at each (x, height, tooltip); x are whole numbers, one bar each."""
    if not values:
        return empty(frame)
    low, high = min(v[0] for v in values) - 0.5, max(v[0] for v in values) + 0.5
    x, y = frame.x(low, high), frame.y(0.0, max(v[1] for v in values) * 1.06 or 1.0)
    width = max(0.5, min(40.0, (x(1) - x(0)) * 0.72))
    body = [axes(frame, x, y, lambda v: f"{v:g}", y_words, x_label, y_label, True)]
    for place, value, tip in values:
        top = y(value)
        body.append(
            f'<rect class="fill {style}" x="{x(place) - width / 2:.2f}" y="{top:.2f}" width="{width:.2f}" '
            f'height="{max(0.0, y(0) - top):.2f}" rx="1.5"><title>{escape(tip)}</title></rect>'
        )
    return svg(frame, "".join(body))


def axes(
    frame: Frame,
    x: Scale,
    y: Scale,
    x_words: Callable[[float], str],
    y_words: Callable[[float], str],
    x_label: str,
    y_label: str,
    whole_x: bool = False,
) -> str:
    """Grid lines, numbers and the names of both axes."""
    parts: list[str] = []
    for value in ticks(y.low, y.high, 4):
        at = y(value)
        parts.append(
            f'<line class="grid" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{at:.1f}" y2="{at:.1f}"/>'
        )
        parts.append(f'<text class="num end" x="{frame.left - 8}" y="{at + 3.5:.1f}">{escape(y_words(value))}</text>')
    parts += x_axis(frame, x, x_words, x_label, whole=whole_x)
    parts.append(f'<text class="axis" x="{frame.left}" y="{frame.top - 1}">{escape(y_label)}</text>')
    return "".join(parts)


def x_axis(frame: Frame, x: Scale, words: Callable[[float], str], label: str, *, whole: bool = False) -> list[str]:
    """Numbers below the chart and the axis's name at its right end."""
    foot = frame.height - frame.bottom
    parts = [f'<line class="base" x1="{frame.left}" x2="{frame.width - frame.right}" y1="{foot}" y2="{foot}"/>']
    parts += [
        f'<text class="num mid" x="{x(value):.1f}" y="{foot + 15}">{escape(words(value))}</text>'
        for value in ticks(x.low, x.high, 8, whole=whole)
    ]
    parts.append(f'<text class="axis end" x="{frame.width - frame.right}" y="{foot + 30}">{escape(label)}</text>')
    return parts


def legend(frame: Frame, entries: Sequence[tuple[str, str, bool]]) -> str:
    """Names of series with their colours; left out for one unnamed series."""
    shown = [
        f'<span class="key"><i class="{"dash " if dash else ""}bg-{style}"></i>{escape(name)}</span>'
        for name, style, dash in entries
        if name
    ]
    inset = f"margin-left:{frame.left / frame.width:.1%}"
    return f'<div class="legend" style="{inset}">{"".join(shown)}</div>' if shown else ""


def svg(frame: Frame, body: str) -> str:
    """The element around a chart."""
    return f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" class="chart">{body}</svg>'


def empty(frame: Frame) -> str:
    """What is drawn when nothing was recorded."""
    at = f'x="{frame.width / 2}" y="{frame.height / 2}"'
    return svg(frame, f'<text class="axis mid" {at}>nothing was recorded</text>')


def _line(line: Line, x: Scale, y: Scale, frame: Frame) -> str:
    points = [(x(px), y(py)) for px, py in thin(line.points)]
    path = _path(points, line.step)
    out = ""
    if line.area:
        foot = frame.height - frame.bottom
        out += f'<path class="area {line.style}" d="{path}L{points[-1][0]:.1f} {foot}L{points[0][0]:.1f} {foot}Z"/>'
    dash = ' stroke-dasharray="5 4"' if line.dash else ""
    if line.joined:
        out += f'<path class="line {line.style}"{dash} d="{path}"/>'
    if line.dots or len(points) == 1:
        out += "".join(
            f'<circle class="dot {line.style}" cx="{px:.1f}" cy="{py:.1f}" r="{2.6 if line.joined else 4.5}"/>'
            for px, py in points
        )
    return out


def _path(points: Sequence[Point], step: bool) -> str:
    parts = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for before, after in itertools.pairwise(points):
        if step:
            parts.append(f"L{after[0]:.1f} {before[1]:.1f}")
        parts.append(f"L{after[0]:.1f} {after[1]:.1f}")
    return "".join(parts)


def _range(values: Sequence[float], room: float = 0.0) -> tuple[float, float]:
    low, high = min(values), max(values)
    if high <= low:
        return low, low + 1.0
    return low, high + (high - low) * room
