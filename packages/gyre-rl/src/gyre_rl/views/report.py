"""The HTML report of a run: one file that needs nothing else, made from the run's event log.

Invariant: every figure is computed from the log and nothing is smoothed; what was not recorded is said to be missing.
The report of a run that was killed is as true as that of one that finished.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from gyre_core.errors import ConfigError

from gyre_rl.views import events as ev
from gyre_rl.views import words
from gyre_rl.views.lanes import LOOKS, lanes
from gyre_rl.views.log import read_log
from gyre_rl.views.model import Stamped
from gyre_rl.views.style import CSS
from gyre_rl.views.svg import Frame, Line, bars, chart
from gyre_rl.views.timeline import Timeline, timeline

ROWS = 200
"""Rows of a table; the log has the rest."""
TIMES = Frame(height=230, left=92)
"""Charts over time, aligned with the lanes."""
HALF = Frame(width=430, height=200, left=46)


def write_report(run_dir: Path, *, title: str | None = None) -> Path:
    """Write `run_dir`/report.html from its events.jsonl and config.toml, atomically; returns its path."""
    log = run_dir / "events.jsonl"
    if not log.is_file():
        raise ConfigError(
            f"writing the report of {run_dir}",
            got="no events.jsonl in it",
            expected="the directory of a run",
            fix="Give the directory that `gyre run` printed.",
        )
    config = run_dir / "config.toml"
    html = render(timeline(read_log(log)), config.read_text(encoding="utf-8") if config.is_file() else "", title)
    target = run_dir / "report.html"
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(html, encoding="utf-8")
    draft.replace(target)
    return target


def render(line: Timeline, config: str = "", title: str | None = None) -> str:
    """The whole page."""
    run = line.final.run
    name = title or (run.name if run else "a run")
    parts = [
        _head(line, name),
        _tiles(line),
        _score(line),
        _lanes(line),
        _load(line),
        f'<div class="pair">{_step_time(line)}{_staleness(line)}</div>',
        _tokens(line),
        _statuses(line),
        _switches(line),
        _moves(line),
        _notices(line),
        _config(config),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(name)} · Gyre</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{CSS}</style></head>'
        f"<body><main>{''.join(parts)}<footer>Made by Gyre from events.jsonl; times are seconds since the run's "
        "start.</footer></main></body></html>\n"
    )


def _head(line: Timeline, name: str) -> str:
    run, lives = line.final.run, line.lives
    status = lives[-1].status if lives else "empty"
    facts = []
    if run is not None:
        facts = [f"{run.cells} cells", f"policy {run.policy}" if run.policy else "", f"seed {run.seed}"]
        facts += [f"{run.tasks_per_step} tasks x {run.group_size} executions a step" if run.tasks_per_step else ""]
    if lives:
        facts.append(datetime.fromtimestamp(line.start, UTC).strftime("%Y-%m-%d %H:%M UTC"))
    if (compared := line.final.compared) is not None:
        facts.append(f"trainer and engine agree to {compared.mean:.1g} nats")
    if len(lives) > 1:
        facts.append("resumed once" if len(lives) == 2 else f"resumed {len(lives) - 1} times")
    reason = line.final.ended.reason if line.final.ended and line.final.ended.reason else ""
    tail = f'<p class="sub">{escape(reason)}</p>' if reason else ""
    words_of = {"cut": "ended without a word"}.get(status, status)
    return (
        f'<h1>{escape(name)}<span class="badge {escape(status)}">{escape(words_of)}</span></h1>'
        f'<p class="sub">{escape(" · ".join(f for f in facts if f))}</p>{tail}'
    )


def _tiles(line: Timeline) -> str:
    state, totals = line.final, line.final.totals
    tiles = [_eval_tile(line)]
    steps = f"{state.steps_applied}" + (f" of {state.run.steps}" if state.run else "")
    skipped = f"{totals.skipped_steps} skipped" if totals.skipped_steps else f"{words.clock(line.active_s)} of work"
    tiles.append(("steps", steps, skipped))
    tiles.append(("role switches", f"{totals.switches}", f"{totals.satellite_joins} satellites joined in mid-step"))
    kv = f"{totals.kv_moved_sessions} with their KV ({words.size(totals.kv_moved_bytes)})"
    if totals.prefilled_again_tokens:
        kv += f", {words.count(totals.prefilled_again_tokens)} tokens prefilled again"
    tiles.append(("sessions re-routed", f"{totals.sessions_rerouted}", kv))
    rested = f", {totals.went_on} went on from a rest" if totals.went_on else ""
    tiles.append(("executions", f"{totals.executions}", f"{totals.partial_scores} scored partially{rested}"))
    trees = f"{totals.sub_agents} sub-agents, {totals.compactions} compactions"
    tiles.append(("branches", f"{totals.branches}", trees))
    body = "".join(
        f'<div class="tile"><span>{escape(what)}</span><b>{escape(figure)}</b><small>{escape(note)}</small></div>'
        for what, figure, note in tiles
    )
    return f'<div class="tiles">{body}</div>'


def _eval_tile(line: Timeline) -> tuple[str, str, str]:
    first, last = line.final.first_eval, line.final.last_eval
    if first is None or last is None:
        return "held-out score", "not judged", ""
    if first is last:
        return "held-out score", f"{first.score:.3f}", f"{first.tasks} tasks, judged once"
    return (
        "held-out score",
        f"{first.score:.2f} → {last.score:.2f}",
        f"{last.score - first.score:+.3f} on {last.tasks} tasks",
    )


def _section(heading: str, words_below: str, body: str) -> str:
    return f"<section><h2>{escape(heading)}</h2><p>{escape(words_below)}</p>{body}</section>"


def _applied(line: Timeline) -> Iterator[tuple[Stamped, ev.StepApplied]]:
    for stamped in line.steps:
        if isinstance(stamped.event, ev.StepApplied):
            yield stamped, stamped.event


def _score(line: Timeline) -> str:
    train = [(float(e.step + 1), e.score) for _, e in _applied(line)]
    evals = [span.event for span in line.evals if isinstance(span.event, ev.Evaluated)]
    judged = [(float(each.step), each.score) for each in evals if each.tasks]
    drawn = chart(
        [Line("training executions, mean of the step", train, "c1", dots=len(train) <= 40),
         Line("held-out tasks", judged, "c2", dots=True, joined=False)],
        x_label="optimizer steps applied", y_label="score", y_range=(0.0, 1.0), whole_x=True,
        x_range=(0.0, max([1.0, *(p[0] for p in train + judged)])),
    )  # fmt: skip
    return _section(
        "Score",
        "Partial credit counts: a score is the share of an execution's milestones that passed. Executions that failed "
        "by our fault are in no mean.",
        drawn,
    )


def _lanes(line: Timeline) -> str:
    by_look: dict[str, float] = {}
    for state, seconds in line.seconds_by_state().items():
        by_look[LOOKS[state]] = by_look.get(LOOKS[state], 0.0) + seconds  # type: ignore[index]
    total = sum(by_look.values())
    names = {"rollout": "sampling", "train": "training", "moving": "changing role", "joining": "starting"}
    shares = ", ".join(f"{by_look.get(k, 0.0) / total:.1%} {name}" for k, name in names.items()) if total else ""
    text = "What each cell did; dotted lines are optimizer steps."
    return _section("Roles of the cells", f"{text} Cell time: {shares}." if shares else text, lanes(line))


def _load(line: Timeline) -> str:
    rows = [(s.time - line.start, s.event) for s in line.samples if isinstance(s.event, ev.LoadSampled)]
    demand = [(t, e.demand) for t, e in rows]
    capacity = [(t, e.capacity) for t, e in rows]
    low = [(t, e.low) for t, e in rows if e.low is not None]
    high = [(t, e.high) for t, e in rows if e.high is not None]
    drawn = chart(
        [Line("sampling capacity", capacity, "c5", step=True),
         Line("high mark", high, "c4", dash=True, step=True),
         Line("low mark", low, "c3", dash=True, step=True),
         Line("unfinished work", demand, "c1", area=True)],
        x_words=words.clock, x_label="time since the start", y_label="slots", frame=TIMES,
        y_words=words.count, x_range=_span(line),
    )  # fmt: skip
    return _section(
        "Load against capacity and watermarks",
        "Below the low mark a rollout cell may be turned to training; above the high mark one is claimed back. "
        "Capacity and marks move because cells change role.",
        drawn,
    )


def _span(line: Timeline) -> tuple[float, float]:
    return 0.0, max(line.end - line.start, 1e-6)


def _step_time(line: Timeline) -> str:
    values = [
        (float(e.step + 1), e.seconds, f"step {e.step + 1}: {words.seconds(e.seconds)}") for _, e in _applied(line)
    ]
    mean = sum(v[1] for v in values) / len(values) if values else 0.0
    drawn = bars(values, frame=HALF, x_label="step", y_label="seconds", y_words=words.count)
    return _section("Step time", f"{words.seconds(mean)} on average." if values else "", drawn)


def _staleness(line: Timeline) -> str:
    mean = [(float(e.step + 1), e.staleness_mean) for _, e in _applied(line)]
    most = [(float(e.step + 1), float(e.staleness_max)) for _, e in _applied(line)]
    drawn = chart(
        [Line("highest", most, "c5", step=True), Line("mean", mean, "c4")],
        frame=HALF, x_label="step", y_label="versions behind", whole_x=True,
        y_range=(0.0, max([1.0, *(p[1] for p in most)]) * 1.1),
    )  # fmt: skip
    return _section("Staleness of trained tokens", "Trainer version minus the version that sampled the token.", drawn)


def _tokens(line: Timeline) -> str:
    rows = [(s.time - line.start, s.event) for s in line.samples if isinstance(s.event, ev.LoadSampled)]
    window = max(1, len(rows) // 120)
    sampled, trained = [], []
    for (t0, a), (t1, b) in zip(rows, rows[window:], strict=False):
        if t1 > t0 and b.sampled_tokens >= a.sampled_tokens and b.trained_tokens >= a.trained_tokens:
            sampled.append((t1, (b.sampled_tokens - a.sampled_tokens) / (t1 - t0)))
            trained.append((t1, (b.trained_tokens - a.trained_tokens) / (t1 - t0)))
    drawn = chart(
        [Line("sampled", sampled, "c1"), Line("trained (tree tokens)", trained, "c2")],
        x_words=words.clock, x_label="time since the start", y_label="tokens a second", y_words=words.count,
        frame=TIMES, x_range=_span(line),
    )  # fmt: skip
    load = line.final.load
    seen = load.cached_tokens + load.prefilled_tokens if load else 0
    text = (
        f"{load.cached_tokens / seen:.0%} of the prompt tokens were found in the prefix caches."
        if load and seen
        else ""
    )
    return _section("Tokens", text, drawn)


def _statuses(line: Timeline) -> str:
    counts = line.final.totals.statuses
    total = sum(counts.values())
    rows = []
    for status, n in sorted(counts.items(), key=lambda item: -item[1]):
        scored = line.scored.get(status)
        mean = f"{scored[1]:.3f}" if scored else "—"
        share = f'<div class="bar"><i style="width:{n / total:.1%}"></i></div>'
        rows.append([escape(status), str(n), share, mean])
    text = (
        "completed, timeout and truncated train, the last two on what they reached; failed is ours, run again and in "
        "no baseline; stale is too old to train."
    )
    heads = ["status", "n:executions", "share", "n:mean training score"]
    return _section("How executions ended", text, _table(heads, rows, total=len(rows)))


def _switches(line: Timeline) -> str:
    rows = []
    for stamped in line.switches[:ROWS]:
        event = stamped.event
        if isinstance(event, ev.Switched):
            took = words.seconds(event.seconds) if event.ok else "failed"
            drained = words.seconds(event.drain_s) if event.drain_s else "—"
            at = words.clock(stamped.time - line.start)
            rows.append([at, escape(event.cell), f"→ {escape(event.role)}", drained, took, escape(event.reason)])
    heads = ["n:time", "w:cell", "w:role", "n:drained in", "n:switched in", "why"]
    text = "Each change of role with the measured cost and the reason that the scheduler gave."
    return _section("Role switches", text, _table(heads, rows, total=len(line.switches)))


def _moves(line: Timeline) -> str:
    rows = []
    for stamped in line.moves[:ROWS]:
        event = stamped.event
        if isinstance(event, ev.SessionMoved):
            kv = words.size(event.bytes) if event.carried else "prefilled again"
            at = words.clock(stamped.time - line.start)
            path = f"{escape(event.src)} → {escape(event.dst)}"
            cells = [at, escape(event.session), path, words.count(event.tokens), kv, words.seconds(event.seconds)]
            rows.append([*cells, escape(event.reason)])
    heads = ["n:time", "session", "w:from, to", "n:tokens", "n:KV", "n:took", "why"]
    text = "Model calls that went on at another cell; the workspace and its tools stayed where they were."
    return _section("Session moves", text, _table(heads, rows, total=len(line.moves)))


def _notices(line: Timeline) -> str:
    shown = (*line.notices, *line.returned)
    if not shown:
        return ""
    rows = []
    for stamped in sorted(shown, key=lambda s: s.time)[:ROWS]:
        event = stamped.event
        at = words.clock(stamped.time - line.start)
        if isinstance(event, ev.Notice):
            rows.append([at, escape(event.level), escape(event.text)])
        elif isinstance(event, ev.LeaseReturned):
            text = f"{event.batches} micro-batches of step {event.step + 1} came back from {event.cell}: {event.reason}"
            rows.append([at, "lease", escape(text)])
    return _section("Notices", "", _table(["n:time", "w:level", "what"], rows, total=len(shown)))


def _config(text: str) -> str:
    if not text:
        return ""
    return f"<section><details><summary>Resolved configuration</summary><pre>{escape(text)}</pre></details></section>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, total: int) -> str:
    """A table; a head "n:x" is a column of numbers, "w:x" one that does not wrap. Cells are markup already."""
    if not rows:
        return '<p class="sub">none</p>'
    kinds = [head.partition(":")[0] if ":" in head else "" for head in heads]
    names = [head.partition(":")[2] or head for head in heads]
    top = "".join(f'<th class="{kind}">{escape(name)}</th>' for kind, name in zip(kinds, names, strict=True))
    body = "".join(
        "<tr>" + "".join(f'<td class="{k}">{c}</td>' for k, c in zip(kinds, row, strict=True)) + "</tr>" for row in rows
    )
    more = f'<p class="sub">{total - len(rows)} more in the event log.</p>' if total > len(rows) else ""
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>{more}'
