"""When a turn must not be made, what engines say of themselves, and when a session leaves its home."""

from dataclasses import replace

import pytest
from gyre_sched import CellId, CellState, EndStatus, Role, SchedConfig, Scheduler, cost_aware, watermark
from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.config import CostPriors
from gyre_sched.plan import expected_work, make_plan
from gyre_sched.sim.models import Hardware
from gyre_sched.sim.workload import Shape

PRIORS = CostPriors(to_train_s=5.0, to_rollout_s=5.0, prefill_tps=1e4, kv_bytes_per_s=1e12, kv_setup_s=0.01)


class Bench:
    """Cells ``c0`` (core) to ``cN``; the first ``train`` of them in TRAIN."""

    def __init__(self, config, policy=watermark, cells=4, train=1, slots=4):
        self.m = Scheduler(config, policy)
        self.t = 0.0
        self.slots = slots
        for i in range(cells):
            role = Role.TRAIN if i < train else Role.ROLLOUT
            self(e.CellJoined, cell=CellId(f"c{i}"), role=role, slots=slots, kv_tokens=10_000, core=i == 0)

    def __call__(self, kind, **fields):
        self.t += 0.01
        return self.m.handle(kind(self.t, **fields))

    def sessions(self, count):
        """``count`` sessions of one group, each in a call."""
        out = list(self(e.GroupQueued, group="g", size=count))
        for i in range(count):
            out += self(e.ExecutionStarted, execution=f"g.{i}", group="g")
            out += self(e.SessionStarted, session=f"s{i}", execution=f"g.{i}")
            out += self(e.CallRequested, session=f"s{i}", prompt_tokens=100)
        return out


def turned(commands):
    return [x.cell.name for x in commands if isinstance(x, c.RecallLease | c.SwitchCell)]


@pytest.mark.parametrize("policy", [watermark, cost_aware])
@pytest.mark.parametrize(("step_s", "count"), [(6.0, 0), (300.0, 1), (0.0, 1)])
def test_a_cell_is_claimed_back_only_if_the_step_is_long_enough(policy, step_s, count):
    """Two trainers, nothing to train, more calls than slots: there and back takes 10 s, a step 6 s or 300 s."""
    config = SchedConfig(groups_per_step=1, priors=replace(PRIORS, step_s=step_s))
    b = Bench(config, policy, train=2)
    assert len(turned(b.sessions(12))) == count
    assert (b.m.view.cell("c1").state is CellState.TRAIN) == (count == 0)


@pytest.mark.parametrize(("step_s", "lent"), [(20.0, False), (400.0, True)])
def test_the_core_samples_only_if_that_ends_the_step_sooner_than_its_way_back(step_s, lent):
    config = SchedConfig(groups_per_step=1, priors=replace(PRIORS, step_s=step_s), lend_core=True)
    b = Bench(config, cost_aware)
    out = turned(b.sessions(16))
    assert (out == ["c0"]) is lent
    if lent:
        assert "ends" in b.m.story("c0")
        assert "way back" in b.m.story("c0")


@pytest.mark.parametrize(("calls", "lent"), [(12, False), (13, True)])
def test_the_core_samples_only_if_somebody_waits_for_a_slot(calls, lent):
    """Three rollout cells with four slots each: below that the longest execution decides, whatever the core does."""
    config = SchedConfig(groups_per_step=1, priors=replace(PRIORS, step_s=4000.0), lend_core=True, claim_idle=0.2)
    b = Bench(config, cost_aware)
    assert (turned(b.sessions(calls)) == ["c0"]) is lent


def test_an_engine_that_queues_gets_no_newcomers_while_others_have_room():
    b = Bench(SchedConfig(groups_per_step=1))
    b(e.LoadReported, cell=CellId("c1"), running=0, waiting=3, kv_tokens=0)
    b(e.LoadReported, cell=CellId("c2"), running=0, waiting=0, kv_tokens=9_990)
    assert {x.cell.name for x in b.sessions(4) if isinstance(x, c.RouteCall)} == {"c3"}
    b(e.LoadReported, cell=CellId("c1"), running=0, waiting=0, kv_tokens=0)
    b(e.SessionStarted, session="new", execution="g.0")
    assert b(e.CallRequested, session="new", prompt_tokens=10)[0].cell.name == "c1"


