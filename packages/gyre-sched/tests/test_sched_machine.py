"""The ring in miniature: the watermark policy turns, drains, leases, seals and applies."""

import pytest
from gyre_sched import CellId, CellState, EndStatus, Role, SchedConfig, Scheduler
from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.config import CostPriors
from gyre_sched.errors import (
    BadValueError,
    DuplicateCommitError,
    EventError,
    LateOutcomeError,
    StaleIncarnationError,
    TimeWentBackError,
    UnknownNameError,
)

CHEAP = CostPriors(to_train_s=0.1, to_rollout_s=0.1, train_tps=100.0, prefill_tps=1e3, kv_bytes_per_s=1e9)


class Bench:
    """A machine and a clock."""

    def __init__(self, config=None, policy=None, cells=4, slots=4, kv=10_000):
        args = {} if policy is None else {"policy": policy}
        self.m = Scheduler(config or SchedConfig(groups_per_step=2, priors=CHEAP), **args)
        self.t = 0.0
        self.log = []
        for i in range(cells):
            role = Role.TRAIN if i == 0 else Role.ROLLOUT
            self(e.CellJoined, cell=CellId(f"c{i}"), role=role, slots=slots, kv_tokens=kv, core=i == 0)

    def __call__(self, kind, **fields):
        self.t += 0.01
        out = self.m.handle(kind(self.t, **fields))
        self.log.extend(out)
        return out

    def wait(self, seconds):
        self.t += seconds
        return self(e.Tick)

    def group(self, name, size=2):
        out = self(e.GroupQueued, group=name, size=size)
        for i in range(size):
            self(e.ExecutionStarted, execution=f"{name}.{i}", group=name)
            self(e.SessionStarted, session=f"{name}.{i}.main", execution=f"{name}.{i}")
        return out

    def call(self, session, tokens=100, **kw):
        return self(e.CallRequested, session=session, prompt_tokens=tokens, **kw)

    def end(self, execution, status=EndStatus.COMPLETED):
        return self(e.ExecutionEnded, execution=execution, status=status)

    def state(self, name):
        return next(x for x in self.m.view.cells() if x.id.name == name)


def only(kind, commands):
    found = [x for x in commands if isinstance(x, kind)]
    assert len(found) == 1, commands
    return found[0]


def finish_group(b, name, tokens=50, batches=2):
    out = []
    for i in range(2):
        out += b.end(f"{name}.{i}")
    built = only(c.BuildGroup, out)
    assert built.executions == (f"{name}.0", f"{name}.1")
    ids = tuple(e.Batch(f"{name}/b{i}", tokens) for i in range(batches))
    return b(e.GroupBatched, group=name, batches=ids)


def test_a_step_runs_from_admission_to_new_weights():
    b = Bench()
    for name in "xy":
        b.group(name)
        for i in range(2):
            only(c.RouteCall, b.call(f"{name}.{i}.main"))
    out = finish_group(b, "x")
    grant = only(c.GrantLease, out)
    assert grant.cell == CellId("c0")
    b(e.ContributionCommitted, cell=grant.cell, lease=grant.lease, batches=grant.batches, seconds=0.5)
    finish_group(b, "y")
    sealed = [x for x in b.log if isinstance(x, c.SealStep)]
    assert sealed == [c.SealStep(0, ("x", "y"))]
    while not any(isinstance(x, c.ApplyStep) for x in b.log):
        leases = b.m.view.picture().leases
        assert leases
        for le in leases:
            b(e.ContributionCommitted, cell=le.cell, lease=le.id, batches=le.batches)
    b(e.StepApplied, step=0)
    out = b(e.WeightsPublished, version=1)
    assert {x.cell.name for x in out if isinstance(x, c.SyncWeights)} <= {"c1", "c2", "c3"}
    assert b.m.view.step == 1


