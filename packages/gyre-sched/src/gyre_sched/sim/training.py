"""The simulated trainer: micro-batches, leases, the gradient sum, the optimizer step.

Invariant, checked while a run is played: each micro-batch of a step is in the gradient sum exactly once when the step
is applied, however many cells died or turned meanwhile. Plays no cell and no agent.
"""

from __future__ import annotations

from gyre_sched import commands as c
from gyre_sched import events as e
from gyre_sched.errors import SchedError
from gyre_sched.ids import CellId

from .agents import Agents
from .cluster import Cluster, HeldLease, SimCell
from .stage import Stage
from .workload import batches_of

__all__ = ["Training"]


class Training:
    """The open step. ``staleness[n]``: groups that trained ``n`` versions after their admission."""

    def __init__(self, stage: Stage, cluster: Cluster, agents: Agents) -> None:
        self.stage = stage
        self.cluster = cluster
        self.agents = agents
        self.step_ends: list[float] = []
        self.staleness = [0] * (stage.config.max_staleness + 2)
        self.seconds: dict[str, float] = {}
        """Computing time of each micro-batch of the open step."""
        self.summed: set[str] = set()
        """Those whose gradient is in the core's sum."""
        self.again = 0
        """Contributions that died with a core and were computed again."""
        self._core = cluster.cells["c0"].id
        stage.do |= {
            c.GrantLease: self._grant,
            c.RecallLease: self._recall,
            c.BuildGroup: self._build,
            c.SealStep: lambda cmd: None,
            c.ApplyStep: self._apply,
        }

    def _build(self, cmd: c.BuildGroup) -> None:
        stale = cmd.step - self.agents.admitted_at.pop(cmd.group)
        self.staleness[min(stale, len(self.staleness) - 1)] += 1
        batches = []
        for run in self.agents.members.pop(cmd.group):
            for i, tokens in enumerate(batches_of(run.plan.train_tokens, self.stage.load.batch_tokens)):
                name = f"{run.name}/{i}"
                self.seconds[name] = self.stage.hw.train_s(tokens)
                batches.append(e.Batch(name, tokens))
        self.stage.post(e.GroupBatched(self.stage.now, cmd.group, tuple(batches)))

    def _grant(self, cmd: c.GrantLease) -> None:
        cell = self.cluster.cells[cmd.cell.name]
        ends, at = [], self.stage.now
        for batch in cmd.batches:
            at += self.seconds[batch]
            ends.append(at)
        cell.lease = HeldLease(cmd.lease, cmd.batches, self.stage.now, ends)
        self.stage.at(at, self._computed, cell, cell.lease, 0, len(ends))

    def _recall(self, cmd: c.RecallLease) -> None:
        """Commit at the end of the micro-batch that is being computed."""
        cell = self.cluster.cells[cmd.cell.name]
        lease, now = cell.lease, self.stage.now
        if lease is None or lease.number != cmd.lease or lease.ends[-1] < now:
            return  # gone, or computed and waiting for the core
        done = next(i for i, end in enumerate(lease.ends) if end >= now) + 1
        lease.gen += 1
        self.stage.at(lease.ends[done - 1], self._computed, cell, lease, lease.gen, done)

    def _computed(self, cell: SimCell, lease: HeldLease, gen: int, done: int) -> None:
        if gen != lease.gen or cell.lease is not lease:
            return
        if not self.cluster.alive(self.cluster.cells["c0"].id):
            # There is no sum to add to: the cell holds its gradient until the core is back.
            self.stage.at(self.stage.now + self.stage.config.tick_s, self._computed, cell, lease, gen, done)
            return
        seconds = self.stage.now - lease.started
        cell.train_busy += seconds
        cell.lease = None
        batches = lease.batches[:done]
        self._core_alive()
        twice = self.summed.intersection(batches)
        if twice:
            raise SchedError(f"micro-batches {sorted(twice)} were committed twice to step {len(self.step_ends)}")
        self.summed.update(batches)
        self.stage.post(e.ContributionCommitted(self.stage.now, cell.id, lease.number, batches, seconds))

    def _core_alive(self) -> None:
        """The gradient sum lives and dies with the core."""
        core = self.cluster.cells["c0"].id
        if core != self._core:
            self._core = core
            self.again += len(self.summed)
            self.summed.clear()

    def _apply(self, cmd: c.ApplyStep) -> None:
        self._core_alive()
        if self.summed != set(self.seconds):
            missing = sorted(set(self.seconds) - self.summed)
            raise SchedError(f"step {cmd.step} is to be applied without micro-batches {missing}")
        self.stage.at(self.stage.now + self.stage.hw.apply_s, self._applied, cmd.step, self._core)

    def _applied(self, step: int, core: CellId) -> None:
        if not self.cluster.alive(core):
            return
        self.seconds.clear()
        self.summed.clear()
        self.step_ends.append(self.stage.now)
        self.stage.post(e.StepApplied(self.stage.now, step))
        self.stage.post(e.WeightsPublished(self.stage.now, step + 1))
