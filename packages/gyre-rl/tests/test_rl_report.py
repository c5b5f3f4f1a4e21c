"""The views over a made-up run: report, live block and plain lines, whole, cut and resumed."""

from __future__ import annotations

import io
import itertools
import random
import re
from xml.etree import ElementTree

import pytest
from gyre_core import ConfigError
from gyre_rl.views import events as ev
from gyre_rl.views import words
from gyre_rl.views.live import render as render_live
from gyre_rl.views.model import fold
from gyre_rl.views.plain import line_of
from gyre_rl.views.report import ROWS, render, write_report
from gyre_rl.views.svg import MAX_POINTS, thin, ticks
from gyre_rl.views.timeline import timeline
from gyre_rl.views.watch import LiveView, PlainView, choose_view
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console


def made_up_run(steps=12, cells=4, seed=0, start=1_800_000_000.0):
    """Events of a plausible elastic run: cells turn to TRAIN late in a step and back after it."""
    rng = random.Random(seed)
    now = start
    out = []

    def say(event, dt=0.0):
        nonlocal now
        now += dt
        out.append(event.at(now))

    names = [f"cell-{i}#1" for i in range(cells)]
    begin = ev.RunStarted("quickstart", "runs/quickstart", steps, cells, 1, "watermark", 8, 8)
    say(begin)
    for i, name in enumerate(names):
        say(ev.CellStateChanged(name, "JOINING", core=i == 0), 0.1)
    for i, name in enumerate(names):
        say(ev.CellStateChanged(name, "TRAIN" if i == 0 else "ROLLOUT", core=i == 0), 0.6)
    say(ev.Evaluated("heldout", 0, 0, 0.24, 32, 32, 8.0), 6.0)
    sampled = trained = 0
    for step in range(steps):
        began = now
        say(ev.StepStarted(step, step, 8))
        score = min(0.95, 0.25 + 0.6 * step / steps + rng.uniform(-0.05, 0.05))
        for tick in range(8):
            demand = 60 * (1 - tick / 8) + rng.uniform(0, 6)
            turned = tick >= 4
            sampled += rng.randrange(1500, 3000)
            trained += 4000 if turned else 1200
            capacity = 16.0 * (cells - 2 if turned else cells - 1)
            load = ev.LoadSampled(
                int(demand), rng.randrange(4), int(demand * 0.6), demand, capacity, 0.7 * capacity, 0.95 * capacity,
                ready_tokens=9000 * tick, sampled_tokens=sampled, trained_tokens=trained,
                cached_tokens=sampled * 9, prefilled_tokens=sampled * 3,
            )  # fmt: skip
            say(load, 0.7)
            for k in range(8):
                name = f"s{step}-{tick}-{k}"
                status = "timeout" if k == 7 else "failed" if (step, tick, k) == (2, 3, 0) else "completed"
                say(ev.ExecutionStarted(name, f"task-{tick}", f"g{step}-{tick}", step))
                mark = None if status == "failed" else min(1.0, max(0.0, score + rng.uniform(-0.4, 0.4)))
                say(
                    ev.ExecutionEnded(
                        name, status, mark, status == "timeout", branches=int(k == 3), sub_agents=int(k == 3)
                    )
                )
            say(ev.GroupReady(f"g{step}-{tick}", step, 8, batches=2, tokens=4000))
            cell = names[-1 - step % (cells - 1)]
            if tick == 4:
                say(ev.CellStateChanged(cell, "DRAINING", reason="demand 31 of 48 slots is below the low mark 0.7"))
                for k in range(3):
                    moved = ev.SessionMoved(f"s{step}-{k}/main", cell, names[1], k < 2, 640, 650_000 * (k < 2), 0.03)
                    say(moved, 0.02)
                say(ev.CellStateChanged(cell, "SWITCHING"), 0.1)
                say(ev.CellStateChanged(cell, "TRAIN"), 0.25)
                why = "demand 31 of 48 slots is below the low mark 0.7; 12,000 tokens are ready"
                say(ev.Switched(cell, "TRAIN", 0.25, why, 0.1))
                say(ev.Leased(step * 2 + 1, cell, step, 4, 8000))
            say(ev.Leased(step * 20 + tick, names[0], step, 2, 4000, core=True))
            say(ev.Contributed(step * 20 + tick, names[0], step, 2, 4000, 0.3, core=True))
        say(ev.Contributed(step * 2 + 1, cell, step, 4, 8000, 0.8), 0.3)
        applied = ev.StepApplied(
            step, step + 1, score, now - began + 0.2, 64, 0.01, 0.8, 1e-3, 42_000, 6000, 0.4 + 0.1 * (step % 3), 1, 9, 1
        )
        say(applied, 0.2)
        say(ev.CellStateChanged(cell, "FLUSHING"))
        say(ev.CellStateChanged(cell, "SWITCHING"), 0.05)
        say(ev.CellStateChanged(cell, "ROLLOUT"), 0.2)
        say(ev.Switched(cell, "ROLLOUT", 0.2, "the step is applied", 0.05))
    if cells > 2:
        say(ev.CellStateChanged(names[2], "LOST", reason="killed by signal 9"), 0.4)
        say(ev.Notice("cell-2#1 is lost: killed by signal 9"))
        say(ev.CellStateChanged("cell-2#2", "JOINING"), 0.5)
        say(ev.CellStateChanged("cell-2#2", "ROLLOUT"), 1.5)
    say(ev.Evaluated("heldout", steps, steps, 0.81, 32, 32, 7.0), 7.0)
    say(ev.RunEnded("finished", wall_s=now - start), 0.5)
    return out


