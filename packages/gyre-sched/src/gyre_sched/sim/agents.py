"""The simulated agents: executions that call, pause, are moved, cut, and end.

Invariant: an execution has one call at a time, and its context grows by exactly what its plan says, however often the
call is interrupted, moved or begun again. A call whose cell dies is begun again: what it had sampled since it was last
routed is lost. Knows nothing of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.ids import EndStatus

from .bound import sampling_cell_seconds
from .cluster import Cluster, SimCell
from .engine import Job
from .stage import Stage
from .workload import ExecutionPlan, Turn, batches_of

__all__ = ["Agents", "Run"]


@dataclass(slots=True)
class Run:
    """One execution being played; it has one session, of the same name."""

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
    move: int = 0
    """The move that brings it somewhere, 0 if none."""
    over: bool = False


def _done_part(run: Run) -> ExecutionPlan:
    """What was sampled of an execution that is cut, and the share of its tree that this is."""
    turns = list(run.plan.turns[: run.turn])
    rest = run.context - sum(t.fed + t.sampled for t in turns)
    if run.turn < len(run.plan.turns) and rest > 0:
        fed = min(run.plan.turns[run.turn].fed, rest)
        turns.append(Turn(fed, rest - fed, 0.0))
    share = min(1.0, run.context / max(1, run.plan.tokens))
    return ExecutionPlan(tuple(turns), max(1, int(run.plan.train_tokens * share)))


class Agents:
    """All executions. ``members``: those of each group, until its micro-batches are built."""

    def __init__(self, stage: Stage, cluster: Cluster) -> None:
        self.stage = stage
        self.cluster = cluster
        self.plans: dict[str, Sequence[ExecutionPlan]] = {}
        self.runs: dict[str, Run] = {}
        self.members: dict[str, tuple[Run, ...]] = {}
        self.admitted_at: dict[str, int] = {}
        self.executions = self.moves = self.carried = self.cuts = 0
        self.skipped = 0.0
        """Least cell time of what cuts left undone."""
        stage.do |= {
            c.AdmitGroup: self._admit,
            c.RouteCall: self._route,
            c.MoveSession: self._move,
            c.CutExecution: self._cut,
        }

    def begin(self) -> None:
        """All groups are there from the start."""
        load = self.stage.load
        for number in range(load.steps * load.groups_per_step):
            plans = load.group(number)
            self.plans[f"g{number}"] = plans
            self.stage.post(e.GroupQueued(0.0, f"g{number}", len(plans)))
        self.stage.post(e.GroupsClosed(0.0))

    def _admit(self, cmd: c.AdmitGroup) -> None:
        now = self.stage.now
        self.admitted_at[cmd.group] = cmd.version
        plans = self.plans.pop(cmd.group)
        self.members[cmd.group] = tuple(Run(f"{cmd.group}.{i}", cmd.group, p) for i, p in enumerate(plans))
        self.executions += len(plans)
        for run in self.members[cmd.group]:
            self.runs[run.name] = run
            self.stage.post(e.ExecutionStarted(now, run.name, cmd.group))
            self.stage.post(e.SessionStarted(now, run.name, run.name))
            self._call(run)

    # --- calls ---------------------------------------------------------------------------------------------

    def _call(self, run: Run) -> None:
        if run.over:
            return
        turn = run.plan.turns[run.turn]
        run.fed, run.left = turn.fed, float(turn.sampled)
        self.stage.post(e.CallRequested(self.stage.now, run.name, run.context + turn.fed))

    def _route(self, cmd: c.RouteCall) -> None:
        run = self.runs.get(cmd.session)
        if run is None:
            return
        name = cmd.cell.name
        cells = self.cluster.cells
        if run.cell is not None and run.cell != name:
            cells[run.cell].engine.forget(run.name)
        run.cell, run.move = name, 0
        cell = cells[name]
        cell.engine.submit(Job(run.name, run.context, run.fed, run.left), self.stage.now)
        self.watch(cell)

    def watch(self, cell: SimCell) -> None:
        """Wake when the engine's next call ends; earlier wake-ups become void."""
        cell.gen += 1
        at = cell.engine.next_due()
        if at is not None:
            self.stage.at(at, self._engine_due, cell, cell.gen)

    def _engine_due(self, cell: SimCell, gen: int) -> None:
        if gen != cell.gen:
            self.stage.events -= 1
            return
        for job in cell.engine.take_due(self.stage.now):
            run = self.runs.get(job.session)
            if run is not None:
                self.answered(run, job.context)
        self.watch(cell)

    def answered(self, run: Run, context: int) -> None:
        """A call ended; the execution pauses in its tool, or has ended."""
        now = self.stage.now
        pause = run.plan.turns[run.turn].pause_s
        run.context, run.fed, run.left = context, 0, 0.0
        run.turn += 1
        self.stage.post(e.CallEnded(now, run.name, context, pause))
        if run.turn >= len(run.plan.turns):
            self._finish(run, EndStatus.COMPLETED)
        else:
            self.stage.at(now + pause, self._call, run)

    def _finish(self, run: Run, status: EndStatus) -> None:
        run.over = True
        if run.cell is not None:
            self.cluster.cells[run.cell].engine.forget(run.name)
        del self.runs[run.name]
        self.stage.post(e.ExecutionEnded(self.stage.now, run.name, status))

    # --- moves and cuts ------------------------------------------------------------------------------------

    def _move(self, cmd: c.MoveSession) -> None:
        run = self.runs.get(cmd.session)
        if run is None:
            return
        self.moves += 1
        now, src = self.stage.now, self.cluster.cells[cmd.src.name]
        if cmd.interrupt:
            stopped = src.engine.abort(run.name, now)
            if stopped is not None:
                run.left, run.context, run.fed = stopped
            self.watch(src)
            self.stage.post(e.CallRequested(now, run.name, run.context + run.fed))
        held = src.engine.forget(run.name)
        carry = cmd.carry_kv and held > 0
        seconds = self.stage.hw.move_s(held) if carry else 0.0
        run.cell, run.move = None, cmd.move
        self.stage.at(now + seconds, self._moved, cmd, run, held if carry else 0, seconds)

    def _moved(self, cmd: c.MoveSession, run: Run, tokens: int, seconds: float) -> None:
        """The KV arrives, unless a cell of the move has died meanwhile and the session went elsewhere."""
        if run.over or run.move != cmd.move:
            return
        run.move = 0
        dst = self.cluster.cells[cmd.dst.name]
        if tokens and self.cluster.alive(cmd.src) and self.cluster.alive(cmd.dst):
            self.carried += 1
            dst.engine.keep(run.name, tokens)
            run.cell = cmd.dst.name
        size = int(tokens * self.stage.hw.kv_bytes_per_token)
        self.stage.post(e.MoveDone(self.stage.now, cmd.move, run.name, tokens > 0, size, tokens, seconds))

    def _cut(self, cmd: c.CutExecution) -> None:
        run = self.runs.get(cmd.execution)
        if run is None:
            return
        self.cuts += 1
        if run.cell is not None:
            cell = self.cluster.cells[run.cell]
            stopped = cell.engine.abort(run.name, self.stage.now)
            if stopped is not None:
                run.context = stopped[1]
            self.watch(cell)
        full, done, hw = run.plan, _done_part(run), self.stage.hw
        self.skipped += sampling_cell_seconds(hw, full) - sampling_cell_seconds(hw, done)
        self.skipped += self._train_seconds(full) - self._train_seconds(done)
        run.plan = done
        self._finish(run, EndStatus.TIMEOUT)

    def _train_seconds(self, plan: ExecutionPlan) -> float:
        return sum(self.stage.hw.train_s(b) for b in batches_of(plan.train_tokens, self.stage.load.batch_tokens))