def test_growth_that_engines_report_counts_as_demand():
    b = Bench(SchedConfig(groups_per_step=1, growth_horizon_s=30.0))
    b.sessions(2)
    before = b.m.view.utilisation()
    for i in (1, 2, 3):
        b(e.LoadReported, cell=CellId(f"c{i}"), running=1, waiting=0, kv_tokens=100, growth_tps=900.0)
    assert b.m.view.utilisation() == pytest.approx((200 + 3 * 900.0 * 30.0) / 30_000, rel=0.01)
    assert b.m.view.utilisation() > before
    b(e.CellLost, cell=CellId("c3"), reason="killed")
    assert b.m.view.utilisation() == pytest.approx((200 + 2 * 900.0 * 30.0) / 20_000, rel=0.01)


def test_a_session_leaves_a_crowded_home_in_its_pause():
    """Three rollout cells with four calls each; those of two cells end: the third's sessions spread when they pause."""
    b = Bench(SchedConfig(groups_per_step=1, priors=PRIORS))
    home = {}
    for command in b.sessions(12):
        if isinstance(command, c.RouteCall):
            home[command.session] = command.cell.name
    b.t += 20.0  # calls take about 20 s
    for name, cell in home.items():
        if cell != "c1":
            b(e.ExecutionEnded, execution=name.replace("s", "g."), status=EndStatus.COMPLETED)
    mine = [name for name, cell in home.items() if cell == "c1"]
    b(e.CallEnded, session=mine[0], context_tokens=120)
    out = b(e.CallRequested, session=mine[0], prompt_tokens=150)
    move = next(x for x in out if isinstance(x, c.MoveSession))
    assert move.src.name == "c1"
    assert move.carry_kv
    assert not move.interrupt
    assert "more than others" in move.reason
    assert b(e.MoveDone, move=move.move, session=mine[0], carried=True)[0].cell == move.dst
    stays = Bench(SchedConfig(groups_per_step=1, priors=PRIORS, balance=0.0))
    assert not [x for x in stays.sessions(12) if isinstance(x, c.MoveSession)]


def test_a_plan_starts_from_the_split_that_the_work_asks_for():
    hw = Hardware(cells=20, slots=4, kv_tokens=100_000, train_tps=3000.0)
    load = Shape(steps=2, groups_per_step=10, group_size=4)
    work = expected_work(hw, load)
    assert work.train_cells == pytest.approx(20 * work.training_s / (work.training_s + work.sampling_s), abs=0.5)
    assert expected_work(replace(hw, train_tps=1e9), load).train_cells == 1
    assert expected_work(replace(hw, train_tps=1.0), load).train_cells == 19
    assert make_plan("", hw, load, only=["cost-aware"]).rows[0].result.training_share > 0


def test_a_session_that_arrives_in_its_pause_frees_the_slot_that_was_kept_for_it():
    """Two rollout cells of two slots: one drains, its paused session is carried to the other, where somebody waits."""
    b = Bench(SchedConfig(groups_per_step=1, priors=PRIORS), cells=3, slots=2)
    home = {x.session: x.cell for x in b.sessions(4) if isinstance(x, c.RouteCall)}
    leaves, stays = CellId("c1"), CellId("c2")
    mine = [name for name, cell in home.items() if cell == leaves]
    theirs = [name for name, cell in home.items() if cell == stays]
    for name in (*mine, theirs[0]):
        b(e.CallEnded, session=name, context_tokens=5_000)
    b(e.ExecutionEnded, execution=mine[1].replace("s", "g."), status=EndStatus.COMPLETED)
    out = b(e.TurnAsked, cell=leaves, role=Role.TRAIN)
    move = next(x for x in out if isinstance(x, c.MoveSession))
    b(e.SessionStarted, session="late", execution="g.0" if mine[1] != "s0" else "g.1")
    assert not b(e.CallRequested, session="late", prompt_tokens=10), "the last slot is kept for the one that arrives"
    out = b(e.MoveDone, move=move.move, session=mine[0], carried=True)
    assert [x.session for x in out if isinstance(x, c.RouteCall)] == ["late"]
