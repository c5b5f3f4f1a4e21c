"""Sessions between cells whose engines hand KV over themselves: what the two cells say to one another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import pytest
from gyre_core import (
    CapabilityError,
    EngineCapability,
    EngineLoad,
    ExportedKV,
    ImportedKV,
    InfrastructureError,
    Role,
    WeightSource,
)
from gyre_rl.cell.host import CellHost
from gyre_rl.cell.messages import CellBody, ExportSession, PullSession
from gyre_rl.procs.child import ChildSpec
from gyre_rl.procs.wire import serve

TOKENS = np.arange(100, dtype=np.int32)


@dataclass
class Handing:
    """An engine that holds one session's KV in blocks of 16 tokens, and remembers what it was asked."""

    capabilities: frozenset[EngineCapability] = frozenset({EngineCapability.KV_HANDOVER})
    version: int = 3
    sessions: dict[str, int] = field(default_factory=dict)
    running: bool = False
    fault: str = ""
    log: list[Any] = field(default_factory=list)

    async def start(self, source: WeightSource) -> None:
        pass

    async def close(self) -> None:
        pass

    async def load(self) -> EngineLoad:
        return EngineLoad(8, 0, 0, 1024, 0, self.version)

    async def abort(self, request_id: str) -> bool:
        self.log.append(("abort", request_id))
        return True

    async def kv_export(self, session: str, *, stop: bool = False) -> ExportedKV | None:
        self.log.append(("stop" if stop else "export", session))
        if session not in self.sessions:
            return None
        if self.fault in ("export", "stop") and stop == (self.fault == "stop"):
            raise InfrastructureError("exporting", got="a fault")
        self.sessions[session] += 20 if self.running else 0
        self.running = self.running and not stop
        if stop and self.fault == "holds nothing":
            return None
        return ExportedKV(session, self.version, TOKENS[: self.sessions[session]], b"here", self.running)

    async def kv_import(self, exported: ExportedKV) -> ImportedKV:
        n = len(exported.token_ids)  # type: ignore[arg-type]
        self.log.append(("import", exported.session, exported.version, exported.token_ids.tolist(), exported.ticket))  # type: ignore[attr-defined]
        if self.fault == "import" or (self.fault == "rest" and n == 90):
            raise InfrastructureError("importing", got="a fault")
        come = 0 if self.fault == "nothing" else n // 16 * 16
        new = come - self.sessions.get(exported.session, 0)
        self.sessions[exported.session] = come
        return ImportedKV(n, n - come, new * 10)


class Trainer:
    version = 3
    facts = None

    async def start(self, source: WeightSource, *, core: bool) -> None:
        pass

    async def prepare(self, source: WeightSource) -> None:
        pass

    async def close(self) -> None:
        pass


class Link:
    async def send(self, topic: str, message: Any) -> None:
        pass


@asynccontextmanager
async def cell(engine: Any, role: Role = Role.ROLLOUT, name: str = "cell-1") -> AsyncIterator[tuple[CellHost, str]]:
    """A cell that serves, and where others fetch its sessions."""
    body = CellBody(role, False, WeightSource(3, "nowhere"), "e", "t")
    host = CellHost(ChildSpec("m:f", name, 1, "http://x", "token", "."), body, engine, Trainer())  # type: ignore[arg-type]
    runner, port = await serve(host.app, "127.0.0.1", 0)
    async with aiohttp.ClientSession() as http:
        ready = await host.start(Link(), http, f"http://127.0.0.1:{port}")  # type: ignore[arg-type]
        try:
            yield host, ready.kv_endpoint
        finally:
            await host.close()
            await runner.cleanup()


async def test_a_session_in_a_pause_comes_in_one_go() -> None:
    source, target = Handing(sessions={"s": 70}), Handing()
    async with cell(source) as (_, endpoint), cell(target, name="cell-2") as (there, _):
        pulled = await there.pull(PullSession("s", endpoint))
    assert (pulled.carried, pulled.tokens, pulled.bytes, pulled.transport) == (True, 64, 640, "engine")
    assert 0 == pulled.pause_seconds < pulled.seconds
    assert source.log == [("export", "s")]
    assert target.log == [("import", "s", 3, list(range(70)), b"here")]


