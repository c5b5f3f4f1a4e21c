"""Deaths of the proxy and the agents' process at bad moments: just after "ready", and while an execution is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gyre_core import CellId, CellLostError, ExecutionEnd, ExecutionStatus, Purpose, Score, ScorerSpec, Task
from gyre_rl.agents.host import Outcome
from gyre_rl.agents.rests import Rests
from gyre_rl.config import load
from gyre_rl.procs.child import ChildSpec
from gyre_rl.proxy.host import Closed, CloseExecution, Opened, OpenExecution, ProxyBody, ProxyHost, ProxyReady
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.parts import Parts
from gyre_rl.run.rollout import GroupPlan, Rollout
from gyre_rl.views import events as ev
from gyre_tito import ExecutionSpec, Store, TitoService

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"


class Fleet:
    """Children that are ready at once; the first `hasty` of them die before anybody can look at them."""

    def __init__(self, hasty: int) -> None:
        self.hasty = hasty
        self.lives: list[Any] = []
        self.on_loss: Callable[[CellId, str], None] = lambda cell, reason: None

    async def start(self, name: str, host: str, body: Any, **more: Any) -> Any:
        child = SimpleNamespace(id=CellId(name, len(self.lives) + 1), gone=asyncio.Event(), peer=object())
        child.reach = lambda: child.peer
        self.lives.append(child)
        return child

    async def ready(self, child: Any, kind: type) -> Any:
        if len(self.lives) <= self.hasty:
            child.gone.set()
            self.on_loss(child.id, "its connection ended")
        return ProxyReady("http://127.0.0.1:1/v1")

    async def stop(self, child: Any, grace_s: float) -> None:
        child.gone.set()


def parts_of(folder: Path, hasty: int) -> Parts:
    events: list[Any] = []
    bus: Any = SimpleNamespace(emit=events.append, notice=events.append, events=events)
    plugins: Any = None
    parts = Parts(load(QUICKSTART), RunDirectory(folder), plugins, bus, asyncio.get_running_loop().create_future())
    fleet: Any = Fleet(hasty)
    cells: Any = SimpleNamespace(lost=lambda cell: None)
    fleet.on_loss = parts.on_loss
    parts.fleet, parts.cells = fleet, cells
    return parts


async def test_a_proxy_that_dies_as_soon_as_it_is_ready_is_started_again(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, 1)
    await parts.start_helper(parts.proxy)
    async with asyncio.timeout(60):
        peer = await parts.proxy.reach()
    fleet: Any = parts.fleet
    assert [peer is child.peer for child in fleet.lives] == [False, True]
    assert parts.restarts == {"proxy": 1}
    assert not parts.failed.done()


async def test_a_proxy_that_always_dies_as_soon_as_it_is_ready_ends_the_run(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, 1000)
    await parts.start_helper(parts.proxy)
    async with asyncio.timeout(60):
        await asyncio.wait([parts.failed])
    assert "keeping proxy alive" in str(parts.failed.exception())
    fleet: Any = parts.fleet
    assert len(fleet.lives) == 1 + parts.config.cells.restarts


class Proxy:
    """One after another, lives of the proxy; the first `dying` die when they are to close an execution."""

    def __init__(self, dying: int) -> None:
        self.dying, self.closed, self.awaited = dying, [], 0

    @property
    def here(self) -> Any:
        return self

    async def reach(self) -> Any:
        return self

    async def ended(self, peer: Any) -> bool:
        self.awaited += 1
        return True

    async def call(self, path: str, message: Any, kind: Any, timeout_s: float | None = 60.0) -> Any:
        if isinstance(message, OpenExecution):
            return Opened("key", "http://127.0.0.1:1/v1")
        self.closed.append(message)
        if len(self.closed) <= self.dying:
            raise CellLostError("asking proxy for /close", got="a closed connection")
        return Closed(sampled_tokens=7)


class Agents:
    """Agents that earn 0.75."""

    @property
    def here(self) -> Any:
        return self

    async def reach(self) -> Any:
        return self

    async def ended(self, peer: Any) -> bool:
        return False

    async def call(self, path: str, message: Any, kind: Any, timeout_s: float | None = 60.0) -> Any:
        return Outcome(ExecutionEnd(ExecutionStatus.COMPLETED, "done"), Score(0.75), 1.0)


async def ended_with(folder: Path, proxy: Proxy) -> ev.ExecutionEnded:
    events: list[Any] = []
    bus: Any = SimpleNamespace(emit=events.append)
    over = asyncio.Event()
    agents: Any = Agents()
    rollout = Rollout(
        load(QUICKSTART), agents, proxy, Rests(folder, "shell"), lambda event: None, bus, lambda name: over.set()
    )
    rollout.plans["g"] = GroupPlan("g", Task("t", "do", ScorerSpec("files")), 1, Purpose.TRAIN, 1.0)
    rollout.start("g.0", "g", 0, 0)
    async with asyncio.timeout(60):
        await over.wait()
    (end,) = [event for event in events if isinstance(event, ev.ExecutionEnded)]
    return end


async def test_what_was_scored_survives_the_death_of_the_proxy_that_closes_it(tmp_path: Path) -> None:
    proxy = Proxy(dying=2)
    end = await ended_with(tmp_path, proxy)
    assert (end.status, end.score, end.sampled_tokens) == ("completed", 0.75, 7)
    assert [message.score for message in proxy.closed] == [0.75, 0.75, 0.75]
    assert proxy.awaited == 2, "each time the end of that life is awaited, so that the same is not asked again"


async def test_a_proxy_that_never_closes_it_is_our_fault(tmp_path: Path) -> None:
    end = await ended_with(tmp_path, Proxy(dying=1000))
    assert (end.status, end.score) == ("failed", None)


async def test_an_execution_that_is_closed_again_as_failed_keeps_nothing_of_the_first_verdict(tmp_path: Path) -> None:
    body = ProxyBody(str(tmp_path), "", "m")
    host = ProxyHost(ChildSpec("h", "proxy", 1, "", "t", str(tmp_path), {}), body)
    store = Store.open(tmp_path / "store", writable=True, durability="process")
    none: Any = None
    there: Any = object()
    host._store, host._server, host._service = store, there, TitoService(none, store, none, model="m")
    await store.add_execution(ExecutionSpec("g.0", "t", "g", metadata={"kept": 1}), "key")
    await host.close_execution(CloseExecution("g.0", "completed", 0.5, {"a": 1.0}, "done", {"complete": True}))
    assert store.execution("g.0").metadata == {"kept": 1, "verdict": {"complete": True}}
    await host.close_execution(CloseExecution("g.0", "failed", cause="the proxy died"))
    info = store.execution("g.0")
    assert (str(info.status), info.score, info.metadata) == ("failed", None, {"kept": 1})
    store.close()
