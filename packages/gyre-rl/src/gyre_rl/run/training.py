"""A step's training: groups to micro-batches, leases out, contributions in, one optimizer step on the core.

Invariant: a contribution is counted on the core before the scheduler is told that it is committed, so that a step which
the scheduler calls complete is complete on the core; one whose word was lost is committed when its batches come again.
Not here: who computes what, and when a step closes.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gyre_core import CellId, Contribution, GyreError, MicroBatch, StepResult
from gyre_sched import CellId as SchedCell
from gyre_sched import events as sched
from gyre_tito import Store

from gyre_rl.cell.messages import Applied, ApplyStep, LeaseDone
from gyre_rl.config.schema import RunConfig
from gyre_rl.run.atrest import keep_record
from gyre_rl.run.batches import BuiltGroup, Member, build_group
from gyre_rl.run.bus import EventBus
from gyre_rl.run.cells import Cells
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.metrics import summarise
from gyre_rl.run.parity import measure, require
from gyre_rl.run.rollout import Finished, Rollout
from gyre_rl.views.events import Checkpointed, Compared, Contributed, GroupReady, Leased, LeaseReturned, StepApplied

Post = Callable[[sched.Event], None]


@dataclass(slots=True)
class OpenStep:
    """What has come together of a step so far."""

    divisor: float = 0.0
    scores: list[float] = field(default_factory=list)
    staleness: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    contributions: list[tuple[CellId, Contribution]] = field(default_factory=list)


@dataclass(slots=True)
class Training:
    """Turns finished groups into optimizer steps."""

    config: RunConfig
    directory: RunDirectory
    cells: Cells
    rollout: Rollout
    store: Store
    post: Post
    bus: EventBus
    applied: int = 0
    """Optimizer steps taken; equals the policy version."""
    satellite_joins: int = 0
    trained_tokens: int = 0
    """Tree tokens through the trainers since the run began."""
    batches: dict[str, MicroBatch] = field(default_factory=dict)
    committed_before: dict[str, Contribution] = field(default_factory=dict)
    """Batch id -> a contribution at rest that an earlier life of the run committed."""
    _steps: dict[int, OpenStep] = field(default_factory=lambda: defaultdict(OpenStep))
    _leases: dict[int, tuple[CellId, int, tuple[str, ...]]] = field(default_factory=dict)
    _sealed_steps: set[int] = field(default_factory=set)
    _compared: bool = False
    _seen_training: set[tuple[CellId, int]] = field(default_factory=set)
    _step_began: float = field(default_factory=time.monotonic)
    on_applied: Callable[[tuple[str, ...]], None] = lambda groups: None
    """Told the groups of each step that was applied."""

    # -- groups ----------------------------------------------------------------------------------------------
    async def build_group(self, group: str, step: int, executions: tuple[str, ...], left_out: int) -> None:
        """Read the group's trees, fix its share of the loss and put its micro-batches into the ledger."""
        finished = [self.rollout.finished[name] for name in executions]
        built: BuiltGroup = await asyncio.to_thread(self._build, group, step, finished)
        opened = self._steps[step]
        opened.divisor += built.group.divisor
        opened.scores.extend(built.scores)
        for age, count in built.group.staleness.items():
            opened.staleness[age] += count
        todo = [batch for batch in built.batches if batch.id not in self.committed_before]
        for batch in todo:
            self.batches[batch.id] = batch
        advantages = built.group.advantages
        self.bus.emit(
            GroupReady(
                group,
                step,
                advantages.members,
                left_out,
                0.0 if math.isnan(advantages.baseline) else advantages.baseline,
                built.spread,
                len(built.batches),
                sum(batch.tokens for batch in built.batches),
                "" if built.batches else advantages.note.value,
            )
        )
        ledger = tuple(sched.Batch(batch.id, batch.tokens) for batch in todo)
        self.post(sched.GroupBatched(time.monotonic(), group, ledger))

    def _build(self, group: str, step: int, finished: Sequence[Finished]) -> BuiltGroup:
        members = []
        for item in finished:
            arrays = self.store.load_tree(item.recorded).to_arrays()
            score = math.nan if item.score is None else item.score
            members.append(Member(item.execution, item.end.status.value, score, arrays))
        return build_group(group, step, members, self.config.loss, trainer_version=step)

    # -- leases ----------------------------------------------------------------------------------------------
    async def lease(self, cell: CellId, lease: int, step: int, batches: tuple[str, ...]) -> None:
        """Send micro-batches to a cell."""
        info = self.cells.info(cell)
        self._leases[lease] = (cell, step, batches)
        chosen = tuple(self.batches[name] for name in batches)
        await self.cells.lease(cell, lease, step, chosen)
        if not info.core and (cell, step) not in self._seen_training:
            self._seen_training.add((cell, step))
            self.satellite_joins += bool(self._steps[step].contributions) or step not in self._sealed_steps
        tokens = sum(batch.tokens for batch in chosen)
        self.bus.emit(Leased(lease, str(cell), step, len(batches), tokens, info.core))

    async def lease_done(self, cell: CellId, done: LeaseDone) -> None:
        """A cell ended a lease: count its contribution, or give the batches back."""
        known = self._leases.pop(done.lease, None)
        if known is None or known[0] != cell:
            return  # of a former life; the scheduler has given the batches to somebody else
        _, step, batches = known
        contribution = done.contribution
        now = time.monotonic
        if contribution is None:
            self.bus.emit(LeaseReturned(done.lease, str(cell), step, len(batches), done.why))
            self.post(sched.LeaseFailed(now(), SchedCell(*cell), done.lease, done.why))
            return
        try:
            counted = await self.cells.add(contribution)
        except GyreError as error:
            self.post(sched.LeaseFailed(now(), SchedCell(*cell), done.lease, str(error)))
            return
        for item in counted:
            self._count(cell, step, item, done)
        in_sum = {batch for item in counted for batch in item.batch_ids}
        committed = tuple(batch for batch in contribution.batch_ids if batch in in_sum)
        self.post(sched.ContributionCommitted(now(), SchedCell(*cell), done.lease, committed, done.seconds))

    def _count(self, cell: CellId, step: int, contribution: Contribution, done: LeaseDone) -> None:
        """It is in the sum: keep and tell it, once."""
        opened = self._steps[step].contributions
        if any(other.id == contribution.id for _, other in opened):
            return
        opened.append((cell, contribution))
        self.trained_tokens += contribution.stats.tokens
        keep_record(self.directory.contributions(step), contribution)
        info = self.cells.infos.get(cell)
        core = info is not None and info.core
        batches, tokens = len(contribution.batch_ids), contribution.stats.tokens
        self.bus.emit(Contributed(done.lease, str(cell), step, batches, tokens, done.seconds, core))

    def forget_leases(self, cell: CellId) -> None:
        """The cell is lost; the scheduler returns its leases."""
        for lease, (holder, step, batches) in list(self._leases.items()):
            if holder == cell:
                del self._leases[lease]
                self.bus.emit(LeaseReturned(lease, str(cell), step, len(batches), "its cell is lost"))

    def forget_sum(self) -> None:
        """The core died with the step's sum: the scheduler puts its micro-batches back into the ledger."""
        self._steps[self.applied].contributions.clear()

    async def reuse(self, contributions: Sequence[Contribution]) -> None:
        """Count contributions that an earlier life committed to the open step."""
        for contribution in contributions:
            await self.cells.add(contribution)
            self._steps[contribution.step].contributions.append((self.cells.core, contribution))
            self.committed_before.update(dict.fromkeys(contribution.batch_ids, contribution))

    # -- the step --------------------------------------------------------------------------------------------
    def seal(self, step: int) -> None:
        """No group will be added."""
        self._sealed_steps.add(step)

    async def apply(self, step: int, groups: tuple[str, ...]) -> Applied:
        """Divide, clip, step, publish, and tell everybody."""
        opened = self._steps.pop(step)
        save = (step + 1) % self.config.checkpoint.every == 0 or step + 1 == self.config.steps
        checkpoint = str(self.directory.checkpoint(step + 1)) if save else None
        self._compare(step, opened)
        divisor = opened.divisor if opened.divisor > 0 else 1.0
        applied = await self.cells.apply(ApplyStep(step, divisor, str(self.directory.weights), checkpoint))
        self.applied = step + 1
        now = time.monotonic()
        self.bus.emit(self._told(step, opened, applied.result, now - self._step_began))
        if checkpoint:
            self.bus.emit(Checkpointed(step, step + 1, checkpoint, applied.seconds))
        self._step_began = now
        self.post(sched.StepApplied(now, step))
        self.post(sched.WeightsPublished(time.monotonic(), step + 1))
        self._forget(step)
        self.on_applied(groups)
        return applied

    def _compare(self, step: int, opened: OpenStep) -> None:
        """Stop a run whose trainer and engine are not the same model; only tokens of the present version can tell."""
        if self._compared or max(opened.staleness, default=0) > 0:
            return
        parity = measure(contribution.stats.metrics for _, contribution in opened.contributions)
        if parity is None:
            return
        self._compared = True
        self.bus.emit(Compared(step, parity.mean, parity.largest, parity.tokens))
        require(parity, self.config.loss.max_logprob_gap)

    def _forget(self, step: int) -> None:
        """What only the step needed: its gradients at rest."""
        self.batches = {name: batch for name, batch in self.batches.items() if batch.step > step}
        shutil.rmtree(self.directory.contributions(step), ignore_errors=True)
        for version in self.directory.versions_saved()[: -self.config.checkpoint.keep]:
            shutil.rmtree(self.directory.checkpoint(version), ignore_errors=True)

    def _told(self, step: int, opened: OpenStep, result: StepResult, seconds: float) -> StepApplied:
        stats = [contribution.stats for _, contribution in opened.contributions]
        trained = sum(item.trained_tokens for item in stats)
        ages = opened.staleness
        total = sum(ages.values())
        core = {cell for cell, info in self.cells.infos.items() if info.core}
        return StepApplied(
            step=step,
            version=result.version,
            score=statistics.fmean(opened.scores) if opened.scores else 0.0,
            seconds=seconds,
            executions=len(opened.scores),
            loss=sum(item.loss_sum for item in stats) / (opened.divisor or 1.0),
            grad_norm=result.grad_norm,
            learning_rate=result.learning_rate,
            tokens=sum(item.tokens for item in stats),
            trained_tokens=trained,
            staleness_mean=sum(age * count for age, count in ages.items()) / total if total else 0.0,
            staleness_max=max(ages, default=0),
            contributions=len(stats),
            satellites=len({cell for cell, _ in opened.contributions} - core),
            skipped=result.skipped,
            metrics=summarise(item.metrics for item in stats),
        )
