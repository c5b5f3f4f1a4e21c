"""The parts of a run, made and wired: processes, scheduler, store, bus.

Invariant: `assembled` yields parts that work and takes all of them down again, whatever happens in between, children
first. Nothing here waits for training or decides anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gyre_core import (
    CellId,
    ComponentContext,
    EngineLoad,
    EventSink,
    GyreError,
    InfrastructureError,
    Kind,
    PluginManager,
    Role,
    WeightSource,
)
from gyre_sched import CellId as SchedCell
from gyre_sched import Role as SchedRole
from gyre_sched import events as sched
from gyre_sched.aio import RunnerClosedError, SchedulerRunner, Timeouts
from gyre_sched.commands import Command
from gyre_sched.errors import EventError
from gyre_tito import Store

from gyre_rl.agents.host import AgentsBody
from gyre_rl.agents.rests import Rests
from gyre_rl.cell.messages import Failing, LeaseDone, LoadEvent
from gyre_rl.config.schema import PluginChoice, RunConfig
from gyre_rl.procs.fleet import Child, Fleet
from gyre_rl.procs.wire import Empty, unpack
from gyre_rl.proxy.backend import CallOver, Route, RouteAsk
from gyre_rl.proxy.host import ProxyBody, ProxyReady
from gyre_rl.run.atrest import weights_at_rest
from gyre_rl.run.bus import EventBus
from gyre_rl.run.cells import Cells, plain
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.driver import RunDriver
from gyre_rl.run.helpers import Helper
from gyre_rl.run.rollout import Rollout
from gyre_rl.run.scheduling import make_scheduler, scheduler_log
from gyre_rl.run.training import Training
from gyre_rl.views.events import CellStateChanged, RunStarted

log = logging.getLogger("gyre.run")
AGENTS, PROXY = "agents", "proxy"
MARGIN_S = 30.0
"""By which the scheduler outwaits a cell that is asked for something, so that it hears what went wrong."""
RESTART_S = 10.0
"""Between two tries to start a cell again that could not be started."""


@dataclass(slots=True)
class Parts:
    """Everything a run works with, and the messages between its processes."""

    config: RunConfig
    directory: RunDirectory
    plugins: PluginManager
    bus: EventBus
    failed: asyncio.Future[None]
    """Set with an exception when the run cannot go on."""
    fleet: Fleet = field(init=False)
    cells: Cells = field(init=False)
    store: Store = field(init=False)
    rollout: Rollout = field(init=False)
    training: Training = field(init=False)
    driver: RunDriver = field(init=False)
    runner: SchedulerRunner = field(init=False)
    agents: Helper = field(init=False)
    proxy: Helper = field(init=False)
    loads: dict[CellId, EngineLoad] = field(default_factory=dict)
    sessions: dict[str, str] = field(default_factory=dict)
    """Living session -> the scheduler's name of its execution."""
    restarts: dict[str, int] = field(default_factory=dict)
    _joined: set[CellId] = field(default_factory=set)
    """Cells that the scheduler was told of, and not of their loss."""
    _states: dict[CellId, str] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _stopping: bool = False

    # -- the scheduler's ear ---------------------------------------------------------------------------------
    def post(self, event: sched.Event) -> None:
        """Tell the scheduler. What it refuses came too late (a cell or session has gone meanwhile) and is logged."""
        try:
            self.runner.post_now(event)
        except RunnerClosedError:
            log.info("too late: %s", event)
        except EventError as error:
            log.warning("refused: %s", error)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run in the background; its failure ends the run."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._spawned)

    def _spawned(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    def fail(self, error: BaseException | None) -> None:
        """The run cannot go on."""
        if not self.failed.done() and not self._stopping:
            self.failed.set_exception(error or InfrastructureError("running"))

    def watch(self, event: sched.Event, commands: Sequence[Command]) -> None:
        """Tell the views of each change of a cell's state, with the scheduler's reason."""
        reasons = {CellId(*c.cell): getattr(c, "reason", "") for c in commands if hasattr(c, "cell")}
        touched = {CellId(*event.cell)} if hasattr(event, "cell") else set()
        for cell in touched | set(reasons):
            seen = self.runner.state.cell(cell.name)
            if seen is None or CellId(*seen.id) != cell or self._states.get(cell) == seen.state.value:
                continue
            self._states[cell] = seen.state.value
            reason = str(reasons.get(cell) or getattr(event, "reason", ""))
            self.driver.reasons[cell] = reason or self.driver.reasons.get(cell, "")
            self.bus.emit(CellStateChanged(str(cell), seen.state.value, seen.core, reason))

    # -- processes -------------------------------------------------------------------------------------------
    def __post_init__(self) -> None:
        self.agents = Helper(AGENTS, self._launch_agents)
        self.proxy = Helper(PROXY, self._launch_proxy)

    async def _launch_agents(self) -> Child:
        config = self.config
        body = AgentsBody(
            config.harness.name,
            config.sandbox.name,
            plain(config.harness.options),
            plain(config.sandbox.options),
            config.seed,
            config.base_dir,
            str(self.directory.rests),
            config.rollout.rest_every_s,
            {choice.name: plain(choice.options) for choice in config.scorers},
        )
        child = await self.fleet.start(AGENTS, "gyre_rl.agents.host:make", plain(body))
        await self.fleet.ready(child, Empty)
        return child

    async def _launch_proxy(self) -> Child:
        config = self.config
        body = ProxyBody(
            store=str(self.directory.store),
            tokenizer=str(config.tokenizer_dir),
            model_name=config.name,
            max_context=config.limits.max_context_tokens,
            family=config.model.family,
            routed_experts=config.model.routed_experts,
            host=config.proxy.host,
            port=config.proxy.port,
        )
        child = await self.fleet.start(PROXY, "gyre_rl.proxy.host:make", plain(body))
        await self.fleet.ready(child, ProxyReady)
        return child

    async def start_helper(self, helper: Helper) -> None:
        """Start the agents' process or the proxy; a death that came too early to be known as its own is told now."""
        child = await helper.start(self.fleet)
        if child.gone.is_set():
            self.on_loss(child.id, "it ended as soon as it was ready")

    # -- messages of the processes ---------------------------------------------------------------------------
    async def on_message(self, cell: CellId, topic: str, body: bytes) -> Any:
        """An event or question of a child. An event that cannot be handled ends the run: nobody would tell it again."""
        try:
            return await self._heard(cell, topic, body)
        except Exception as error:
            if topic != "route":
                self.fail(error)
            raise

    async def _heard(self, cell: CellId, topic: str, body: bytes) -> Any:
        match topic:
            case "route":
                return await self._route(unpack(body, RouteAsk))
            case "call_over":
                self._call_over(unpack(body, CallOver))
            case "load":
                self._load(cell, unpack(body, LoadEvent).load)
            case "failing":
                self.bus.notice(f"{cell} gives up: {unpack(body, Failing).why}")
            case "lease_done":
                await self.training.lease_done(cell, unpack(body, LeaseDone))
            case _:
                raise InfrastructureError(f"hearing {topic!r} of {cell}", got="a topic this run does not know")
        return None

    async def _route(self, ask: RouteAsk) -> Route:
        if ask.session not in self.sessions:
            owner = self.rollout.owners.get(ask.execution)
            if owner is None:
                raise InfrastructureError(f"routing a call of {ask.session}", got="an execution that has ended")
            self.sessions[ask.session] = owner
            self.post(sched.SessionStarted(time.monotonic(), ask.session, owner))
        self.driver.contexts[ask.session] = ask.prompt_tokens
        cell = CellId(*await self.runner.route(ask.session, ask.prompt_tokens, ask.prefix))
        return Route(str(cell), self.cells.info(cell).child.reach().base_url)

    def _call_over(self, event: CallOver) -> None:
        if event.session in self.sessions:
            self.driver.contexts[event.session] = event.context_tokens
            self.post(sched.CallEnded(time.monotonic(), event.session, event.context_tokens))

    def _load(self, cell: CellId, load: EngineLoad) -> None:
        self.loads[cell] = load
        if cell not in self._joined:
            return  # the scheduler does not know it yet; a cell tells its load again and again
        self.post(
            sched.LoadReported(
                time.monotonic(),
                SchedCell(*cell),
                load.slots_running,
                load.waiting,
                load.kv_tokens_used,
                prefill_tps=load.prefill_tokens_per_s,
            )
        )

    def execution_over(self, recorded: str) -> None:
        """Its sessions are over too, and it need not go on."""
        self.rollout.rests.forget(recorded)
        prefix = f"{recorded}/"
        for session in [name for name in self.sessions if name.startswith(prefix)]:
            del self.sessions[session]
            self.driver.contexts.pop(session, None)

    # -- deaths ----------------------------------------------------------------------------------------------
    def on_loss(self, cell: CellId, reason: str) -> None:
        """A process died: tell the scheduler, and start it again."""
        if self._stopping:
            return
        info = self.cells.lost(cell)
        self.loads.pop(cell, None)
        self._joined.discard(cell)
        if info is not None:
            self.training.forget_leases(cell)
            if info.core:
                self.training.forget_sum()
            self.post(sched.CellLost(time.monotonic(), SchedCell(*cell), reason))
        elif not any(helper.lives_as(cell) for helper in (self.agents, self.proxy)):
            return  # it died while starting; whoever starts it hears of it
        self.bus.notice(f"{cell} is lost: {reason}")
        used = self.restarts[cell.name] = self.restarts.get(cell.name, 0) + 1
        if used > self.config.cells.restarts:
            self._out_of_restarts(cell, info is not None and not info.core, reason)
            return
        self.spawn(self._restart(cell.name, info.core if info else False))

    def _out_of_restarts(self, cell: CellId, expendable: bool, reason: str) -> None:
        if expendable:
            self.bus.notice(f"{cell.name} was lost {self.restarts[cell.name]} times; the run goes on without it")
            return
        self.fail(
            InfrastructureError(
                f"keeping {cell.name} alive",
                got=f"{self.restarts[cell.name]} deaths, the last one: {reason}",
                expected=f"at most {self.config.cells.restarts} (cells.restarts)",
                fix=f"See {self.directory.root}/logs/{cell.name}.log, then `gyre resume`.",
            )
        )

    async def _restart(self, name: str, core: bool) -> None:
        if name in (AGENTS, PROXY):
            await self.start_helper(self.agents if name == AGENTS else self.proxy)
            return
        while True:
            try:
                await self._restart_cell(name, core)
                return
            except GyreError as error:
                if core:
                    raise
                self.bus.notice(f"{name} could not be started again: {error}")
                self.restarts[name] += 1
                if self.restarts[name] > self.config.cells.restarts:
                    self.bus.notice(f"{name}: no try is left; the run goes on without it")
                    return
            await asyncio.sleep(RESTART_S)

    async def _restart_cell(self, name: str, core: bool) -> None:
        version = self.training.applied
        restore = None
        if core:
            version = max(self.directory.versions_saved(), default=-1)
            if version < self.training.applied:
                raise InfrastructureError(
                    "restarting the core cell",
                    got=f"a newest checkpoint of version {version}",
                    expected=f"version {self.training.applied}, the run's own",
                    fix="Set checkpoint.every = 1 to survive the core's death within a run.",
                )
            restore = str(self.directory.checkpoint(version)) if version > 0 else None
            self.cells.sources[version] = weights_at_rest(self.config, self.directory, version)
        role = Role.TRAIN if core else Role.ROLLOUT
        cell = await self.cells.start(name, role, self.cells.sources[self.training.applied], core=core, restore=restore)
        self.join(cell)

    def join(self, cell: CellId) -> None:
        """Tell the scheduler of a cell that is ready."""
        info = self.cells.info(cell)
        ready = info.ready
        twin = next((other.ready for other in self.cells.infos.values() if other.ready.slots), ready)
        self.post(
            sched.CellJoined(
                time.monotonic(),
                SchedCell(*cell),
                SchedRole(ready.role.value),
                ready.slots or twin.slots or 1,
                ready.kv_tokens or twin.kv_tokens or 1,
                info.core,
                ready.version,
            )
        )
        self._joined.add(cell)

    async def stop(self) -> None:
        """Cancel what runs in the background."""
        self._stopping = True
        await self.rollout.stop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def make_sinks(config: RunConfig, directory: RunDirectory, plugins: PluginManager) -> list[EventSink]:
    """The sinks that the configuration names."""
    context = ComponentContext(str(directory.root), "run", config.seed, base_dir=config.base_dir)
    return [_create(plugins, Kind.SINK, choice, context) for choice in config.sinks]


def _create(plugins: PluginManager, kind: Kind, choice: PluginChoice, context: ComponentContext) -> Any:
    return plugins.create(kind, choice.name, choice.options, context)


def run_started(config: RunConfig, directory: RunDirectory, step: int, resumed: bool) -> RunStarted:
    """The first event of each life of a run."""
    rollout = config.rollout
    return RunStarted(
        config.name,
        str(directory.root),
        config.steps,
        config.cells.count,
        config.seed,
        config.scheduler.policy.name,
        rollout.tasks_per_step,
        rollout.group_size,
        resumed,
        step,
    )


@asynccontextmanager
async def assembled(
    config: RunConfig,
    directory: RunDirectory,
    plugins: PluginManager,
    views: Sequence[EventSink],
    source: WeightSource,
    restore: str | None,
    *,
    resumed: bool = False,
) -> AsyncIterator[Parts]:
    """All processes up and joined, from the weights of `source` (and the checkpoint `restore`)."""
    bus = EventBus(directory.events, [*make_sinks(config, directory, plugins), *views])
    parts = Parts(config, directory, plugins, bus, asyncio.get_running_loop().create_future())
    address = config.network.address
    context = ComponentContext(str(directory.root), "run", config.seed, base_dir=config.base_dir, address=address)
    launcher = _create(plugins, Kind.LAUNCHER, config.launcher, context)
    async with AsyncExitStack() as stack:
        stack.callback(bus.close)
        bus.emit(run_started(config, directory, source.version, resumed))
        parts.fleet = Fleet(launcher, directory.root, on_message=parts.on_message, on_loss=parts.on_loss)
        await parts.fleet.open(address)
        stack.push_async_callback(parts.fleet.close)
        parts.cells = Cells(parts.fleet, config, directory.root / "contributions", directory.weights)
        parts.rollout = Rollout(
            config,
            agents=parts.agents,
            proxy=parts.proxy,
            rests=Rests(directory.rests, config.harness.name),
            post=parts.post,
            bus=bus,
            on_over=parts.execution_over,
            on_refused=parts.fail,
        )
        _, _, cells = await asyncio.gather(
            parts.start_helper(parts.proxy), parts.start_helper(parts.agents), parts.cells.start_all(source, restore)
        )
        parts.store = Store.open(directory.store)
        stack.callback(parts.store.close)
        parts.training = Training(
            config, directory, parts.cells, parts.rollout, parts.store, parts.post, bus, applied=source.version
        )
        parts.driver = RunDriver(parts.cells, parts.rollout, parts.training, bus, parts.spawn)
        scheduler = make_scheduler(config, plugins, source.version)
        parts.runner = SchedulerRunner(
            scheduler,
            parts.driver,
            scheduler_log(config, scheduler, directory),
            timeouts=Timeouts(switch_s=config.cells.switch_s, sync_s=config.cells.switch_s + MARGIN_S),
            on_commands=parts.watch,
        )
        parts.runner.start()
        stack.push_async_callback(parts.runner.close)
        stack.push_async_callback(parts.stop)
        for cell in cells:
            parts.join(cell)
        yield parts
