"""The fold over a run's events: counts, lives of cells, steps that overlap, logs that were cut."""

from __future__ import annotations

import pytest
from gyre_core import CellState, RunEvent
from gyre_rl.views import events as ev
from gyre_rl.views.log import decode_lines
from gyre_rl.views.model import RATE_SAMPLES, RECENT, RunState, cell_name, fold, reduce
from gyre_rl.views.plain import line_of
from hypothesis import given
from hypothesis import strategies as st


def run(*events, start=100.0):
    """Fold events one second apart."""
    return fold(event.at(start + i) for i, event in enumerate(events))


BEGIN = ev.RunStarted("r", "runs/r", steps=3, cells=2)


def test_each_kind_goes_through_its_json_line_and_back():
    samples = [
        BEGIN,
        ev.StepApplied(0, 1, 0.5, 3.0, metrics={"kl": 0.1}),
        ev.ExecutionEnded("e", "failed", None),
        ev.LoadSampled(1, 2, 3, 4.0, 5.0, low=0.7, high=None),
    ]
    lines = [ev.encode(event.at(1.5)) + b"\n" for event in samples]
    assert [ev.parse(event) for event in decode_lines(lines)] == samples
    defined = {c.__name__ for c in vars(ev).values() if isinstance(c, type) and issubclass(c, ev.Event)} - {"Event"}
    assert {cls.__name__ for cls in ev.KINDS.values()} == defined
    assert all(ev.KINDS[kind].kind == kind for kind in ev.KINDS)


def test_unknown_kinds_and_fields_are_skipped_and_broken_events_are_named():
    state = run(BEGIN)
    assert reduce(state, RunEvent(500.0, "of the future", {"a": 1})).time == 500.0
    assert ev.parse(RunEvent(1.0, "notice", {"text": "t", "of_the_future": 1})) == ev.Notice("t")
    with pytest.raises(ValueError, match=r"reading a step_started event of time 1\.0: .*version"):
        reduce(state, RunEvent(1.0, "step_started", {"step": 1}))


def test_a_log_that_was_cut_in_its_last_line_is_read_to_there():
    whole = ev.encode(BEGIN.at(1.0)) + b"\n"
    assert len(list(decode_lines([whole, whole[:20]]))) == 1
    with pytest.raises(ValueError, match="line 1"):
        list(decode_lines([whole[:20] + b"\n", whole]))


def test_cells_have_lives_and_words_of_an_old_one_change_nothing():
    state = run(
        BEGIN,
        ev.CellStateChanged("cell-0#1", "TRAIN", core=True),
        ev.CellStateChanged("cell-1#1", "ROLLOUT"),
        ev.WeightsSynced("cell-1#1", 4),
        ev.CellStateChanged("cell-1#1", "DRAINING"),
    )
    assert state.cells["cell-1"].version == 4
    assert state.cells["cell-0"].core
    assert state.cells_by_state() == {"TRAIN": 1, "DRAINING": 1}
    state = fold(
        [
            ev.CellStateChanged("cell-1#1", "LOST", reason="killed").at(110),
            ev.CellStateChanged("cell-1#2", "JOINING").at(111),
            ev.WeightsSynced("cell-1#1", 9).at(112),
            ev.CellStateChanged("cell-1#1", "LOST", reason="heard again").at(113),
        ],
        state,
    )
    assert state.cells["cell-1"].state == "JOINING"
    assert state.cells["cell-1"].version is None
    assert state.totals.cells_lost == 1
    assert cell_name("a#b#3") == "a"


def test_a_satellite_joins_in_mid_step_only_when_it_became_train_after_the_step_began():
    before = [BEGIN, ev.CellStateChanged("c1#1", "TRAIN"), ev.StepStarted(0, 0, 2)]
    lease = ev.Leased(1, "c1#1", step=0, batches=2)
    assert run(*before, lease).totals.satellite_joins == 0
    turned = ev.CellStateChanged("c1#1", "TRAIN")
    assert run(*before, turned, lease).totals.satellite_joins == 1
    assert run(*before, turned, lease, lease).totals.satellite_joins == 1
    core = ev.Leased(1, "c1#1", step=0, batches=2, core=True)
    assert run(*before, turned, core).totals.satellite_joins == 0


