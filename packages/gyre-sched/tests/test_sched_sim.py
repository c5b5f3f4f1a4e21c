"""The simulator: same seed same run, the bound holds, engines conserve work, plans and traces read right."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from gyre_sched import EndStatus, SchedConfig, colocate, cost_aware, static, watermark
from gyre_sched import events as e
from gyre_sched.__main__ import main
from gyre_sched.errors import ConfigError, LogError
from gyre_sched.invariants import check
from gyre_sched.plan import best_split, elastic_config, make_plan, pipeline_config
from gyre_sched.report import as_html, as_json, as_text
from gyre_sched.sim.bound import latency_s, lower_bound, sampling_cell_seconds
from gyre_sched.sim.engine import Engine, Job
from gyre_sched.sim.models import Hardware
from gyre_sched.sim.presets import PRESETS, preset
from gyre_sched.sim.run import Simulation, simulate
from gyre_sched.sim.workload import Shape, batches_of
from gyre_sched.traces import load_trace, read_plans
from hypothesis import given, settings
from hypothesis import strategies as st

HW = Hardware(cells=4, slots=4, kv_tokens=60_000, to_train_s=1.0, to_rollout_s=1.0, sync_s=0.5, apply_s=0.5)
LOAD = Shape(steps=3, groups_per_step=3, group_size=3, turns=3.0, sampled=200.0, max_turns=9)


def run_alone(engine, jobs, until=1e9):
    now, ended = 0.0, {}
    for job in jobs:
        engine.submit(job, now)
    while (due := engine.next_due()) is not None and due < until:
        now = due
        for job in engine.take_due(now):
            ended[job.session] = now
    return ended


def test_one_call_takes_its_latency():
    hw = Hardware(cells=2, slots=4, kv_tokens=10_000, step_s=0.01, seq_s=0.001, ctx_s=0.0, prefill_tps=1000.0)
    ended = run_alone(Engine(hw), [Job("a", 0, 500, 100.0)])
    assert ended["a"] == pytest.approx(0.5 + 100 * 0.011)


def test_calls_share_a_cell_and_the_queue_waits_for_a_slot():
    hw = Hardware(cells=2, slots=2, kv_tokens=10_000, step_s=0.01, seq_s=0.0, prefill_tps=1e12)
    ended = run_alone(Engine(hw), [Job(n, 0, 10, 100.0) for n in "abc"])
    assert ended["a"] == ended["b"] == pytest.approx(1.0)
    assert ended["c"] == pytest.approx(2.0)


def test_an_aborted_call_keeps_what_it_sampled_and_may_go_on_elsewhere():
    hw = Hardware(cells=2, slots=2, kv_tokens=10_000, step_s=0.01, seq_s=0.0, prefill_tps=1e12)
    first, second = Engine(hw), Engine(hw)
    first.submit(Job("a", 0, 10, 100.0), 0.0)
    first.take_due(0.0)
    left, context, fed = first.abort("a", 0.5)
    assert (left, context, fed) == (pytest.approx(50.0), 60, 0)
    second.keep("a", first.forget("a"))
    second.submit(Job("a", context, fed, left), 0.5)
    second.take_due(0.5)
    assert second.next_due() == pytest.approx(1.0)


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 90)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_no_schedule_of_one_engine_beats_the_bounds(calls):
    hw = Hardware(cells=2, slots=3, kv_tokens=5_000, step_s=0.01, seq_s=0.002, ctx_s=1e-6, prefill_tps=2_000.0)
    from gyre_sched.sim.workload import ExecutionPlan, Turn

    plans = [ExecutionPlan((Turn(fed, out, 0.0),), 1) for fed, out in calls]
    ended = run_alone(Engine(hw), [Job(str(i), 0, fed, float(out)) for i, (fed, out) in enumerate(calls)])
    assert len(ended) == len(calls)
    assert max(ended.values()) >= sum(sampling_cell_seconds(hw, p) for p in plans) - 1e-6
    for i, plan in enumerate(plans):
        assert ended[str(i)] >= latency_s(hw, plan) - 1e-6


@pytest.mark.parametrize("policy", [static, watermark, cost_aware])
def test_a_run_is_deterministic_keeps_the_laws_and_the_bound(policy):
    config = elastic_config(HW, LOAD)
    one = Simulation(HW, LOAD, config, policy)
    result = one.run()
    check(one.machine)
    assert result == simulate(HW, LOAD, config, policy)
    assert len(result.step_ends) == LOAD.steps
    assert sum(result.staleness) == LOAD.steps * LOAD.groups_per_step
    assert result.staleness[LOAD.max_staleness + 1] == 0
    assert result.seconds >= lower_bound(HW, LOAD).seconds
    assert result.sampling_share + result.training_share + result.idle_share == pytest.approx(1.0)


def test_elastic_cells_turn_and_colocated_ones_turn_together():
    train_bound = replace(HW, train_tps=1000.0)
    elastic = simulate(train_bound, LOAD, elastic_config(train_bound, LOAD), watermark)
    assert elastic.switches > 0
    both = simulate(train_bound, LOAD, pipeline_config(train_bound, LOAD), colocate, train_cells=0)
    assert both.switches % HW.cells == 0
    assert both.switches > 0


def test_cutting_leaves_work_and_says_so():
    tail = replace(LOAD, turns_sigma=1.2, max_turns=40, groups_per_step=6, steps=4)
    cut = simulate(HW, tail, elastic_config(HW, tail, cut=0.4), watermark)
    whole = simulate(HW, tail, elastic_config(HW, tail), watermark)
    assert cut.cut > 0
    assert cut.skipped_cell_s > 0
    assert whole.cut == 0
    assert whole.skipped_cell_s == 0
    assert cut.seconds >= lower_bound(HW, tail).without(cut.skipped_cell_s, HW.cells)


def test_the_split_search_finds_the_best_split():
    config = pipeline_config(HW, LOAD)
    times = {n: simulate(HW, LOAD, config, static, train_cells=n).seconds for n in (1, 2, 3)}
    assert times[best_split(HW, LOAD, config)] == min(times.values())


def test_a_plan_reads_as_text_json_and_html():
    plan = make_plan("small", HW, LOAD, about="a test", lanes=True, cut=0.3)
    text = as_text(plan)
    assert "static" in text
    assert "bound" in text
    data = json.loads(as_json(plan))
    assert {r["name"] for r in data["rows"]} >= {"colocate", "static", "switching", "joining", "moving", "cutting"}
    assert all(r["vs_bound"] >= 0.999 for r in data["rows"])
    page = as_html(plan)
    assert page.count("<svg") == len([r for r in plan.rows if r.result.lanes])
    assert "<rect" in page


def test_micro_batches_add_up():
    assert sum(batches_of(1001, 250)) == 1001
    assert max(batches_of(1001, 250)) <= 250
    assert batches_of(5, 0) == [5]


def test_presets_are_whole():
    for item in PRESETS.values():
        assert item.workload.group(0)
        assert item.about
    with pytest.raises(ConfigError, match="qwengyre"):
        preset("nope")


def test_foreign_traces_become_sessions(tmp_path):
    moon = tmp_path / "m.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]},
        {"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [9, 10]},
        {"timestamp": 4000, "input_length": 1600, "output_length": 20, "hash_ids": [1, 2, 3, 4]},
    ]
    moon.write_text("\n".join(map(json.dumps, rows)))
    plans = read_plans(moon)
    assert len(plans) == 2
    assert [(t.fed, t.sampled, t.pause_s) for t in plans[0].turns] == [(1024, 10, 4.0), (566, 20, 0.0)]
    azure = tmp_path / "a.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n")
    assert read_plans(azure)[0].turns[0].fed == 4808
    own = tmp_path / "o.jsonl"
    own.write_text('{"turns": [[100, 20, 1.5], [10, 5, 0]]}\n')
    load = load_trace(own, steps=1, groups_per_step=1, group_size=2)
    assert simulate(HW, load, SchedConfig(groups_per_step=1), watermark).seconds > 1.5
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"x": 1}\n')
    with pytest.raises(LogError, match="expected `turns`"):
        read_plans(bad)


def test_an_own_log_is_a_workload(tmp_path):
    from gyre_sched.log import EventLog

    sim = Simulation(HW, LOAD, elastic_config(HW, LOAD), watermark)
    log = EventLog(tmp_path / "run.jsonl", sim.stage.config, fsync="never")
    handle = sim.machine.handle

    def recorded(event):
        out = handle(event)
        log.append(event)
        return out

    sim.machine.handle = recorded
    sim.run()
    log.close()
    plans = read_plans(log.path)
    assert len(plans) == LOAD.steps * LOAD.groups_per_step * LOAD.group_size
    want = sum(p.tokens for g in range(9) for p in LOAD.group(g))
    assert sum(p.tokens for p in plans) == pytest.approx(want, rel=0.01)
    assert main(["replay", str(log.path), "--story", "c1"]) == 0


def test_a_preset_s_plan_says_how_far_off_it_is_and_what_was_fitted_and_taken(capsys):
    assert main(["plan", "--preset", "verl-switch", "--steps", "1", "--json", "--quiet"]) == 0
    data = json.loads(capsys.readouterr().out)
    (pair,) = data["published"]
    rows = {r["name"]: r["seconds"] for r in data["rows"]}
    assert pair["pair"] == "static/switching"
    assert pair["predicted"] == pytest.approx(rows["static"] / rows["switching"])
    assert pair["off"] == pytest.approx(pair["predicted"] / 1.115 - 1.0)
    assert data["preset"]["fitted"] == "nothing"
    assert "H100" in data["preset"]["taken"]
    assert any("not fitted" in line for line in data["verdict"])
    for item in PRESETS.values():
        assert not item.published or (item.taken and item.assumed)


def test_parquet_traces_need_pyarrow_and_read_the_same(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"timestamp": 0, "input_length": 1024, "output_length": 10, "hash_ids": [1, 2]}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "m.parquet")
    (tmp_path / "m.jsonl").write_text(json.dumps(rows[0]))
    assert read_plans(tmp_path / "m.parquet") == read_plans(tmp_path / "m.jsonl")


def test_a_plan_with_cells_that_die(capsys):
    asked = ["plan", "--preset", "laptop", "--steps", "6", "--json", "--quiet", "--mtbf", "0.02", "--repair", "5"]
    assert main(asked) == 0
    rows = {r["name"]: r for r in json.loads(capsys.readouterr().out)["rows"]}
    assert all(r["lost_cells"] > 0 and r["vs_bound"] > 1.0 for r in rows.values())


def test_the_command_line(tmp_path, capsys):
    page = tmp_path / "x.html"
    assert main(["plan", "--preset", "laptop", "--steps", "3", "--json", "--quiet", "--html", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert page.read_text().startswith("<!doctype html>")
    assert main(["plan", "--preset", "nope"]) == 2
    assert "there are" in capsys.readouterr().err
    assert main(["presets"]) == 0


def test_importing_needs_nothing_but_the_standard_library():
    code = (
        "import sys, time; t = time.perf_counter(); import gyre_sched; took = time.perf_counter() - t\n"
        "mods = {m.split('.')[0] for m in sys.modules}\n"
        "bad = [m for m in mods if m not in sys.stdlib_module_names and m not in ('gyre_sched', '__main__')]\n"
        "print([m for m in ('asyncio', 'numpy', 'torch', 'pluggy') if m in mods])"
    )
    code += "\nassert all(hasattr(gyre_sched, n) for n in gyre_sched.__all__)"
    out = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("policy", [watermark, cost_aware])
def test_cells_may_die_and_return_and_nothing_is_lost_or_counted_twice(policy):
    """Every execution ends, its context has every token of its plan, and the sum of each step is whole (the simulated
    trainer raises otherwise), while cells of both roles and the core die in the middle of all this.
    """
    hw = replace(HW, cells=6, train_tps=1500.0, mtbf_s=150.0, repair_s=20.0)
    load = replace(LOAD, steps=8, groups_per_step=4, batch_tokens=400)
    config = elastic_config(hw, load)
    sim = Simulation(hw, load, config, policy, seed=3)
    tokens, ended = {}, []
    handle = sim.machine.handle

    def seen(event):
        out = handle(event)
        check(sim.machine)
        if isinstance(event, e.CallEnded):
            tokens[event.session] = event.context_tokens
        elif isinstance(event, e.ExecutionEnded):
            ended.append((event.execution, event.status))
        return out

    sim.machine.handle = seen
    result = sim.run()
    assert result.lost_cells >= 8
    assert result.computed_again > 0
    assert result.switches > 0
    want = {f"g{g}.{i}": p.tokens for g in range(32) for i, p in enumerate(load.group(g))}
    assert tokens == want
    assert sorted(ended) == sorted((name, EndStatus.COMPLETED) for name in want)
    assert sum(result.staleness) == 32
    assert result.staleness[-1] == 0
    calm = simulate(replace(hw, mtbf_s=0.0), load, config, policy, seed=3)
    assert calm.lost_cells == 0
    assert calm.seconds < result.seconds


def test_an_engine_that_loads_weights_stands_still():
    hw = Hardware(cells=2, slots=2, kv_tokens=10_000, step_s=0.01, seq_s=0.0, prefill_tps=1e12)
    engine = Engine(hw)
    engine.submit(Job("a", 0, 10, 100.0), 0.0)
    engine.take_due(0.0)
    engine.stall(True, 0.4)
    assert engine.next_due() is None
    engine.stall(False, 3.4)
    assert engine.next_due() == pytest.approx(4.0)
    assert engine.take_due(4.0)
    assert engine.busy_s == pytest.approx(1.0)
    still = simulate(replace(HW, sync_pause=1.0), LOAD, pipeline_config(HW, LOAD), static, train_cells=2)
    beside = simulate(HW, LOAD, pipeline_config(HW, LOAD), static, train_cells=2)
    assert still.seconds > beside.seconds
    with pytest.raises(ConfigError, match="sync_pause"):
        replace(HW, sync_pause=2.0)