def test_data_turns_the_idlest_cell_and_its_sessions_go_elsewhere():
    b = Bench()
    b.group("x")
    b.group("y")
    for name in ("x.0.main", "x.1.main", "y.0.main", "y.1.main"):
        b.call(name)
    b(e.CallEnded, session="y.0.main", context_tokens=120)
    out = finish_group(b, "x", tokens=500, batches=8)
    drains = [x for x in out if isinstance(x, c.DrainCell)]
    assert len(drains) == 1, "one at a time"
    victim = drains[0].cell
    assert "low mark" in drains[0].reason
    out = b(e.DrainDone, cell=victim)
    left = b.state(victim.name)
    if left.sessions:
        out = b.wait(5.0)
        for move in [x for x in out if isinstance(x, c.MoveSession)]:
            assert move.interrupt
            out = b(e.MoveDone, move=move.move, session=move.session, carried=False)
    switch = only(c.SwitchCell, out)
    assert switch == c.SwitchCell(victim, Role.TRAIN, switch.reason)
    out = b(e.SwitchDone, cell=victim, role=Role.TRAIN, seconds=0.1)
    assert only(c.GrantLease, out).cell == victim, "it joins the running step at once"
    assert "low mark" in b.m.story(victim.name)


def test_a_paused_session_with_costly_prefill_is_carried():
    b = Bench(SchedConfig(groups_per_step=1, priors=CostPriors(prefill_tps=10.0)))
    b.group("x")
    b.call("x.0.main", 500)
    b(e.CallEnded, session="x.0.main", context_tokens=600)
    home = next(x for x in b.m.view.cells() if x.sessions)
    out = b(e.TurnAsked, cell=home.id, role=Role.TRAIN)
    move = only(c.MoveSession, out)
    assert move.carry_kv
    assert not move.interrupt
    assert move.tokens == 600
    assert not b.call("x.0.main", 610), "the caller waits for the move"
    b(e.DrainDone, cell=home.id)
    out = b(e.MoveDone, move=move.move, session="x.0.main", carried=True, bytes=6, tokens=600, seconds=1.0)
    assert only(c.RouteCall, out).cell == move.dst
    assert only(c.SwitchCell, out).cell == home.id


def test_where_a_stalled_move_made_moves_seem_dear_one_is_tried_in_time():
    """Two rollout cells with 20 sessions each: one drains, and the first move from it takes for ever."""
    b = Bench(SchedConfig(groups_per_step=1, drain_moves=1, priors=CostPriors(prefill_tps=100.0)), cells=3, slots=20)
    home = {}
    for command in (*b.group("x", 40), *(x for i in range(40) for x in b.call(f"x.{i}.main", 100))):
        if isinstance(command, c.RouteCall):
            home[command.session] = command.cell
    leaves = CellId("c1")
    for name in home:
        b(e.CallEnded, session=name, context_tokens=100)
    first = only(c.MoveSession, b(e.TurnAsked, cell=leaves, role=Role.TRAIN))
    assert "<" in first.reason
    out = b(e.MoveDone, move=first.move, session=first.session, carried=True, bytes=10**7, tokens=100, seconds=90.0)
    trial = only(c.MoveSession, out)
    assert trial.carry_kv
    assert ">= prefill" in trial.reason
    assert "tried all the same" in trial.reason
    assert not b.m.view.costs.carry_pays(100)
    b(e.MoveDone, move=trial.move, session=trial.session, carried=True, bytes=10**7, tokens=100, seconds=0.06)
    assert b.m.view.costs.carry_pays(100), "one good move was enough"


def test_a_lost_cell_gives_everything_back():
    b = Bench()
    b.group("x")
    b.group("y")
    b.call("y.0.main")
    b.call("y.1.main")
    grant = only(c.GrantLease, finish_group(b, "x", batches=1))
    b(e.TurnAsked, cell=CellId("c1"), role=Role.TRAIN)
    home = next(x for x in b.m.view.cells() if x.calling)
    out = b(e.CellLost, cell=home.id, reason="killed")
    assert {x.session for x in out if isinstance(x, c.RouteCall)} <= {"y.0.main", "y.1.main"}
    assert any(isinstance(x, c.RouteCall) for x in out)
    b(e.CellLost, cell=CellId("c0"), reason="killed")
    out = b(e.CellJoined, cell=CellId("c0", 1), role=Role.TRAIN, slots=4, kv_tokens=9999, core=True)
    again = only(c.GrantLease, out)
    assert again.batches == grant.batches
    assert again.lease != grant.lease
    with pytest.raises(StaleIncarnationError):
        b(e.ContributionCommitted, cell=CellId("c0"), lease=grant.lease, batches=grant.batches)