def test_steps_may_overlap_and_each_keeps_its_own_groups():
    state = run(
        BEGIN,
        ev.StepStarted(0, 0, 2),
        ev.GroupReady("g0", 0, 4),
        ev.StepStarted(1, 0, 2),
        ev.GroupReady("g1", 0, 4),
        ev.GroupReady("g2", 1, 4),
        ev.StepSealed(0, 2),
    )
    assert state.step is not None
    assert (state.step.step, state.step.groups_ready, state.step.sealed) == (0, 2, True)
    state = reduce(state, ev.StepApplied(0, 1, 0.5, 3.0).at(200))
    assert state.step is not None
    assert (state.step.step, state.step.groups_ready, state.steps_applied, state.version) == (1, 1, 1, 1)


def test_leases_are_counted_on_their_cell_until_they_end():
    state = run(
        BEGIN,
        ev.CellStateChanged("c0#1", "TRAIN"),
        ev.StepStarted(0, 0, 1),
        ev.Leased(1, "c0#1", 0, 3),
        ev.Leased(2, "c0#1", 0, 2),
        ev.Contributed(1, "c0#1", 0, 3),
    )
    assert state.cells["c0"].batches_leased == 2
    state = reduce(state, ev.LeaseReturned(2, "c0#1", 0, 2).at(300))
    assert state.cells["c0"].batches_leased == 0
    assert (state.totals.contributions, state.totals.leases_returned) == (1, 1)


def test_executions_are_counted_by_purpose_and_status():
    state = run(
        BEGIN,
        ev.ExecutionStarted("a", "t"),
        ev.ExecutionStarted("b", "t", attempt=1),
        ev.ExecutionStarted("c", "t", purpose="eval"),
        ev.ExecutionWentOn("a"),
        ev.ExecutionEnded("a", "timeout", 0.5, partial=True, branches=2),
        ev.ExecutionEnded("c", "completed", 1.0, purpose="eval", branches=9),
    )
    assert state.running == {"train": 1, "eval": 0}
    totals = state.totals
    assert (totals.executions, totals.retries, totals.partial_scores, totals.branches) == (1, 1, 1, 2)
    assert totals.went_on == 1
    assert totals.statuses == {"timeout": 1, "completed": 1}


def test_moves_and_switches():
    moves = [
        ev.SessionMoved("s", "a#1", "b#1", carried, tokens=7, bytes=10 * carried) for carried in (True, False, True)
    ]
    switches = [ev.Switched("a#1", "TRAIN", 1.0, ok=i > 0) for i in range(RECENT + 3)]
    state = run(BEGIN, *moves, *switches)
    assert (state.totals.sessions_rerouted, state.totals.kv_moved_sessions, state.totals.kv_moved_bytes) == (3, 2, 20)
    assert state.totals.prefilled_again_tokens == 7
    assert (state.totals.switches, state.totals.failed_switches, len(state.switches)) == (RECENT + 2, 1, RECENT)


def test_rates_are_of_the_last_samples():
    samples = [ev.LoadSampled(1, 0, 1, 1.0, 2.0, sampled_tokens=100 * i) for i in range(RATE_SAMPLES + 5)]
    state = run(BEGIN, *samples)
    assert state.rate("sampled_tokens") == 100.0
    assert state.rate("trained_tokens") == 0.0
    assert run(BEGIN, samples[0]).rate("sampled_tokens") is None
    assert state.load == samples[-1]


