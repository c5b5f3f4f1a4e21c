"""Any order of events, cells dying, returning and lying late: the machine's laws hold after each one.

A rule-based state machine plays the ring. Commands become open work that later rules finish, fail or forget in any
order. After every event the invariants are recounted; a refused event must change nothing; replaying what was accepted
must give an equal machine. Five bugs put in on purpose must be found.
"""

import contextlib
import random
from collections import Counter

import pytest
from gyre_sched import (
    CellId,
    CellState,
    EndStatus,
    Role,
    SchedConfig,
    Scheduler,
    SessionPhase,
    ledger,
    on_cells,
    on_groups,
    on_training,
    router,
    world,
)
from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.config import CostPriors
from gyre_sched.errors import EventError
from gyre_sched.invariants import BrokenInvariantError, check
from gyre_sched.replay import replay_events, snapshot
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

CFG = SchedConfig(
    groups_per_step=2,
    max_staleness=1,
    max_in_transit=0.5,
    pause_wait_s=0.5,
    max_retries=1,
    cut_after_s=40.0,
    cut_tail_share=0.3,
    lease_retries=1,
    prefix_entries=8,
    story_keep=16,
    priors=CostPriors(to_train_s=0.1, to_rollout_s=0.1, train_tps=50.0, prefill_tps=50.0, kv_bytes_per_s=1e7),
)


UNANSWERED = (c.RouteCall, c.GroupEvaluated, c.UndrainCell, c.SealStep, c.DropGroup, c.Alarm, c.RecallLease)
seen = Counter()


