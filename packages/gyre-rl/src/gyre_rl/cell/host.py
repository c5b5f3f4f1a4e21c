"""The process of a cell: engine, trainer and the way from one role to the other.

Invariant: a cell works in one role at a time. As ROLLOUT its engine is awake; as TRAIN the engine sleeps and the
trainer computes leases, one after the other. A cell that says it is back in a role has shown that it works there; one
that cannot get back ends, so that another life takes its place. Not here: when to switch, where sessions go, what a
gradient is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import aiohttp
import msgspec
from aiohttp import web
from gyre_core import (
    CapabilityError,
    ComponentContext,
    Contribution,
    Engine,
    EngineCapability,
    GenerateRequest,
    GyreError,
    InfrastructureError,
    Kind,
    KVHandover,
    PluginManager,
    Role,
    SamplingParams,
    StepResult,
    Trainer,
    WeightSource,
    seed_of,
)
from gyre_core.agreement import require_facts

from gyre_rl.cell.calls import answer_call
from gyre_rl.cell.handover import export_session, take_over
from gyre_rl.cell.leases import LeaseWorker
from gyre_rl.cell.messages import (
    AddContribution,
    Added,
    Applied,
    ApplyStep,
    CallBody,
    CellBody,
    CellReady,
    Drain,
    Exported,
    ExportSession,
    Failing,
    Lease,
    LeaveSession,
    LoadEvent,
    Pulled,
    PullSession,
    Recall,
    SwitchTo,
    Sync,
    Took,
)
from gyre_rl.cell.moves import Moves, installed_transports
from gyre_rl.cell.snapshots import Snapshots
from gyre_rl.procs.child import ChildSpec
from gyre_rl.procs.link import Link
from gyre_rl.procs.wire import Empty, Endpoint, Peer, authorised, build_app, unpack

log = logging.getLogger("gyre.cell")
ENGINE_GRACE_S = 10.0
"""Seconds for which an engine may not even tell its load before its cell gives up."""
SERVES_S = 60.0
"""How long an engine that did not fall asleep may take to sample a token, before its cell gives up."""


class CellHost:
    """Engine and trainer of one cell behind its HTTP interface."""

    def __init__(
        self, spec: ChildSpec, body: CellBody, engine: Engine, trainer: Trainer, moves: Moves | None = None
    ) -> None:
        self.spec, self.body, self.engine, self.trainer = spec, body, engine, trainer
        self.role: Role | None = None
        self._draining = False
        self._half_left = False
        """It began to leave its role and did not get out: engine or trainer may be in any state."""
        self._engine_up = self._trainer_up = False
        self._moves = moves or Moves(spec, body.kv)
        self._load_task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._http: aiohttp.ClientSession | None = None
        self._calls: dict[str, str] = {}
        self._snapshots = Snapshots(spec)
        self._leases = LeaseWorker(trainer, spec.cell, self._snapshots)
        self._adding = asyncio.Lock()
        self._changing = asyncio.Lock()
        """Of role or weights: one after the other in the order asked, so that an older one never lands last, also when
        whoever asked has given up waiting."""
        self._counted: dict[str, Contribution] = {}
        """Core: batch id -> the contribution of the step's sum that holds it."""
        endpoints = [
            Endpoint("/drain", Drain, self.drain),
            Endpoint("/switch", SwitchTo, self.switch),
            Endpoint("/sync", Sync, self.sync),
            Endpoint("/leave", LeaveSession, self.leave),
            Endpoint("/pull", PullSession, self.pull),
            Endpoint("/export", ExportSession, self.export),
            Endpoint("/lease", Lease, self.lease),
            Endpoint("/recall", Recall, self.recall),
            Endpoint("/add", AddContribution, self.add),
            Endpoint("/apply", ApplyStep, self.apply),
        ]
        self.app = build_app(spec.token, endpoints)
        self.app.router.add_post("/generate", self._generate)

    # -- life ------------------------------------------------------------------------------------------------
    async def start(self, link: Link, http: aiohttp.ClientSession, base_url: str) -> CellReady:
        """Load weights for the first role and tell what this cell can hold."""
        began = time.perf_counter()
        self._link, self._http = link, http
        self._leases.open(link)
        source = await self._snapshots.near(self.body.source)
        if self.body.role is Role.ROLLOUT:
            await asyncio.gather(self._enter(Role.ROLLOUT, source), self.trainer.prepare(source))
        else:
            await self._enter(self.body.role, source)
        if self.body.core:
            self._snapshots.offer(self.body.weights)
        if self.body.core and self.body.restore:
            await self.trainer.restore(self.body.restore)
        slots, kv_tokens = 0, 0
        if self._engine_up:
            load = await self.engine.load()
            slots, kv_tokens = load.slots_total, load.kv_tokens_total
        self._load_task = asyncio.create_task(self._report_load(link))
        return CellReady(
            self.body.role,
            self._version(),
            slots,
            kv_tokens,
            await self._kv_endpoint(base_url),
            time.perf_counter() - began,
        )

    async def _kv_endpoint(self, base_url: str) -> str:
        """Where others fetch this cell's sessions from, in whatever role it is now; empty if its engine gives none."""
        offered = self.engine.capabilities
        if EngineCapability.KV_MOVE in offered:
            return await self._moves.serve(self.engine)
        return base_url if EngineCapability.KV_HANDOVER in offered else ""

    def _version(self) -> int:
        return self.engine.version if self.role is Role.ROLLOUT else self.trainer.version

    async def answer(self, topic: str, body: bytes) -> Any:
        """The run asks cells by HTTP only."""
        raise InfrastructureError(f"answering {topic!r}", got="a question by link", expected="an HTTP request")

    async def close(self) -> None:
        """Give everything back."""
        if self._load_task:
            self._load_task.cancel()
        await self._leases.close()
        await self._moves.close()
        await self._snapshots.close()
        await self.engine.close()
        await self.trainer.close()

    async def _report_load(self, link: Link) -> None:
        failing_since: float | None = None
        while True:
            await asyncio.sleep(self.body.load_every_s)
            if self.role is not Role.ROLLOUT:
                failing_since = None
                continue
            try:
                load = await self.engine.load()
            except GyreError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > ENGINE_GRACE_S:
                    await self._give_up(link, f"the engine has failed: {error}")
                    return
                continue
            failing_since = None
            try:
                await link.send("load", LoadEvent(load))
            except GyreError as error:
                log.warning("load not reported: %s", error)
                return

    async def _give_up(self, link: Link, why: str) -> None:
        """End this cell, so that a new one can take its place."""
        log.error("this cell ends: %s", why)
        with contextlib.suppress(GyreError):  # asked, not told, so that the run has heard it before the connection ends
            await link.ask("failing", Failing(why), NoneType)
        await link.close()

    # -- roles -----------------------------------------------------------------------------------------------
    async def _enter(self, role: Role, source: WeightSource) -> None:
        """From no role to `role`."""
        if role is Role.ROLLOUT:
            if self._engine_up:
                await self.engine.wake(source)
            else:
                await self.engine.start(source)
                self._engine_up = True
        else:
            if not self._trainer_up:
                await self.trainer.start(source, core=self.body.core)
                try:
                    if self.trainer.facts is not None and source.kind != "delta":  # which has not all of the weights
                        require_facts(self.trainer.facts, Path(source.location), replay=self.body.replays_experts)
                except GyreError:
                    await self.trainer.offload()  # the engine that the cell goes back to needs the memory
                    raise
                self._trainer_up = True
            else:
                await self.trainer.onload()
                if not self.body.core and self.trainer.version != source.version:
                    await self.trainer.load_weights(source)
        self.role = role

    async def _leave(self) -> None:
        """From the present role to none."""
        self._half_left = self.role is not None
        if self.role is Role.ROLLOUT:
            await self.engine.sleep()
        elif self.role is Role.TRAIN:
            await self._leases.flush()
            await self.trainer.offload()
        self.role, self._half_left = None, False

    async def _go_back(self) -> None:
        """Work in a role again that was left by half; raises when that cannot be."""
        if self.role is Role.TRAIN:
            await self.trainer.onload()
        else:
            await self._sample_one()
        self._half_left = False

    async def _sample_one(self) -> None:
        """The engine's load alone would not tell whether it answers calls."""
        name = f"{self.spec.cell}-serves"
        request = GenerateRequest(name, name, [0], SamplingParams(1, temperature=0.0))
        try:
            async with asyncio.timeout(SERVES_S):
                found = [token async for chunk in self.engine.generate(request) for token in chunk.token_ids]
        except TimeoutError:
            found = []
        if not found:
            doing = f"going back to sampling on {self.spec.cell}"
            raise InfrastructureError(doing, got=f"no token in {SERVES_S:g} s", expected="an engine that is awake")

    async def switch(self, message: SwitchTo) -> Took:
        """Change the role; on failure go back to the old one and raise. A cell that could not go back and, asked to,
        cannot again, ends."""
        began = time.perf_counter()
        async with self._changing:
            astray = self.role is None or self._half_left
            try:
                await self._switch(message)
            except Exception as error:
                if astray and self._link is not None:
                    await self._give_up(self._link, f"it got into no role: {error}")
                raise
        return Took(time.perf_counter() - began)

    async def _switch(self, message: SwitchTo) -> None:
        old = self.role
        if old is message.role:
            if self._half_left:
                await self._go_back()
        else:
            source = await self._snapshots.near(message.source)
            await self._leave()
            try:
                await self._enter(message.role, source)
            except Exception as error:  # of any plugin: nothing is hidden, the cell only goes back before it tells
                if old is not None:
                    log.warning("%s does not become %s and goes back: %s", self.spec.cell, message.role, error)
                    await self._enter(old, source)
                raise
        self._draining = False

    async def drain(self, message: Drain) -> Empty:
        """Refuse new calls, or take them again."""
        self._draining = message.on
        return Empty()

    async def sync(self, message: Sync) -> Took:
        """Take another version's weights in the present role."""
        began = time.perf_counter()
        async with self._changing:
            if self.role is Role.ROLLOUT:
                await self.engine.update_weights(await self._snapshots.near(message.source))
        return Took(time.perf_counter() - began)

    # -- sampling --------------------------------------------------------------------------------------------
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        authorised(request, self.spec.token)
        if self.role is not Role.ROLLOUT or self._draining:
            return web.Response(status=409, text="this cell takes no calls now")
        call = unpack(await request.read(), CallBody)
        self._calls[call.request_id] = call.session
        try:
            return await answer_call(request, self.engine, call)
        finally:
            self._calls.pop(call.request_id, None)

    async def leave(self, message: LeaveSession) -> Empty:
        """End the session's running calls; their tokens so far are with the caller."""
        if self.role is not Role.ROLLOUT:
            return Empty()
        if EngineCapability.KV_MOVE not in self.engine.capabilities:
            running = [call for call, session in self._calls.items() if session == message.session]
            await asyncio.gather(*(self.engine.abort(call) for call in running))
        else:
            pinned = await self.engine.kv_freeze(message.session)
            if pinned is not None:
                await self.engine.kv_release(message.session, pinned.generation, forget=True)
            else:
                await self.engine.kv_unfreeze(message.session)
        return Empty()

    async def pull(self, message: PullSession) -> Pulled:
        """Fetch a session's KV from its present cell."""
        if self.role is not Role.ROLLOUT:
            return Pulled(False, why=f"{self.spec.cell} is no rollout cell")
        if EngineCapability.KV_MOVE not in self.engine.capabilities:
            source = Peer(self._started(), message.endpoint, self.spec.token, "the session's present cell")
            return await take_over(self._handover(f"moving {message.session} to {self.spec.cell}"), source, message)
        return await self._moves.pull(self.engine, message)

    async def export(self, message: ExportSession) -> Exported:
        """Let the engine hold a session's KV for another cell's."""
        if self.role is not Role.ROLLOUT:
            return Exported(message.session, -1)
        return await export_session(self._handover(f"exporting {message.session} from {self.spec.cell}"), message)

    def _handover(self, doing: str) -> KVHandover:
        engine = self.engine
        if EngineCapability.KV_HANDOVER not in engine.capabilities or not isinstance(engine, KVHandover):
            raise CapabilityError(doing, got="an engine without KV moves", expected="KV_MOVE or KV_HANDOVER")
        return engine

    def _started(self) -> aiohttp.ClientSession:
        if self._http is None:
            raise InfrastructureError(f"asking another cell from {self.spec.cell}", got="a cell that has not started")
        return self._http

    # -- training --------------------------------------------------------------------------------------------
    async def lease(self, message: Lease) -> Empty:
        """Take work; its end is told as an event."""
        if self.role is not Role.TRAIN:
            raise InfrastructureError(f"leasing to {self.spec.cell}", got=f"role {self.role}", expected="TRAIN")
        self._leases.take(message)
        return Empty()

    async def recall(self, message: Recall) -> Empty:
        """Commit what is done."""
        self._leases.recall(message.lease)
        return Empty()

    async def add(self, message: AddContribution) -> Added:
        """Core: count a contribution, unless some of its batches were counted already."""
        new = message.contribution
        async with self._adding:
            known = [self._counted[batch] for batch in new.batch_ids if batch in self._counted]
            if known:
                return Added(tuple({other.id: other for other in known}.values()))
            await self.trainer.add_contribution(new)
            self._counted.update(dict.fromkeys(new.batch_ids, new))
        return Added((new,))

    async def apply(self, message: ApplyStep) -> Applied:
        """Core: step, publish, save."""
        began = time.perf_counter()
        if self.trainer.version == message.step:
            result = await self.trainer.step(message.divisor)
            if message.checkpoint:
                await self.trainer.save(message.checkpoint)
        else:  # the core died between its checkpoint and its answer: the step is done, the weights may not be out
            result = StepResult(self.trainer.version, float("nan"), float("nan"), 0.0, "applied before a restart")
        self._counted.clear()
        source = await self.trainer.publish(message.weights)
        return Applied(result, source, time.perf_counter() - began)


async def make(spec: ChildSpec) -> CellHost:
    """Host factory: load the two plugins and make the cell."""
    body = msgspec.convert(spec.body, CellBody)
    plugins = PluginManager.installed()
    context = ComponentContext(
        run_dir=spec.run_dir,
        name=str(spec.cell),
        seed=body.seed,
        device=body.device,
        threads=body.threads,
        accelerators=body.accelerators,
        base_dir=body.base_dir,
        address=spec.address,
    )
    own = replace(context, seed=seed_of(body.seed, spec.cell))  # else cells, and lives of one, would sample the same
    engine = plugins.create(Kind.ENGINE, body.engine, body.engine_options, own)
    trainer = plugins.create(Kind.TRAINER, body.trainer, body.trainer_options, context)
    return CellHost(
        spec, body, engine, trainer, Moves(spec, body.kv, installed_transports(plugins, context, body.kv.transport))
    )
