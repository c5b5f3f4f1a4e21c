"""A cell whose engine has failed ends, so that another life can take its place; a passing fault does not end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from gyre_core import (
    EngineLoad,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InfrastructureError,
    Role,
    WeightSource,
)
from gyre_rl.cell import host as cell_host
from gyre_rl.cell.host import CellHost
from gyre_rl.cell.messages import CellBody, Failing, LoadEvent, SwitchTo, Sync
from gyre_rl.procs.child import ChildSpec

LOAD = EngineLoad(8, 0, 0, 1024, 0, 0)


class Engine:
    def __init__(self, failures: int) -> None:
        self.failures, self.asked = failures, 0

    async def load(self) -> EngineLoad:
        self.asked += 1
        if self.asked <= self.failures:
            raise InfrastructureError("running the server", got="its end")
        return LOAD


class Link:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.asked: list[Any] = []
        self.closed = False

    async def send(self, topic: str, message: Any) -> None:
        self.sent.append((topic, message))

    async def ask(self, topic: str, message: Any, as_type: type) -> None:
        assert not self.closed
        self.asked.append((topic, message))

    async def close(self) -> None:
        self.closed = True


def host_of(engine: Engine) -> CellHost:
    body = CellBody(Role.ROLLOUT, False, WeightSource(0, "nowhere"), "e", "t", load_every_s=0.005)
    host = CellHost(ChildSpec("m:f", "cell-1", 1, "http://x", "token", "."), body, engine, None)  # type: ignore[arg-type]
    host.role = Role.ROLLOUT
    return host


async def test_a_cell_with_a_dead_engine_says_why_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_host, "ENGINE_GRACE_S", 0.05)
    link = Link()
    await asyncio.wait_for(host_of(Engine(10**9))._report_load(link), 60)  # type: ignore[arg-type]
    assert link.closed
    ((topic, message),) = link.asked  # an event would be dropped when the connection ends behind it
    assert topic == "failing"
    assert isinstance(message, Failing)
    assert "its end" in message.why


async def test_a_passing_fault_ends_nothing() -> None:
    link, engine = Link(), Engine(3)
    task = asyncio.create_task(host_of(engine)._report_load(link))  # type: ignore[arg-type]
    while not link.sent:
        await asyncio.sleep(0.005)
    task.cancel()
    assert not link.closed
    assert link.sent[0] == ("load", LoadEvent(LOAD))


class Loading:
    """An engine that takes weights when it is let, and a fetch that is as long as it is told to be."""

    def __init__(self) -> None:
        self.version, self.took = 4, []
        self.fetched = {5: asyncio.Event(), 6: asyncio.Event()}

    async def near(self, source: WeightSource) -> WeightSource:
        await self.fetched[source.version].wait()
        return source

    async def update_weights(self, source: WeightSource) -> None:
        self.version = source.version
        self.took.append(source.version)


async def test_versions_are_taken_in_the_order_in_which_they_were_asked_for() -> None:
    """Also when the fetch of the older one outlasts the patience of who asked, and the newer one is there at once."""
    engine = Loading()
    host = host_of(engine)  # type: ignore[arg-type]
    host._snapshots = engine  # type: ignore[assignment]
    older, newer = (asyncio.create_task(host.sync(Sync(WeightSource(version, "x")))) for version in (5, 6))
    engine.fetched[6].set()
    await asyncio.sleep(0.05)
    assert engine.took == []
    engine.fetched[5].set()
    await asyncio.gather(older, newer)
    assert (engine.took, engine.version) == ([5, 6], 6)


class Turning(Loading):
    """An engine that sleeps and wakes, and a trainer that takes over."""

    async def sleep(self) -> None:
        self.took.append(-1)

    async def wake(self, source: WeightSource) -> None:
        self.took.append(source.version)


async def test_a_turn_that_is_undone_ends_where_it_began() -> None:
    """Whoever asked for it gave up while the weights were fetched, and asks for the way back."""
    engine = Turning()
    host = host_of(engine)  # type: ignore[arg-type]
    host._snapshots, host._engine_up, host._trainer_up = engine, True, True  # type: ignore[assignment]

    async def nothing(*_: Any) -> None:
        return None

    trainer: Any = type("Trainer", (), {"version": 5, "onload": nothing, "offload": nothing})()
    host.trainer = trainer
    host._leases.flush = nothing  # type: ignore[method-assign]
    there = asyncio.create_task(host.switch(SwitchTo(Role.TRAIN, WeightSource(5, "x"))))
    await asyncio.sleep(0.05)
    back = asyncio.create_task(host.switch(SwitchTo(Role.ROLLOUT, WeightSource(6, "x"))))
    engine.fetched[6].set()
    await asyncio.sleep(0.05)
    assert not back.done(), "it has nothing to undo yet"
    engine.fetched[5].set()
    await asyncio.gather(there, back)
    assert (host.role, engine.took) == (Role.ROLLOUT, [-1, 6])


class Unsure(Turning):
    """`fails`: what raises of its and its trainer's methods; `mute`: it takes calls and answers none."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: set[str] = set()
        self.mute = False
        for event in self.fetched.values():
            event.set()

    def _may_fail(self, what: str) -> None:
        self.took.append(what)
        if what in self.fails:
            raise InfrastructureError(f"asking for {what}", got="an error")

    async def sleep(self) -> None:
        self._may_fail("sleep")

    async def wake(self, source: WeightSource) -> None:
        self._may_fail("wake")

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self._may_fail("generate")
        if self.mute:
            await asyncio.Event().wait()
        yield GenerateChunk((3,), (-1.0,), (0,))
        yield GenerateChunk(finish=FinishReason.LENGTH)

    async def onload(self) -> None:
        self._may_fail("onload")

    async def offload(self) -> None:
        self._may_fail("offload")


