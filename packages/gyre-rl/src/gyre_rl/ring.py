"""One run, from tasks to new weights and round again.

Invariant: this module says what happens in which order and waits; each decision is the scheduler's, each tensor a
cell's, each token the proxy's. Whatever ends a run, every process of it ends, and what it recorded is enough to go on.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from gyre_core import (
    ComponentContext,
    EventSink,
    InfrastructureError,
    Kind,
    PluginManager,
    Purpose,
    Task,
    TaskSet,
    WeightSource,
)
from gyre_sched import events as sched
from gyre_tito import Store

from gyre_rl.agents.rests import Rests
from gyre_rl.config.schema import RunConfig
from gyre_rl.run.atrest import contributions_at_rest, weights_at_rest
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.feed import Feed
from gyre_rl.run.parts import Parts, assembled
from gyre_rl.run.resume import OpenGroup, Past, read_past
from gyre_rl.run.rollout import GroupPlan
from gyre_rl.run.sampling import sample_loads
from gyre_rl.run.stream import TaskStream, group_index, group_name
from gyre_rl.run.summary import RunSummary
from gyre_rl.views.events import Evaluated, RunEnded, StepStarted, read_log

log = logging.getLogger("gyre.run")
LOST_GROUPS = 8
"""Groups that may be lost in a row to failures of ours before the run ends; more where more are under way at a time."""


async def run(config: RunConfig, *, resume: bool = False, view: EventSink | None = None) -> RunSummary:
    """Carry out `config` in its run directory; cancelling stops it in order and leaves it resumable.

    Raises GyreError when the run cannot start or go on; the directory is resumable then, too.
    """
    directory = RunDirectory(Path(config.dir or f"runs/{config.name}").absolute())
    plugins = PluginManager.installed()
    with directory.lock():
        past = _past(directory, Rests(directory.rests, config.harness.name)) if resume else None
        plugins.hooks.hook.gyre_run_started(run_dir=str(directory.root))
        ok = False
        try:
            summary = await _run(config, directory, plugins, [view] if view else [], past)
            ok = True
        finally:
            plugins.hooks.hook.gyre_run_ended(run_dir=str(directory.root), ok=ok)
        directory.summary.write_bytes(msgspec.json.encode(summary) + b"\n")
        return summary


def _past(directory: RunDirectory, rests: Rests) -> Past:
    """What earlier lives left. Rests of executions that do not go on are deleted."""
    with Store.open(directory.store) as store:
        past = read_past(directory, read_log(directory.events), store, rests)
    rests.keep_only({name for group in (*past.groups, *past.evaluations.values()) for name in group.at_rest})
    return past


async def _run(
    config: RunConfig, directory: RunDirectory, plugins: PluginManager, views: Sequence[EventSink], past: Past | None
) -> RunSummary:
    began = time.monotonic()
    source, restore = _first_weights(config, directory, past)
    async with assembled(config, directory, plugins, views, source, restore, resumed=past is not None) as parts:
        ring = Ring(parts, _tasks(config, plugins, directory), past, began)
        status, reason = "failed", ""
        try:
            work = asyncio.ensure_future(ring.go())
            await asyncio.wait((work, parts.failed), return_when=asyncio.FIRST_COMPLETED)
            if parts.failed.done():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                parts.failed.result()
            summary = work.result()
            status = summary.status
        except asyncio.CancelledError:
            work.cancel()
            status, reason = "stopped", "asked to stop"
            raise
        except Exception as error:
            reason = str(error)
            raise
        finally:
            parts.bus.emit(RunEnded(status, reason, time.monotonic() - began))
        return summary


def _first_weights(config: RunConfig, directory: RunDirectory, past: Past | None) -> tuple[WeightSource, str | None]:
    """The model's own weights as version 0, or where the newest checkpoint left off."""
    if past is None or past.version <= 0:
        return weights_at_rest(config, directory, 0), None
    return weights_at_rest(config, directory, past.version), str(directory.checkpoint(past.version))


@dataclass(frozen=True, slots=True)
class TaskSplits:
    """What is trained on and what is judged."""

    train: TaskStream
    heldout: Sequence[Task]


def _tasks(config: RunConfig, plugins: PluginManager, directory: RunDirectory) -> TaskSplits:
    context = ComponentContext(str(directory.root), "run", config.seed, base_dir=config.base_dir)
    taskset: TaskSet = plugins.create(Kind.TASKSET, config.tasks.name, config.tasks.options, context)
    train = TaskStream(taskset.tasks(config.rollout.split), config.seed, config.rollout.shuffle)
    return TaskSplits(train, list(taskset.tasks(config.eval.split))[: config.eval.tasks])


