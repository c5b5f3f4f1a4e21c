"""A cell whose engine has failed ends, so that another life can take its place; a passing fault does not end it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gyre_core import EngineLoad, InfrastructureError, Role, WeightSource
from gyre_rl.cell import host as cell_host
from gyre_rl.cell.host import CellHost
from gyre_rl.cell.messages import CellBody, Failing, LoadEvent
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