def unsure(role: Role) -> tuple[CellHost, Unsure, Link]:
    engine, link = Unsure(), Link()
    host: Any = host_of(engine)  # type: ignore[arg-type]
    host._snapshots, host.trainer, host.role, host._link = engine, engine, role, link
    host._engine_up = host._trainer_up = host._draining = True

    async def nothing() -> None:
        return None

    host._leases.flush = nothing
    return host, engine, link


def to(role: Role) -> SwitchTo:
    return SwitchTo(role, WeightSource(5, "x"))


@pytest.mark.parametrize(
    ("old", "fails", "proof"), [(Role.ROLLOUT, "sleep", "generate"), (Role.TRAIN, "offload", "onload")]
)
async def test_a_role_that_was_left_by_half_is_worked_in_again_or_the_cell_ends(
    old: Role, fails: str, proof: str
) -> None:
    """The way back is gone, not only said to have been."""
    host, engine, link = unsure(old)
    other = Role.TRAIN if old is Role.ROLLOUT else Role.ROLLOUT
    for broken in (False, True):
        engine.fails, engine.took = {fails, proof} if broken else {fails}, []
        with pytest.raises(InfrastructureError, match=fails):
            await host.switch(to(other))
        host._draining = True
        assert (host.role, link.closed) == (old, False)
        if broken:
            with pytest.raises(InfrastructureError, match=proof):
                await host.switch(to(old))
        else:
            await host.switch(to(old))
            await host.switch(to(old))
        assert engine.took == [fails, proof]
        assert host._draining == broken
    assert link.closed
    ((topic, message),) = link.asked
    assert topic == "failing"
    assert proof in message.why


async def test_an_engine_that_takes_calls_and_answers_none_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_host, "SERVES_S", 0.05)
    host, engine, link = unsure(Role.ROLLOUT)
    engine.fails, engine.mute = {"sleep"}, True
    with pytest.raises(InfrastructureError, match="sleep"):
        await host.switch(to(Role.TRAIN))
    with pytest.raises(InfrastructureError, match="no token"):
        await asyncio.wait_for(host.switch(to(Role.ROLLOUT)), 60)
    assert link.closed


async def test_a_cell_in_no_role_that_gets_into_none_ends() -> None:
    """Neither the new role nor the old: whoever asked asks for the old one again, once."""
    host, engine, link = unsure(Role.ROLLOUT)
    engine.fails = {"onload", "wake"}
    with pytest.raises(InfrastructureError, match="wake"):
        await host.switch(to(Role.TRAIN))
    assert (host.role, link.closed) == (None, False)
    with pytest.raises(InfrastructureError, match="wake"):
        await host.switch(to(Role.ROLLOUT))
    assert link.closed


async def test_a_fall_back_that_worked_ends_nothing() -> None:
    host, engine, link = unsure(Role.ROLLOUT)
    engine.fails = {"onload"}
    for _ in range(2):
        with pytest.raises(InfrastructureError, match="onload"):
            await host.switch(to(Role.TRAIN))
        await host.switch(to(Role.ROLLOUT))
    assert (host.role, link.closed) == (Role.ROLLOUT, False)
    assert engine.took == ["sleep", "onload", "wake"] * 2
