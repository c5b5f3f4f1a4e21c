"""The process of the recording proxy.

Invariant: this process is the only writer of the run's trajectory store; a call is on disk before its answer leaves.
Routes come from the run by link; tokens go straight to the cells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from gyre_core import InfrastructureError
from gyre_tito import ExecutionSpec, Limits, Prescribed, ProxyServer, Score, Status, Store, TitoService, load_format

from gyre_rl.procs.child import ChildSpec
from gyre_rl.procs.link import Link
from gyre_rl.procs.wire import Endpoint, build_app
from gyre_rl.proxy.backend import CallOver, CellBackend, Route, RouteAsk


@dataclass(frozen=True, slots=True)
class ProxyBody:
    """Configuration of the proxy's process, in `ChildSpec.body`."""

    store: str
    tokenizer: str
    model_name: str
    max_context: int | None = None
    family: str | None = None
    routed_experts: bool = False
    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True, slots=True)
class ProxyReady:
    """The proxy listens."""

    base_url: str


@dataclass(frozen=True, slots=True)
class OpenExecution:
    """Make a way in for one agent."""

    execution: str
    task: str
    group: str
    step: int
    purpose: str
    temperature: float
    top_p: float
    again: bool = False
    """It was opened in an earlier life of the run, and goes on."""
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opened:
    """The way in."""

    api_key: str
    base_url: str


@dataclass(frozen=True, slots=True)
class CloseExecution:
    """Record how an execution ended."""

    execution: str
    status: str
    score: float | None = None
    milestones: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)
    """The whole score, evidence included; kept in the execution's metadata under this name."""


@dataclass(frozen=True, slots=True)
class Closed:
    """What was recorded of an execution."""

    sampled_tokens: int = 0
    branches: int = 0
    """Paths of its tree beyond the first."""


class LinkRouter:
    """Routes by link from the run."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def route(self, ask: RouteAsk) -> Route:
        """Wait for a cell."""
        return await self._link.ask("route", ask, Route)

    async def over(self, event: CallOver) -> None:
        """Tell that a call ended."""
        await self._link.send("call_over", event)


class ProxyHost:
    """gyre-tito's proxy over the cells of the run."""

    def __init__(self, spec: ChildSpec, body: ProxyBody) -> None:
        self._spec, self._body = spec, body
        self._server: ProxyServer | None = None
        endpoints = [
            Endpoint("/open", OpenExecution, self.open),
            Endpoint("/close", CloseExecution, self.close_execution),
        ]
        self.app = build_app(spec.token, endpoints)

    async def start(self, link: Link, http: aiohttp.ClientSession, base_url: str) -> ProxyReady:
        """Open the store and listen."""
        body = self._body
        self._store = Store.open(body.store, writable=True, durability="process")
        chat = load_format(body.tokenizer, family=body.family)
        backend = CellBackend(http, self._spec.token, LinkRouter(link), experts=body.routed_experts)
        limits = Limits(context_limit=body.max_context)
        self._service = TitoService(backend, self._store, chat, model=body.model_name, limits=limits)
        self._server = ProxyServer(self._service, host=body.host, port=body.port)
        await self._server.start()
        return ProxyReady(self._server.base_url)

    def _up(self) -> TitoService:
        if self._server is None:
            raise InfrastructureError("asking the proxy", got="a proxy that has not started")
        return self._service

    async def answer(self, topic: str, body: bytes) -> Any:
        """The run asks the proxy by HTTP only."""
        raise InfrastructureError(f"answering {topic!r}", got="a question by link", expected="an HTTP request")

    async def open(self, message: OpenExecution) -> Opened:
        """Make a key for one execution."""
        if message.again:
            opened = await self._up().reopen_execution(message.execution)
            return Opened(opened.api_key, opened.base_url)
        spec = ExecutionSpec(
            message.execution,
            message.task,
            message.group,
            message.step,
            "eval" if message.purpose == "eval" else "train",
            message.metadata,
            Prescribed(message.temperature, message.top_p),
        )
        opened = await self._up().open_execution(spec)
        return Opened(opened.api_key, opened.base_url)

    async def close_execution(self, message: CloseExecution) -> Closed:
        """Refuse further calls and record the verdict."""
        score = None if message.score is None else Score(message.score, message.milestones)
        service = self._up()
        more = {"verdict": message.verdict or None}  # None takes away what an earlier closing left
        info = await service.close_execution(message.execution, Status(message.status), score, message.cause, more)
        leaves = len(self._store.load_tree(message.execution).leaves())
        return Closed(info.sampled_tokens, max(0, leaves - 1))

    async def close(self) -> None:
        """Stop listening and write what is queued."""
        if self._server is not None:
            await self._server.stop()
            self._store.close()


async def make(spec: ChildSpec) -> ProxyHost:
    """Host factory."""
    return ProxyHost(spec, msgspec.convert(spec.body, ProxyBody))