class Ring(RuleBasedStateMachine):
    """The outside of the machine, at its worst."""

    @initialize(seed=st.integers(0, 2**31))
    def begin(self, seed):
        self.rng = random.Random(seed)
        self.m = Scheduler(CFG)
        self.t = 0.0
        self.accepted = []
        self.open = []
        self.lives = {}
        self.number = 0
        for i in range(4):
            self.join(f"c{i}", Role.TRAIN if i == 0 else Role.ROLLOUT, core=i == 0)
        for _ in range(6):
            self.queue_one(2)

    # --- helpers -------------------------------------------------------------------------------------------

    def tell(self, event):
        seen["events told"] += 1
        before = snapshot(self.m)
        out = None
        with contextlib.suppress(EventError):
            out = self.m.handle(event)
        if out is None:
            assert snapshot(self.m) == before, f"{event} was refused, but changed something"
            return None
        self.t = event.time
        self.accepted.append(event)
        for command in out:
            if not isinstance(command, UNANSWERED):
                self.open.append(command)
        check(self.m)
        return out

    def later(self):
        self.t += self.rng.choice((0.0, 0.01, 0.3, 1.0))
        return self.t

    def join(self, name, role, core):
        life = self.lives.get(name, -1) + 1
        self.lives[name] = life
        version = self.m.view.published if self.rng.random() < 0.8 else 0
        self.tell(e.CellJoined(self.later(), CellId(name, life), role, 2, 400, core=core, version=version))

    def pick(self, things):
        things = list(things)
        return self.rng.choice(things) if things else None

    # --- cells ---------------------------------------------------------------------------------------------

    @rule()
    def die(self):
        cell = self.pick(x for x in self.m.view.cells() if x.state is not CellState.LOST)
        if cell and self.rng.random() < 0.3:
            self.tell(e.CellLost(self.later(), cell.id, "killed"))

    @rule()
    def come_back(self):
        for cell in [x for x in self.m.view.cells() if x.state is CellState.LOST]:
            role = Role.TRAIN if cell.core or self.rng.random() < 0.3 else Role.ROLLOUT
            self.join(cell.id.name, role, cell.core)

    @rule(role=st.sampled_from(list(Role)))
    def ask_turn(self, role):
        cell = self.pick(self.m.view.cells())
        if cell:
            self.tell(e.TurnAsked(self.later(), cell.id, role))

    @rule()
    def drain_a_busy_one(self):
        """A cell with sessions turns, and its running calls had their time to end."""
        for execution in [x for x in self.m._w.executions.values() if x.running][:3]:
            self.number += 1
            self.tell(e.SessionStarted(self.later(), f"s{self.number}", execution.id))
            self.tell(e.CallRequested(self.later(), f"s{self.number}", 30))
        cell = self.pick(x for x in self.m.view.cells() if x.sessions and x.state is CellState.ROLLOUT)
        if cell:
            self.tell(e.TurnAsked(self.later(), cell.id, Role.TRAIN))
            self.t += 1.0
            self.tell(e.Tick(self.t))

    @rule(running=st.integers(0, 3), waiting=st.integers(0, 2), kv=st.integers(0, 500), growth=st.floats(0, 2))
    def report(self, running, waiting, kv, growth):
        cell = self.pick(self.m.view.cells())
        if cell:
            said = growth if self.rng.random() < 0.8 else None
            self.tell(e.LoadReported(self.later(), cell.id, running, waiting, kv, said, 60.0))

    @rule()
    def lie(self):
        """Something old, doubled or nonsensical."""
        if self.accepted:
            old = self.rng.choice(self.accepted)
            fields = {f: getattr(old, f) for f in old.__dataclass_fields__}
            fields["time"] = self.rng.choice((self.t, self.t - 5.0, float("nan"), self.t))
            self.tell(type(old)(**fields))

    @rule()
    def tick(self):
        self.t += self.rng.choice((0.1, 1.0, 20.0))
        self.tell(e.Tick(self.t))

    # --- work ----------------------------------------------------------------------------------------------

    @rule(size=st.integers(1, 3))
    def queue(self, size):
        self.queue_one(size)

    def queue_one(self, size):
        self.number += 1
        self.tell(e.GroupQueued(self.later(), f"g{self.number}", size, self.rng.random() < 0.1))

    @rule()
    def session(self):
        execution = self.pick(x for x in self.m._w.executions.values() if x.running)
        if execution:
            self.number += 1
            self.tell(e.SessionStarted(self.later(), f"s{self.number}", execution.id))

    @rule()
    def call(self):
        session = self.pick(self.m._w.sessions.values())
        if session:
            prefix = tuple(self.rng.sample(range(12), self.rng.randint(0, 3)))
            self.tell(e.CallRequested(self.later(), session.id, session.context + self.rng.randint(0, 60), prefix))

    @rule()
    def answer(self):
        session = self.pick(s for s in self.m._w.sessions.values() if s.phase is not SessionPhase.PAUSED)
        if session:
            self.tell(e.CallEnded(self.later(), session.id, max(0, session.context + self.rng.randint(-30, 40))))

    @rule(status=st.sampled_from(list(EndStatus)))
    def end_execution(self, status):
        execution = self.pick(x for x in self.m._w.executions.values() if x.running)
        if execution:
            self.tell(e.ExecutionEnded(self.later(), execution.id, status))

    @rule()
    def end_session(self):
        session = self.pick(self.m._w.sessions.values())
        if session and self.rng.random() < 0.4:
            self.tell(e.SessionEnded(self.later(), session.id))

    # --- open work is finished, failed or forgotten, in any order --------------------------------------------

    @precondition(lambda self: self.open)
    @rule(ok=st.sampled_from((True, True, True, True, False)), times=st.integers(1, 4))
    def finish(self, ok, times):
        for _ in range(min(times, len(self.open))):
            self.finish_one(self.open.pop(self.rng.randrange(len(self.open))), ok)

    @rule(times=st.integers(4, 24))
    def march(self, times):
        """Things mostly go well: open work is done in order, and executions end, now and then as failed."""
        for _ in range(times):
            if self.open:
                command = self.open.pop(0)
                if isinstance(command, c.SyncWeights) and self.rng.random() < 0.7:
                    self.open.append(command)
                else:
                    self.finish_one(command, True)
            running = [x for x in self.m._w.executions.values() if x.running]
            if running and not running[-1].sessions:
                self.number += 1
                self.tell(e.SessionStarted(self.later(), f"s{self.number}", running[-1].id))
                self.tell(e.CallRequested(self.later(), f"s{self.number}", 20))
            if self.rng.random() < 0.3:
                self.call()
            if running and self.rng.random() < 0.4:
                last = running[1:] if len(running) > 1 else running
                status = EndStatus.FAILED if self.rng.random() < 0.15 else EndStatus.COMPLETED
                self.tell(e.ExecutionEnded(self.later(), self.pick(last).id, status))

    def finish_one(self, cmd, ok):
        seen[type(cmd).__name__] += ok
        t = self.later()
        match cmd:
            case c.DrainCell():
                self.tell(e.DrainDone(t, cmd.cell) if ok else e.DrainFailed(t, cmd.cell, "no"))
            case c.SwitchCell():
                done = e.SwitchDone(t, cmd.cell, cmd.role, 0.1)
                self.tell(done if ok else e.SwitchFailed(t, cmd.cell, cmd.role, "no", self.rng.random() < 0.7))
            case c.SyncWeights():
                done = e.WeightsLoaded(t, cmd.cell, cmd.version, 0.1)
                self.tell(done if ok else e.WeightsFailed(t, cmd.cell, cmd.version, "no"))
            case c.MoveSession():
                done = e.MoveDone(t, cmd.move, cmd.session, cmd.carry_kv, 100, 10, 0.2)
                self.tell(done if ok else e.MoveFailed(t, cmd.move, cmd.session, "no", self.rng.random() < 0.5))
            case c.AdmitGroup():
                for i in range(self.m._w.groups[cmd.group].size if cmd.group in self.m._w.groups else 0):
                    self.tell(e.ExecutionStarted(self.later(), f"{cmd.group}.{i}", cmd.group))
            case c.RetryExecution():
                self.tell(e.ExecutionStarted(t, cmd.execution, cmd.group))
            case c.CutExecution():
                self.tell(e.ExecutionEnded(t, cmd.execution, EndStatus.TIMEOUT))
            case c.BuildGroup():
                assert set(cmd.executions).isdisjoint(cmd.left_out)
                ids = tuple(e.Batch(f"{cmd.group}/{i}", 20 + i) for i in range(self.rng.randint(0, 4)))
                self.tell(e.GroupBatched(t, cmd.group, ids if ok else (), counts=ok))
            case c.GrantLease():
                part = cmd.batches if self.rng.random() < 0.8 else cmd.batches[:1]
                done = e.ContributionCommitted(t, cmd.cell, cmd.lease, part, 0.2)
                self.tell(done if ok else e.LeaseFailed(t, cmd.cell, cmd.lease, "no"))
                if self.rng.random() < 0.2:
                    self.tell(done)
            case c.ApplyStep():
                if self.tell(e.StepApplied(t, cmd.step)) is not None:
                    self.tell(e.WeightsPublished(self.later(), cmd.step + 1))

    @invariant()
    def replay_is_equal(self):
        seen["rules"] += 1
        if getattr(self, "accepted", None) and len(self.accepted) % 40 == 0:
            again = replay_events(Scheduler(CFG), self.accepted)
            assert snapshot(again) == snapshot(self.m)

    def teardown(self):
        if hasattr(self, "m"):
            for cell in self.m.view.cells():
                assert self.m.story(cell.id.name)
            assert snapshot(replay_events(Scheduler(CFG), self.accepted)) == snapshot(self.m)