async def test_a_running_session_comes_twice_as_it_is_and_its_rest_when_it_ends() -> None:
    source, target = Handing(sessions={"s": 30}, running=True), Handing()
    async with cell(source) as (_, endpoint), cell(target, name="cell-2") as (there, _):
        pulled = await there.pull(PullSession("s", endpoint))
    assert source.log == [("export", "s"), ("export", "s"), ("stop", "s")]
    assert [len(entry[3]) for entry in target.log] == [50, 70, 90]
    assert (pulled.carried, pulled.tokens, pulled.bytes) == (True, 80, 800)
    assert 0 < pulled.pause_seconds < pulled.seconds
    assert not source.running


@pytest.mark.parametrize(("source_fault", "target_fault"), [("holds nothing", ""), ("", "rest")])
async def test_what_came_before_the_end_counts_when_the_rest_does_not_come(
    source_fault: str, target_fault: str
) -> None:
    """The call has ended and most of its KV is there: the few tokens since are computed with the next ones."""
    source = Handing(sessions={"s": 30}, running=True, fault=source_fault)
    target = Handing(fault=target_fault)
    async with cell(source) as (_, endpoint), cell(target, name="cell-2") as (there, _):
        pulled = await there.pull(PullSession("s", endpoint))
    assert (pulled.carried, pulled.tokens, pulled.bytes) == (True, 64, 640)
    assert not source.running


async def test_a_call_that_does_not_end_leaves_its_session() -> None:
    source, target = Handing(sessions={"s": 30}, running=True, fault="stop"), Handing()
    async with cell(source) as (_, endpoint), cell(target, name="cell-2") as (there, _):
        pulled = await there.pull(PullSession("s", endpoint))
    assert not pulled.carried
    assert "a fault" in pulled.why


@pytest.mark.parametrize(("where", "said"), [("export", "a fault"), ("import", "a fault"), ("nothing", "none of 70")])
async def test_a_handover_that_fails_carries_nothing_and_says_why(
    where: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = Handing(sessions={"s": 70}, fault=where), Handing(fault=where)
    async with cell(source) as (_, endpoint), cell(target, name="cell-2") as (there, _):
        pulled = await there.pull(PullSession("s", endpoint))
        unknown = await there.pull(PullSession("stranger", endpoint))
        dead = await there.pull(PullSession("s", "http://127.0.0.1:9"))
    assert not pulled.carried
    assert said in pulled.why
    assert f"moving s: its context is computed here: {pulled.why}" in caplog.messages
    assert "no KV of stranger" in unknown.why
    assert not dead.carried
    assert dead.why


async def test_a_cell_that_trains_exports_nothing_yet_says_where_it_would() -> None:
    engine = Handing(sessions={"s": 70})
    async with cell(engine, Role.TRAIN) as (host, endpoint):
        assert (await host.export(ExportSession("s"))).version == -1
        assert endpoint.startswith("http://")
    assert engine.log == []


async def test_an_engine_that_offers_no_handover_has_no_endpoint_and_refuses() -> None:
    engine = Handing(capabilities=frozenset())
    async with cell(engine) as (host, endpoint):
        assert endpoint == ""
        with pytest.raises(CapabilityError, match="KV_HANDOVER"):
            await host.export(ExportSession("s"))
        with pytest.raises(CapabilityError):
            await host.pull(PullSession("s", "http://127.0.0.1:9"))


async def test_only_holders_of_the_runs_token_may_ask() -> None:
    async with (
        cell(Handing(sessions={"s": 70})) as (_, endpoint),
        aiohttp.ClientSession() as http,
        http.post(f"{endpoint}/export", data=b"") as answer,
    ):
        assert answer.status == 401