def test_a_resume_forgets_what_ran_and_keeps_what_was_counted():
    state = run(
        BEGIN,
        ev.CellStateChanged("c0#1", "TRAIN"),
        ev.ExecutionStarted("a", "t"),
        ev.ExecutionEnded("a", "completed", 1.0),
        ev.ExecutionStarted("b", "t"),
        ev.Evaluated("heldout", 0, 0, 0.25, 4, 4),
        ev.RunEnded("stopped"),
        ev.RunStarted("r", "runs/r", steps=3, cells=2, resumed=True, first_step=2),
    )
    assert (state.totals.executions, state.cells, state.running, state.ended) == (1, {}, {}, None)
    assert state.steps_applied == 2
    assert state.first_eval is not None


def test_a_split_without_tasks_has_no_score():
    nothing = ev.Evaluated("heldout", 0, 0, 0.0, 0, 0)
    state = run(BEGIN, nothing)
    assert (state.first_eval, state.last_eval) == (None, None)
    line = line_of(nothing.at(101.0), state)
    assert line is not None
    assert "there are no heldout tasks" in line
    assert "score" not in line
    judged = ev.Evaluated("heldout", 0, 0, 0.25, 4, 4)
    assert "score 0.250 over 4 tasks" in (line_of(judged.at(101.0), run(BEGIN, judged)) or "")


EVENTS = st.one_of(
    st.builds(ev.CellStateChanged, st.sampled_from(["a#1", "a#2", "b#1"]), st.sampled_from(list(CellState))),
    st.builds(ev.Leased, st.just(1), st.sampled_from(["a#1", "b#1"]), st.integers(0, 2), st.integers(1, 3)),
    st.builds(ev.Contributed, st.just(1), st.sampled_from(["a#1", "b#1"]), st.integers(0, 2), st.integers(1, 3)),
    st.builds(ev.StepStarted, st.integers(0, 2), st.just(0), st.just(2)),
    st.builds(ev.StepApplied, st.integers(0, 2), st.just(1), st.just(0.5), st.just(1.0)),
    st.builds(ev.ExecutionStarted, st.just("e"), st.just("t"), purpose=st.sampled_from(["train", "eval"])),
    st.builds(ev.ExecutionEnded, st.just("e"), st.just("completed"), st.just(1.0)),
    st.builds(ev.Notice, st.text(max_size=3)),
)


@given(st.lists(EVENTS, max_size=40), st.integers(0, 40))
def test_the_fold_is_total_and_may_be_cut_anywhere(events, cut):
    stamped = [event.at(float(i)) for i, event in enumerate(events)]
    whole = fold(stamped)
    assert fold(stamped[cut:], fold(stamped[:cut])) == whole
    assert all(cell.batches_leased >= 0 for cell in whole.cells.values())
    assert all(n >= 0 for n in whole.running.values())
    assert fold(stamped, RunState()) == whole


def test_the_reference_page_of_the_events_is_what_the_dataclasses_say():
    from pathlib import Path

    from gyre_rl.views.reference import page

    file = Path(__file__).resolve().parents[3] / "docs" / "reference" / "events.md"
    assert file.read_text() == page(), "python -m gyre_rl.views.reference > docs/reference/events.md"


def test_cells_that_came_up_before_the_run_began_are_kept():
    from gyre_rl.views.timeline import timeline

    events = [ev.CellStateChanged("c0#1", "TRAIN", core=True).at(5.0), BEGIN.at(7.0), ev.RunEnded("finished").at(9.0)]
    assert fold(events).cells["c0"].state == "TRAIN"
    line = timeline(events)
    assert (line.start, line.lanes["c0"][0].seconds) == (5.0, 4.0)


@given(st.lists(st.integers(0, 200_000), max_size=3), st.integers(0, 150_000))
def test_a_torn_last_line_is_cut_and_nothing_else(tmp_path_factory, whole, torn):
    from gyre_rl.views.log import cut_torn_tail

    log = tmp_path_factory.mktemp("log") / "events.jsonl"
    kept = b"".join(b"x" * size + b"\n" for size in whole)
    log.write_bytes(kept + b"y" * torn)
    assert cut_torn_tail(log) == torn
    assert log.read_bytes() == kept
    assert cut_torn_tail(log) == 0
    assert cut_torn_tail(log.with_name("absent")) == 0