def elements(html):
    """The page's inline SVGs, parsed as XML (which also proves that they are well-formed)."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_the_report_is_one_file_with_well_formed_charts_and_no_address():
    html = render(timeline(made_up_run()), 'name = "<quickstart>"')
    assert len(elements(html)) == 6
    assert "0.24 → 0.81" in html
    assert "+0.570 on 32 tasks" in html
    assert "&lt;quickstart&gt;" in html
    assert not re.search(r"https?:|<script|<link|src=|@import|url\(", html)
    assert "nothing was recorded" not in html


def test_the_figures_of_the_report_are_those_of_the_log():
    events = made_up_run()
    line = timeline(events)
    assert [e.event.step for e in line.steps] == list(range(12))
    assert line.core == {"cell-0"}
    lane = line.lanes["cell-2"]
    assert [s.cell for s in lane][-3:] == ["cell-2#1", "cell-2#2", "cell-2#2"]
    for segments in line.lanes.values():
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(segments))
        assert segments[-1].end == line.end
    assert line.final.totals.satellite_joins == 12
    assert line.scored["completed"][0] == 12 * 8 * 7 - 1
    assert "failed" not in line.scored


def test_untrusted_text_is_escaped_everywhere():
    evil = "<b>&\"'"
    events = [
        ev.RunStarted(evil, evil, 1, 1, policy=evil).at(1.0),
        ev.CellStateChanged(f"{evil}#1", "TRAIN", reason=evil).at(2.0),
        ev.Switched(evil, evil, 1.0, evil).at(3.0),
        ev.SessionMoved(evil, evil, evil, True, reason=evil).at(3.0),
        ev.ExecutionEnded(evil, evil, 1.0).at(3.0),
        ev.Notice(evil, evil).at(3.0),
        ev.LeaseReturned(1, evil, 0, 1, evil).at(3.0),
        ev.StepApplied(0, 1, 0.5, 1.0).at(3.0),
        ev.RunEnded(evil, evil).at(4.0),
    ]
    html = render(timeline(events), evil)
    assert "<b>&" not in html
    elements(html)


def test_nothing_recorded_is_said_and_a_cut_log_is_reported():
    html = render(timeline([]))
    assert "nothing was recorded" in html
    cut = made_up_run()[:400]
    html = render(timeline(cut))
    assert "ended without a word" in html
    assert "judged once" in html


def test_a_resumed_run_has_two_lives_and_a_gap_between_them():
    first = [e for e in made_up_run(4) if e.kind != "run_ended"]
    second = made_up_run(4, start=first[-1].time + 1000)
    second[0] = ev.RunStarted("quickstart", "r", 8, 4, resumed=True, first_step=4).at(second[0].time)
    line = timeline([*first, *second])
    assert [life.status for life in line.lives] == ["cut", "finished"]
    assert line.active_s < line.end - line.start - 900
    for segments in line.lanes.values():
        assert not any(s.start < first[-1].time < s.end for s in segments)
    assert "resumed once" in render(line)


def test_long_tables_say_how_much_they_leave_out():
    moves = [ev.SessionMoved(f"s{i}", "a#1", "b#1", True).at(2.0 + i) for i in range(ROWS + 7)]
    html = render(timeline([ev.RunStarted("r", "r", 1, 2).at(1.0), *moves]))
    assert "7 more in the event log" in html


def test_many_cells_become_areas():
    events = [ev.RunStarted("r", "r", 1, 100).at(1.0)]
    events += [ev.CellStateChanged(f"c{i}#1", "ROLLOUT").at(2.0) for i in range(100)]
    events += [ev.CellStateChanged(f"c{i}#1", "TRAIN").at(3.0 + i / 10) for i in range(50)]
    html = render(timeline([*events, ev.RunEnded("finished").at(20.0)]))
    assert html.count("<rect") == 0
    assert len(html) < 40_000


def test_the_report_is_written_into_the_run_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"no events\.jsonl"):
        write_report(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b"".join(ev.encode(e) + b"\n" for e in made_up_run()))
    path = write_report(tmp_path)
    assert path.name == "report.html"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "report.html"]


def test_plain_lines_tell_what_matters():
    view = PlainView(io.StringIO())
    for event in made_up_run():
        view.emit(event)
    text = view._out.getvalue()
    assert "run quickstart begins: 12 steps, 4 cells, seed 1" in text
    assert re.search(r"step 12/12: score 0\.\d+, .* satellites 1", text)
    assert "cell-2#1 is lost: killed by signal 9" in text
    assert "run finished" in text
    assert len(text.splitlines()) < 60
    view._out.close()
    view.say("a closed pipe is no trouble")


def test_a_view_survives_events_that_it_cannot_read():
    from gyre_core import RunEvent

    view = PlainView(io.StringIO())
    view.emit(RunEvent(1.0, "step_started", {"step": "x"}))
    assert "step_started" in view.state.notices[-1].event.text


@pytest.mark.parametrize("cells", [4, 64])
def test_the_live_block_fits_a_terminal_at_any_moment(cells):
    events = made_up_run(3, cells)
    for cut in range(0, len(events), 37):
        console = Console(width=80, file=io.StringIO(), force_terminal=True)
        console.print(render_live(fold(events[:cut]), events[max(0, cut - 1)].time))
        lines = console.file.getvalue().splitlines()
        assert len(lines) <= 14
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(render_live(fold(events), events[-1].time))
    text = console.file.getvalue()
    assert "gyre quickstart  step 3/3" in text
    assert "held-out 0.240 → 0.810" in text
    assert ("cell-0* TRAIN" in text) == (cells == 4)


def test_the_live_view_draws_on_a_terminal_and_leaves_it():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    view = choose_view(out)
    assert isinstance(view, LiveView)
    for event in made_up_run(1):
        view.emit(event)
    view.say("a sentence")
    view.close()
    view.close()
    assert "a sentence" in out.getvalue()
    assert isinstance(choose_view(out, plain=True), PlainView)
    assert isinstance(choose_view(io.StringIO()), PlainView)


def test_words():
    assert [words.count(v) for v in (0, 950, 1234, 34_000, 1.5e6, 2e9)] == ["0", "950", "1.2k", "34k", "1.5M", "2.0G"]
    assert [words.size(v) for v in (12, 1300, 34e6)] == ["12 B", "1.3 kB", "34 MB"]
    assert [words.clock(v) for v in (0, 61, 3600)] == ["0:00", "1:01", "1:00:00"]
    assert [words.seconds(v) for v in (0.012, 1.25, 34, 180, 7200)] == ["12 ms", "1.25 s", "34 s", "3 min", "2.0 h"]
    assert words.sparkline([0, 1, 2], 0, 2) == "▁▅█"
    assert words.sparkline([3, 3]) == "▁▁"


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_inside_and_few(low, span):
    high = low + max(span, abs(low) * 1e-6)
    found = ticks(low, high)
    assert len(found) <= 12
    assert all(t == round(t) for t in ticks(low, high, whole=True))
    slack = (high - low) * 1e-6 + 1e-9
    assert all(low - slack <= t <= high + slack for t in found)


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-10, 10)), min_size=1, max_size=3000))
def test_thinning_keeps_the_extremes(points):
    points.sort()
    kept = thin(points)
    assert len(kept) <= max(MAX_POINTS, 1) + 2
    assert max(p[1] for p in kept) == max(p[1] for p in points)
    assert min(p[1] for p in kept) == min(p[1] for p in points)


def test_line_of_is_silent_for_small_things():
    state = fold(made_up_run(1))
    assert line_of(ev.ExecutionStarted("e", "t").at(2.0), state) is None
