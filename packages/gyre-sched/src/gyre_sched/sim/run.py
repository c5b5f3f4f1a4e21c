"""Discrete events in virtual time around the real machine.

The scheduler under test is the production one; this file plays the cells, the agents and the trainer.
Everything is seeded, and two runs with the same inputs are equal. Knows no policy.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.config import SchedConfig
from gyre_sched.errors import LateOutcomeError, SchedError
from gyre_sched.ids import CellId, CellState, EndStatus, Role
from gyre_sched.machine import Scheduler
from gyre_sched.policies import Policy

from .bound import sampling_cell_seconds
from .engine import Engine, Job
from .models import Hardware
from .result import Lane, SimResult
from .workload import ExecutionPlan, Turn, Workload, batches_of

__all__ = ["Lane", "SimResult", "Simulation", "simulate"]


class _Cell:
    __slots__ = ("engine", "gen", "id", "lane_since", "lane_state", "lease", "train_busy")

    def __init__(self, cell: CellId, hw: Hardware) -> None:
        self.id = cell
        self.engine = Engine(hw)
        self.gen = 0
        self.lease: _Lease | None = None
        self.train_busy = 0.0
        self.lane_state = ""
        self.lane_since = 0.0


@dataclass(slots=True)
class _Lease:
    number: int
    batches: tuple[str, ...]
    started: float
    ends: list[float]
    gen: int = 0


@dataclass(slots=True)
class _Run:
    """One execution being played."""

    name: str
    group: str
    plan: ExecutionPlan
    turn: int = 0
    context: int = 0
    left: float = 0.0
    """Tokens of the current turn still to be sampled (after an interruption)."""
    fed: int = 0
    cell: str | None = None
    """Where its KV is."""
    over: bool = False

    @property
    def session(self) -> str:
        return self.name


def _done_part(run: _Run) -> ExecutionPlan:
    """What was sampled of an execution that is cut, and the share of its tree that this is."""
    turns = list(run.plan.turns[: run.turn])
    rest = run.context - sum(t.fed + t.sampled for t in turns)
    if run.turn < len(run.plan.turns) and rest > 0:
        fed = min(run.plan.turns[run.turn].fed, rest)
        turns.append(Turn(fed, rest - fed, 0.0))
    share = min(1.0, run.context / max(1, run.plan.tokens))
    return ExecutionPlan(tuple(turns), max(1, int(run.plan.train_tokens * share)))


class Simulation:
    """One run. ``train_cells``: how many cells (the core among them) start in TRAIN; 0: all sample, core
    included.
    """

    def __init__(
        self,
        hw: Hardware,
        workload: Workload,
        config: SchedConfig,
        policy: Policy,
        *,
        train_cells: int = 1,
        seed: int = 0,
        keep_lanes: bool = False,
    ) -> None:
        self.hw = hw
        self.load = workload
        self.config = config
        self.machine = Scheduler(config, policy)
        self.rng = random.Random(f"sim/{seed}")
        self.now = 0.0
        self.events = 0
        self.keep_lanes = keep_lanes
        self.lanes: list[Lane] = []
        self.cells = {f"c{i}": _Cell(CellId(f"c{i}"), hw) for i in range(hw.cells)}
        self.runs: dict[str, _Run] = {}
        self.batch_s: dict[str, float] = {}
        self.plans: dict[str, Sequence[ExecutionPlan]] = {}
        self.members: dict[str, tuple[_Run, ...]] = {}
        self.admitted_at: dict[str, int] = {}
        self.step_ends: list[float] = []
        self.staleness = [0] * (config.max_staleness + 2)
        self.moves = self.carried = self.cuts = 0
        self.skipped = 0.0
        self.executions = 0
        self.train_cells = train_cells
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._seq = 0
        self._pending: deque[c.Command] = deque()
        self._busy = False
        self._do: dict[type, Callable[[Any], None]] = {
            c.AdmitGroup: self._admit,
            c.RouteCall: self._route,
            c.MoveSession: self._move,
            c.DrainCell: self._drain,
            c.UndrainCell: lambda cmd: None,
            c.SwitchCell: self._switch,
            c.SyncWeights: self._sync,
            c.GrantLease: self._grant,
            c.RecallLease: self._recall,
            c.BuildGroup: self._build,
            c.SealStep: lambda cmd: None,
            c.ApplyStep: self._apply,
            c.CutExecution: self._cut,
        }

    # --- the loop ------------------------------------------------------------------------------------------

    def run(self, limit_s: float = 1e9) -> SimResult:
        """Play until the last step is applied."""
        self._begin()
        heap = self._heap
        steps = self.load.steps
        while heap and len(self.step_ends) < steps:
            at, _, action, args = heapq.heappop(heap)
            if at > limit_s:
                break
            self.now = at
            self.events += 1
            action(*args)
        if len(self.step_ends) < steps:
            raise SchedError(
                f"the simulated run stopped at {self.now:.0f} s in step {len(self.step_ends)} of {steps}; "
                f"picture: {self.machine.view.picture()}"
            )
        return self._result()

    def _at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._seq += 1
        heapq.heappush(self._heap, (time, self._seq, action, args))

    def _post(self, event: e.Event) -> None:
        try:
            out = self.machine.handle(event)
        except LateOutcomeError:
            return
        if out:
            self._pending.extend(out)
        if self._busy:
            return
        self._busy = True
        pending = self._pending
        while pending:
            command = pending.popleft()
            self._do[type(command)](command)
        self._busy = False

    def _begin(self) -> None:
        hw = self.hw
        for i, cell in enumerate(self.cells.values()):
            role = Role.TRAIN if i < self.train_cells else Role.ROLLOUT
            self._lane(cell, role.value)
            self._post(e.CellJoined(0.0, cell.id, role=role, slots=hw.slots, kv_tokens=hw.kv_tokens, core=i == 0))
        for number in range(self.load.steps * self.load.groups_per_step):
            plans = self.load.group(number)
            self.plans[f"g{number}"] = plans
            self._post(e.GroupQueued(0.0, f"g{number}", len(plans)))
        self._post(e.GroupsClosed(0.0))
        self._at(self.config.tick_s, self._tick)

    def _tick(self) -> None:
        self._post(e.Tick(self.now))
        self._at(self.now + self.config.tick_s, self._tick)

    # --- agents --------------------------------------------------------------------------------------------

    def _admit(self, cmd: c.AdmitGroup) -> None:
        self.admitted_at[cmd.group] = cmd.version
        plans = self.plans.pop(cmd.group)
        self.members[cmd.group] = tuple(_Run(f"{cmd.group}.{i}", cmd.group, p) for i, p in enumerate(plans))
        self.executions += len(plans)
        for run in self.members[cmd.group]:
            self.runs[run.name] = run
            self._post(e.ExecutionStarted(self.now, run.name, cmd.group))
            self._post(e.SessionStarted(self.now, run.session, run.name))
            self._call(run)

    def _call(self, run: _Run) -> None:
        if run.over:
            return
        turn = run.plan.turns[run.turn]
        run.fed, run.left = turn.fed, float(turn.sampled)
        self._post(e.CallRequested(self.now, run.session, run.context + turn.fed))

    def _route(self, cmd: c.RouteCall) -> None:
        run = self.runs.get(cmd.session)
        if run is None:
            return
        name = cmd.cell.name
        if run.cell is not None and run.cell != name:
            self.cells[run.cell].engine.forget(run.session)
        run.cell = name
        cell = self.cells[name]
        cell.engine.submit(Job(run.session, run.context, run.fed, run.left), self.now)
        self._watch(cell)

    def _watch(self, cell: _Cell) -> None:
        """Wake when the engine's next call ends; earlier wake-ups become void."""
        cell.gen += 1
        at = cell.engine.next_due()
        if at is not None:
            self._at(at, self._engine_due, cell, cell.gen)

    def _engine_due(self, cell: _Cell, gen: int) -> None:
        if gen != cell.gen:
            self.events -= 1
            return
        ended = cell.engine.take_due(self.now)
        for job in ended:
            if job.session in self.runs:
                self._answered(self.runs[job.session], job.context)
        self._watch(cell)

    def _answered(self, run: _Run, context: int) -> None:
        pause = run.plan.turns[run.turn].pause_s
        run.context, run.fed, run.left = context, 0, 0.0
        run.turn += 1
        self._post(e.CallEnded(self.now, run.session, context, pause))
        if run.turn >= len(run.plan.turns):
            self._finish(run, EndStatus.COMPLETED)
        else:
            self._at(self.now + pause, self._call, run)

    def _finish(self, run: _Run, status: EndStatus) -> None:
        run.over = True
        if run.cell is not None:
            self.cells[run.cell].engine.forget(run.session)
        del self.runs[run.name]
        self._post(e.ExecutionEnded(self.now, run.name, status))

    def _cut(self, cmd: c.CutExecution) -> None:
        run = self.runs.get(cmd.execution)
        if run is None:
            return
        self.cuts += 1
        if run.cell is not None:
            cell = self.cells[run.cell]
            stopped = cell.engine.abort(run.session, self.now)
            if stopped is not None:
                run.context = stopped[1]
            self._watch(cell)
        full, done = run.plan, _done_part(run)
        self.skipped += sampling_cell_seconds(self.hw, full) - sampling_cell_seconds(self.hw, done)
        self.skipped += self._train_seconds(full) - self._train_seconds(done)
        run.plan = done
        self._finish(run, EndStatus.TIMEOUT)

    def _train_seconds(self, plan: ExecutionPlan) -> float:
        return sum(self.hw.train_s(b) for b in batches_of(plan.train_tokens, self.load.batch_tokens))

    # --- cells ---------------------------------------------------------------------------------------------

    def _lane(self, cell: _Cell, state: str) -> None:
        if self.keep_lanes and cell.lane_state and self.now > cell.lane_since:
            self.lanes.append(Lane(cell.id.name, cell.lane_state, cell.lane_since, self.now))
        cell.lane_state, cell.lane_since = state, self.now

    def _drain(self, cmd: c.DrainCell) -> None:
        self._lane(self.cells[cmd.cell.name], CellState.DRAINING.value)
        self._post(e.DrainDone(self.now, cmd.cell))

    def _switch(self, cmd: c.SwitchCell) -> None:
        cell = self.cells[cmd.cell.name]
        self._lane(cell, CellState.SWITCHING.value)
        cell.engine.clear()
        spread = self.hw.switch_spread
        base = self.hw.to_train_s if cmd.role is Role.TRAIN else self.hw.to_rollout_s
        seconds = base * (1.0 + spread * (2.0 * self.rng.random() - 1.0))
        self._at(self.now + seconds, self._switched, cell, cmd.role, seconds)

    def _switched(self, cell: _Cell, role: Role, seconds: float) -> None:
        self._lane(cell, role.value)
        self._post(e.SwitchDone(self.now, cell.id, role, seconds))

    def _move(self, cmd: c.MoveSession) -> None:
        run = self.runs.get(cmd.session)
        if run is None:
            return
        self.moves += 1
        src = self.cells[cmd.src.name]
        if cmd.interrupt:
            stopped = src.engine.abort(run.session, self.now)
            if stopped is not None:
                run.left, run.context, run.fed = stopped
            self._watch(src)
            self._post(e.CallRequested(self.now, run.session, run.context + run.fed))
        held = src.engine.forget(run.session)
        carry = cmd.carry_kv and held > 0
        seconds = self.hw.move_s(held) if carry else 0.0
        run.cell = None
        self._at(self.now + seconds, self._moved, cmd, run, held if carry else 0, seconds)

    def _moved(self, cmd: c.MoveSession, run: _Run, tokens: int, seconds: float) -> None:
        if run.over:
            return
        if tokens:
            self.carried += 1
            self.cells[cmd.dst.name].engine.keep(run.session, tokens)
            run.cell = cmd.dst.name
        size = int(tokens * self.hw.kv_bytes_per_token)
        self._post(e.MoveDone(self.now, cmd.move, run.session, tokens > 0, size, tokens, seconds))

    def _sync(self, cmd: c.SyncWeights) -> None:
        self._at(
            self.now + self.hw.sync_s,
            lambda: self._post(e.WeightsLoaded(self.now, cmd.cell, cmd.version, self.hw.sync_s)),
        )

    # --- training ------------------------------------------------------------------------------------------

    def _build(self, cmd: c.BuildGroup) -> None:
        self.staleness[min(cmd.step - self.admitted_at.pop(cmd.group), len(self.staleness) - 1)] += 1
        batches = []
        for run in self.members.pop(cmd.group):
            for i, tokens in enumerate(batches_of(run.plan.train_tokens, self.load.batch_tokens)):
                name = f"{run.name}/{i}"
                self.batch_s[name] = self.hw.train_s(tokens)
                batches.append(e.Batch(name, tokens))
        self._post(e.GroupBatched(self.now, cmd.group, tuple(batches)))

    def _grant(self, cmd: c.GrantLease) -> None:
        cell = self.cells[cmd.cell.name]
        ends, at = [], self.now
        for batch in cmd.batches:
            at += self.batch_s[batch]
            ends.append(at)
        cell.lease = _Lease(cmd.lease, cmd.batches, self.now, ends)
        self._at(at, self._computed, cell, cell.lease, 0, len(ends))

    def _recall(self, cmd: c.RecallLease) -> None:
        """Commit at the end of the micro-batch that is being computed."""
        cell = self.cells[cmd.cell.name]
        lease = cell.lease
        if lease is None or lease.number != cmd.lease:
            return
        done = next(i for i, end in enumerate(lease.ends) if end >= self.now) + 1
        lease.gen += 1
        self._at(lease.ends[done - 1], self._computed, cell, lease, lease.gen, done)

    def _computed(self, cell: _Cell, lease: _Lease, gen: int, done: int) -> None:
        if gen != lease.gen:
            return
        seconds = self.now - lease.started
        cell.train_busy += seconds
        cell.lease = None
        for batch in lease.batches[:done]:
            del self.batch_s[batch]
        self._post(e.ContributionCommitted(self.now, cell.id, lease.number, lease.batches[:done], seconds))

    def _apply(self, cmd: c.ApplyStep) -> None:
        self._at(self.now + self.hw.apply_s, self._applied, cmd.step)

    def _applied(self, step: int) -> None:
        self.step_ends.append(self.now)
        self._post(e.StepApplied(self.now, step))
        self._post(e.WeightsPublished(self.now, step + 1))

    def _result(self) -> SimResult:
        for cell in self.cells.values():
            cell.engine.advance(self.now)
            self._lane(cell, "end")
        total = self.now * len(self.cells)
        sampling = sum(cell.engine.busy_s for cell in self.cells.values()) / total
        training = sum(cell.train_busy for cell in self.cells.values()) / total
        return SimResult(
            seconds=self.now,
            step_ends=tuple(self.step_ends),
            idle_share=max(0.0, 1.0 - sampling - training),
            sampling_share=sampling,
            training_share=training,
            switches=self.machine._w.switches,
            moves=self.moves,
            moves_carried=self.carried,
            staleness=tuple(self.staleness),
            cut=self.cuts,
            executions=self.executions,
            skipped_cell_s=self.skipped,
            events=self.events,
            lanes=tuple(self.lanes),
        )


def simulate(
    hw: Hardware,
    workload: Workload,
    config: SchedConfig,
    policy: Policy,
    *,
    train_cells: int = 1,
    seed: int = 0,
    keep_lanes: bool = False,
) -> SimResult:
    """Run one simulation to its end."""
    sim = Simulation(hw, workload, config, policy, train_cells=train_cells, seed=seed, keep_lanes=keep_lanes)
    return sim.run()