SETTINGS = settings(
    max_examples=130,
    stateful_step_count=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
QUICK = settings(
    SETTINGS, max_examples=2500, stateful_step_count=80, phases=(Phase.generate,), report_multiple_bugs=False
)


def test_the_laws_hold_for_ten_thousand_steps():
    """In every run of the suite, CI's included: 130 runs of up to 100 rules, most of which tell several events."""
    seen.clear()
    run_state_machine_as_test(Ring, settings=SETTINGS)
    assert seen["rules"] >= 10_000
    assert seen["events told"] >= 10_000
    for kind in c.ALL_COMMANDS:
        if kind not in UNANSWERED:
            assert seen[kind.__name__] > 3, f"the machine was hardly asked for {kind.__name__}: {seen}"


# --- bugs on purpose -----------------------------------------------------------------------------------------


def bug_double_commit(monkeypatch):
    """A lease's micro-batches return to the ledger although they were committed."""
    close = ledger.Ledger.close

    def broken(self, lease, committed):
        done = close(self, lease, committed)
        for line in lease.batches:
            if line.done and line not in self.ready:
                self.ready.append(line)
                self.ready_tokens += line.batch.tokens
        return done

    monkeypatch.setattr(ledger.Ledger, "close", broken)


def bug_old_life(monkeypatch):
    """A lost cell's sessions stay on it."""
    monkeypatch.setattr(on_cells, "_orphan", lambda w, session, cell: None)


def bug_stale_weights(monkeypatch):
    """Routing forgets that a group's tokens may not come from weights older than the group."""
    monkeypatch.setattr(router, "serves", lambda cell, session: cell.state is CellState.ROLLOUT)
    least = world.World.__init__

    def init(self, config):
        least(self, config)
        fleet = self.rollout
        inner = type(fleet).least
        self.rollout = type(
            "F", (type(fleet),), {"least": lambda s, v=-1, ok=None, tries=16: inner(s, -1, ok, tries)}
        )()

    monkeypatch.setattr(world.World, "__init__", init)


def bug_early_switch(monkeypatch):
    """A cell is switched although sessions' KV is still being read from it."""

    def progress(w, cell):
        if cell.state is CellState.DRAINING:
            if cell.sessions:
                on_cells._drain(w, cell)
            if cell.quiet:
                on_cells._switch(w, cell, Role.TRAIN)
        elif cell.state is CellState.FLUSHING and cell.lease is None:
            on_cells._switch(w, cell, Role.ROLLOUT)

    monkeypatch.setattr(on_cells, "progress", progress)


def bug_overdue_group_left_behind(monkeypatch):
    """Seats go to whoever ends first: an old group trains too late."""

    def place(w):
        led = w.ledger
        if not led.sealed:
            for group in list(led.ended.values())[: w.config.groups_per_step - len(led.seated)]:
                on_groups._seat(w, group)

    monkeypatch.setattr(on_groups, "place", place)
    monkeypatch.setattr(on_training, "place", place)


BUGS = [bug_double_commit, bug_old_life, bug_stale_weights, bug_early_switch, bug_overdue_group_left_behind]


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.__name__)
def test_a_bug_put_in_on_purpose_is_found(bug, monkeypatch):
    bug(monkeypatch)
    with pytest.raises((BrokenInvariantError, AssertionError, KeyError, EventError)):
        run_state_machine_as_test(Ring, settings=QUICK)
