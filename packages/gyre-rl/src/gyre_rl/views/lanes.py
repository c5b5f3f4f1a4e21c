"""Role lanes: what each cell did over the time of a run, as SVG.

Invariant: a segment's length is its time and nothing is drawn where the run did not live. Above `MAX_LANES` cells the
lanes become areas that count cells by role, with the same colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gyre_core.roles import CellState

from gyre_rl.views import words
from gyre_rl.views.svg import Frame, Scale, legend, svg, thin, x_axis
from gyre_rl.views.timeline import Segment, Timeline

MAX_LANES = 40
LEFT = 92
ROW = 24
LEAST_WIDTH = 0.6
"""Narrower segments would vanish."""

LOOKS = {
    CellState.ROLLOUT: "rollout",
    CellState.TRAIN: "train",
    CellState.DRAINING: "moving",
    CellState.SWITCHING: "moving",
    CellState.FLUSHING: "moving",
    CellState.JOINING: "joining",
    CellState.LOST: "lost",
}
KEYS = [("ROLLOUT", "rollout", False), ("TRAIN", "train", False), ("draining, switching, flushing", "moving", False)]
RARE = [("joining", "joining", CellState.JOINING), ("lost", "lost", CellState.LOST)]


def lanes(line: Timeline) -> str:
    """The chart with its legend; time runs from the start of the run."""
    states = {segment.state for lane in line.lanes.values() for segment in lane}
    keys = KEYS + [(name, look, False) for name, look, state in RARE if state in states]
    return (_rows(line) if len(line.lanes) <= MAX_LANES else _areas(line)) + legend(Frame(left=LEFT), keys)


def _rows(line: Timeline) -> str:
    frame = Frame(height=len(line.lanes) * ROW + 60, left=LEFT)
    x = frame.x(0.0, max(line.end - line.start, 1e-6))
    foot = frame.height - frame.bottom
    body = [
        f'<line class="mark" x1="{x(s.time - line.start):.1f}" x2="{x(s.time - line.start):.1f}" y1="{frame.top}" '
        f'y2="{foot}"><title>step {getattr(s.event, "step", 0) + 1} applied</title></line>'
        for s in line.steps
    ]
    for row, (name, lane) in enumerate(line.lanes.items()):
        top = frame.top + 8 + row * ROW
        label = f"{name} (core)" if name in line.core else name
        body.append(f'<text class="lane end" x="{frame.left - 10}" y="{top + 12.5}">{escape(label)}</text>')
        body += [_bar(segment, x, top, line.start) for segment in lane]
    body += x_axis(frame, x, words.clock, "time since the start")
    return svg(frame, "".join(body))


def _bar(segment: Segment, x: Scale, top: float, start: float) -> str:
    left, right = x(segment.start - start), x(segment.end - start)
    tip = f"{segment.cell} {segment.state} for {words.seconds(segment.seconds)}"
    tip += f": {segment.reason}" if segment.reason else ""
    look = LOOKS.get(CellState(segment.state), "moving")
    return (
        f'<rect class="{look}" x="{left:.2f}" y="{top}" width="{max(LEAST_WIDTH, right - left):.2f}" '
        f'height="{ROW - 7}" rx="2"><title>{escape(tip)}</title></rect>'
    )


def _areas(line: Timeline) -> str:
    """Cells by role over time, stacked."""
    frame = Frame(height=260, left=LEFT)
    x, y = frame.x(0.0, max(line.end - line.start, 1e-6)), frame.y(0.0, float(len(line.lanes)))
    body: list[str] = []
    moments = _counts(line)
    for look in ("train", "moving", "rollout", "joining", "lost"):
        if not any(counts.get(look) for _, counts in moments):
            continue
        upper, lower = [], []
        for time, counts in moments:
            below = sum(counts.get(o, 0) for o in _BELOW[look])
            lower.append((time, float(below)))
            upper.append((time, float(below + counts.get(look, 0))))
        edge = [*thin(upper), *reversed(thin(lower))]
        path = "L".join(f"{x(t - line.start):.1f} {y(v):.1f}" for t, v in edge)
        body.append(f'<path class="{look}" d="M{path}Z"/>')
    body += x_axis(frame, x, words.clock, "time since the start")
    for value in (0, len(line.lanes)):
        body.append(f'<text class="num end" x="{frame.left - 8}" y="{y(value) + 3.5:.1f}">{value}</text>')
    return svg(frame, "".join(body))


_BELOW: dict[str, Sequence[str]] = {
    "train": (),
    "moving": ("train",),
    "rollout": ("train", "moving"),
    "joining": ("train", "moving", "rollout"),
    "lost": ("train", "moving", "rollout", "joining"),
}


def _counts(line: Timeline) -> list[tuple[float, dict[str, int]]]:
    """Cells by look after each change, each change also just before it, so that areas have steps."""
    changes: list[tuple[float, str, int]] = []
    for lane in line.lanes.values():
        for segment in lane:
            look = LOOKS.get(CellState(segment.state), "moving")
            changes += [(segment.start, look, 1), (segment.end, look, -1)]
    changes.sort(key=lambda change: change[0])
    now: dict[str, int] = {}
    moments: list[tuple[float, dict[str, int]]] = []
    for index, (time, look, change) in enumerate(changes):
        if index == 0 or time > changes[index - 1][0]:
            moments.append((time, dict(now)))
        now[look] = now.get(look, 0) + change
        if index + 1 == len(changes) or changes[index + 1][0] > time:
            moments.append((time, dict(now)))
    return moments