@dataclass(slots=True)
class Ring:
    """The run loop over assembled parts."""

    parts: Parts
    tasks: TaskSplits
    past: Past | None
    began: float
    feed: Feed = field(init=False)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)
    _judged: int = 0
    _lost: int = 0
    """Groups that left without training, since one last trained."""

    def __post_init__(self) -> None:
        config = self.parts.config
        per_step = config.rollout.tasks_per_step
        left = config.steps - self.parts.training.applied
        self.feed = Feed(left * per_step, (config.rollout.max_staleness + 1) * per_step)
        self.parts.training.on_applied = self._applied
        self.parts.driver.group_left = self._left

    async def go(self) -> RunSummary:
        """Judge, train, judge again."""
        parts = self.parts
        parts.spawn(sample_loads(parts))
        before = self.past.score_before if self.past else None
        if before is None:
            before = await self.evaluate()
        await self.train()
        after = await self.evaluate()
        return self._summary("finished", before, after)

    # -- training --------------------------------------------------------------------------------------------
    async def train(self) -> None:
        """Offer groups and let scheduler and cells work until the last step is applied."""
        config, parts = self.parts.config, self.parts
        if parts.training.applied < config.steps:
            parts.bus.emit(StepStarted(parts.training.applied, parts.training.applied, config.rollout.tasks_per_step))
            if self.past is not None:
                await self._go_on(self.past)
        every = config.eval.every
        while parts.training.applied < config.steps:
            self._offer()
            self._moved.clear()
            await self._moved.wait()
            step = parts.training.applied
            if every and step % every == 0 and step < config.steps and self._fresh(step):
                await self.evaluate()

    def _fresh(self, step: int) -> bool:
        """Whether this step has not been judged yet."""
        fresh, self._judged = step != self._judged, step
        return fresh

    def _offer(self) -> None:
        """Queue as many groups as may be wanted now."""
        for _ in range(self.feed.due()):
            index = self.feed.next_index
            self._plan(index)
            self.feed.take(group_name(index))
            self._queue(group_name(index))

    def _plan(self, index: int) -> None:
        rollout = self.parts.config.rollout
        name = group_name(index)
        self.parts.rollout.plans[name] = GroupPlan(
            name, self.tasks.train.task(index), rollout.group_size, Purpose.TRAIN, rollout.temperature
        )

    def _queue(self, name: str, *, evaluation: bool = False) -> None:
        size = self.parts.rollout.plans[name].size
        self.parts.post(sched.GroupQueued(time.monotonic(), name, size, evaluation))

    def _applied(self, groups: tuple[str, ...]) -> None:
        self._lost = 0
        self.feed.trained(groups)
        for name in groups:
            self.parts.rollout.forget(name)
        step, config = self.parts.training.applied, self.parts.config
        if step < config.steps:
            self.parts.bus.emit(StepStarted(step, step, config.rollout.tasks_per_step))
        self._moved.set()

    def _left(self, group: str) -> None:
        """Another task takes its place; unless all of them leave, for then something is broken that does not mend."""
        self._lost += 1
        most = max(LOST_GROUPS, 2 * self.feed.ahead)
        if self._lost >= most:
            self.parts.fail(self._nothing_scored("sampling groups to train on", f"{self._lost} groups in a row lost"))
        self.feed.left(group)
        self._moved.set()

    def _nothing_scored(self, doing: str, got: str) -> InfrastructureError:
        return InfrastructureError(
            doing,
            got=f"{got} to failures of ours, the last one: {self.parts.rollout.last_failure}",
            expected="executions that can be scored",
            fix="Mend what failed, then `gyre resume`: what had been scored is kept.",
        )

    async def _go_on(self, past: Past) -> None:
        """Take up the groups that an earlier life left: what ended counts, what rests goes on, others start again."""
        parts = self.parts
        ready = contributions_at_rest(parts.directory, parts.training.applied)
        wanted = {group.name for group in past.groups if not group.attempts}
        usable = [c for c in ready if {name.rpartition(".")[0] for name in c.batch_ids} <= wanted]
        await parts.training.reuse(usable)
        again = 0
        for group in sorted(past.groups, key=lambda g: (g.name not in wanted, g.name)):
            self._plan(group_index(group.name))
            self.feed.open.add(group.name)
            self._take_up(group)
            self._queue(group.name)
            again += parts.config.rollout.group_size - len(group.finished) - len(group.at_rest)
        self.feed.next_index = past.next_group
        kept = sum(len(group.finished) for group in past.groups)
        going_on = sum(len(group.at_rest) for group in past.groups)
        parts.bus.notice(
            f"resumed at version {parts.training.applied}: {kept} executions that had ended are kept, {going_on} go on "
            f"where they rested, {again} are started again from their tasks, {len(usable)} contributions at rest are "
            "counted",
            "info",
        )

    def _take_up(self, group: OpenGroup) -> None:
        """What ended of a group in an earlier life counts; other attempts get names of their own."""
        rollout = self.parts.rollout
        rollout.finished.update(group.finished)
        rollout.first_attempt.update(group.attempts)
        rollout.going_on.update(group.at_rest)
        rollout.done_before[group.name] = frozenset(group.finished)

    # -- judging ---------------------------------------------------------------------------------------------
    async def evaluate(self) -> float:
        """Mean score on the held-out tasks under the present weights."""
        parts, config = self.parts, self.parts.config
        began, step = time.monotonic(), parts.training.applied
        await self._engines_at(step)
        groups: list[str] = []
        for number, task in enumerate(self.tasks.heldout):
            name = f"eval-{step:06d}-{number:04d}"
            parts.rollout.plans[name] = GroupPlan(
                name, task, config.eval.repeats, Purpose.EVAL, config.eval.temperature
            )
            parts.driver.evaluations[name] = asyncio.Event()
            if self.past is not None and name in self.past.evaluations:
                self._take_up(self.past.evaluations[name])
            groups.append(name)
        for name in groups:
            self._queue(name, evaluation=True)
        await asyncio.gather(*(parts.driver.evaluations[name].wait() for name in groups))
        scores: dict[str, list[float]] = defaultdict(list)
        ended = [parts.rollout.finished[f"{name}.{i}"] for name in groups for i in range(config.eval.repeats)]
        for item in ended:
            if item.score is not None:
                scores[item.execution.rpartition(".")[0]].append(item.score)
        if ended and not scores:
            raise self._nothing_scored(
                f"judging {config.eval.split!r} after step {step}", f"all {len(ended)} executions"
            )
        score = statistics.fmean(statistics.fmean(values) for values in scores.values()) if scores else 0.0
        parts.bus.emit(
            Evaluated(
                config.eval.split,
                step,
                step,
                score,
                len(groups),
                len(ended),
                time.monotonic() - began,
                sum(item.end.status.value == "completed" for item in ended),
                sum(item.score is None for item in ended),
            )
        )
        for name in groups:
            parts.rollout.forget(name)
            del parts.driver.evaluations[name]
        return score

    async def _engines_at(self, version: int) -> None:
        """Wait until every rollout cell samples with `version`, so that an evaluation judges one policy."""
        while True:
            cells = [cell for cell in self.parts.runner.state.cells() if cell.state.value == "ROLLOUT"]
            if cells and all(cell.version == version for cell in cells):
                return
            await asyncio.sleep(0.02)

    # -- the end ---------------------------------------------------------------------------------------------
    def _summary(self, status: str, before: float | None, after: float | None) -> RunSummary:
        parts = self.parts
        earlier = self.past.counts if self.past else {}
        recorded = {info.execution: info.calls for info in parts.store.executions()}
        lost = sum(max(0, told - recorded.get(name, 0)) for name, told in parts.rollout.answered.items())
        counts = parts.driver.counts
        return RunSummary(
            run_dir=str(parts.directory.root),
            status=status,
            score_before=before,
            score_after=after,
            steps=parts.training.applied,
            role_switches=counts.role_switches + earlier.get("role_switches", 0),
            satellite_joins=parts.training.satellite_joins + earlier.get("satellite_joins", 0),
            sessions_rerouted=counts.sessions_rerouted + earlier.get("sessions_rerouted", 0),
            kv_moved_sessions=counts.kv_moved_sessions + earlier.get("kv_moved_sessions", 0),
            branches=parts.rollout.branches + earlier.get("branches", 0),
            partial_scores=parts.rollout.partial_scores + earlier.get("partial_scores", 0),
            lost_calls=lost,
            wall_s=time.monotonic() - self.began,
        )