def test_failed_members_are_retried_then_left_out():
    b = Bench(SchedConfig(groups_per_step=1, max_retries=1, priors=CHEAP))
    b.group("x", 3)
    retry = only(c.RetryExecution, b.end("x.0", EndStatus.FAILED))
    assert retry.attempt == 1
    b(e.ExecutionStarted, execution="x.0", group="x")
    assert not b.end("x.0", EndStatus.FAILED)
    b.end("x.1")
    build = only(c.BuildGroup, b.end("x.2", EndStatus.TIMEOUT))
    assert build.executions == ("x.1", "x.2")
    assert build.left_out == ("x.0",)
    assert "2 of 3" in build.reason


def test_admission_is_paced_by_staleness():
    b = Bench(SchedConfig(groups_per_step=1, max_staleness=1, priors=CHEAP))
    admitted = [any(isinstance(x, c.AdmitGroup) for x in b.group_only(n)) for n in "wxyz"]
    assert admitted == [True, True, False, False]


def _group_only(self, name):
    return self(e.GroupQueued, group=name, size=2)


Bench.group_only = _group_only


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (UnknownNameError, lambda t: e.CellLost(t, CellId("nobody"), "x")),
        (UnknownNameError, lambda t: e.CellLost(t, CellId("c1", 4), "x")),
        (TimeWentBackError, lambda t: e.Tick(t - 1.0)),
        (BadValueError, lambda t: e.Tick(float("nan"))),
        (BadValueError, lambda t: e.LoadReported(t, CellId("c1"), 1, 0, float("nan"))),
        (BadValueError, lambda t: e.LoadReported(t, CellId("c1"), -1, 0, 0)),
        (UnknownNameError, lambda t: e.CallRequested(t, "nobody", 5)),
        (LateOutcomeError, lambda t: e.SwitchDone(t, CellId("c1"), Role.TRAIN, 1.0)),
        (UnknownNameError, lambda t: e.ContributionCommitted(t, CellId("c0"), 77, ("b",))),
        (BadValueError, lambda t: e.CellJoined(t, CellId("new"), Role.TRAIN, 1, 1, core=True)),
        (StaleIncarnationError, lambda t: e.CellJoined(t, CellId("c1"), Role.TRAIN, 1, 1)),
        (BadValueError, lambda t: e.WeightsPublished(t, 3)),
        (BadValueError, lambda t: "hello"),
    ],
)
def test_wrong_events_are_refused_with_a_story_and_change_nothing(error, event):
    b = Bench()
    b.group("x")
    b.call("x.0.main")
    before = b.m.view.picture()
    with pytest.raises(error) as caught:
        b.m.handle(event(b.t))
    assert isinstance(caught.value, EventError)
    assert b.m.view.picture() == before
    if error is StaleIncarnationError:
        assert "joined with" in str(caught.value)


def test_a_commit_counts_once():
    b = Bench()
    b.group("x")
    grant = only(c.GrantLease, finish_group(b, "x", batches=1))
    fields = {"cell": grant.cell, "lease": grant.lease, "batches": grant.batches}
    b(e.ContributionCommitted, **fields)
    with pytest.raises(DuplicateCommitError, match="committed by"):
        b(e.ContributionCommitted, **fields)


def test_failed_switch_falls_back_or_is_lost():
    b = Bench()
    b(e.TurnAsked, cell=CellId("c1"), role=Role.TRAIN)
    b(e.DrainDone, cell=CellId("c1"))
    b(e.SwitchFailed, cell=CellId("c1"), role=Role.TRAIN, reason="oom")
    assert b.state("c1").state is CellState.ROLLOUT
    b(e.TurnAsked, cell=CellId("c1"), role=Role.TRAIN)
    b(e.DrainDone, cell=CellId("c1"))
    b(e.SwitchFailed, cell=CellId("c1"), role=Role.TRAIN, reason="oom", fell_back=False)
    assert b.state("c1").state is CellState.LOST
