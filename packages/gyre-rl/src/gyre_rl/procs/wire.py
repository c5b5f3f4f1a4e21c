"""Typed messages over HTTP: what the run's processes say to one another.

Invariant: bodies are msgpack of the frozen dataclass an endpoint declares, checked on arrival; a failure crosses
as the same `GyreError` it was. Every request bears the run's token. Not here: what the messages mean, and bulk
data (weights, gradients and KV never pass through here).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import gyre_core
import msgspec
from aiohttp import web
from gyre_core import CellLostError, GyreError, InfrastructureError

from gyre_rl.procs.sockets import listening

T = TypeVar("T")
MAX_BODY = 1 << 30
"""Bytes of the largest request: a micro-batch of a million-token tree is about 40 MB."""


def pack(message: Any) -> bytes:
    """Encode a dataclass, NamedTuple or plain value. What UTF-8 cannot say of a text (half a surrogate pair, say in an
    error that an agent's work caused) is spelled out: no text may keep an outcome from arriving.
    """
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(_spelled(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _spelled(value: Any) -> Any:
    """Plain data with every text in it as UTF-8 can say it."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_spelled(key): _spelled(each) for key, each in value.items()}
        case list() | tuple():
            return [_spelled(each) for each in value]
    return value


def unpack(data: bytes, as_type: type[T]) -> T:
    """Decode and validate; raises `InfrastructureError` naming what came."""
    try:
        decoded: T = msgspec.msgpack.decode(data, type=as_type)
    except msgspec.DecodeError as error:
        raise InfrastructureError(
            "reading a message between processes",
            got=str(error),
            expected=getattr(as_type, "__name__", str(as_type)),
            fix="The processes of a run must be of one Gyre version.",
        ) from error
    return decoded


@dataclass(frozen=True, slots=True)
class Fault:
    """An error on its way to another process."""

    kind: str
    doing: str
    got: str = ""
    expected: str = ""
    fix: str = ""

    @classmethod
    def of(cls, error: Exception) -> Fault:
        """Keep the four parts of a GyreError; other errors are named by type and text."""
        if isinstance(error, GyreError):
            return cls(type(error).__name__, error.doing, error.got, error.expected, error.fix)
        return cls("InfrastructureError", "answering a request", got=f"{type(error).__name__}: {error}")

    def error(self) -> GyreError:
        """The same error on this side."""
        found = getattr(gyre_core, self.kind, InfrastructureError)
        kind = found if isinstance(found, type) and issubclass(found, GyreError) else InfrastructureError
        return kind(self.doing, got=self.got, expected=self.expected, fix=self.fix)


@dataclass(frozen=True, slots=True)
class Empty:
    """No content."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One operation: a path, the type of its request, and the coroutine that answers with a dataclass."""

    path: str
    request: Any
    handler: Callable[[Any], Awaitable[Any]]


def authorised(request: web.Request, token: str) -> None:
    """Refuse a request without the run's token."""
    if request.headers.get("authorization") != f"Bearer {token}":
        raise web.HTTPUnauthorized(text="this port belongs to a Gyre run; the request lacks its token")


def build_app(token: str, endpoints: Sequence[Endpoint]) -> web.Application:
    """An aiohttp application that serves the endpoints."""
    app = web.Application(client_max_size=MAX_BODY)
    for endpoint in endpoints:
        app.router.add_post(endpoint.path, _handler(token, endpoint))
    return app


def _handler(token: str, endpoint: Endpoint) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        authorised(request, token)
        try:
            message = unpack(await request.read(), endpoint.request)
            answer = await endpoint.handler(message)
            body = pack(answer if answer is not None else Empty())
        except Exception as error:  # noqa: BLE001 - boundary: every failure crosses to the caller as what it was
            return web.Response(status=500, body=pack(Fault.of(error)))
        return web.Response(body=body)

    return handle


async def serve(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, int]:
    """Start serving; returns the runner (call `cleanup`) and the port. A taken port is a clear error."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening(host, port)).start()
    except OSError as error:
        await runner.cleanup()
        raise InfrastructureError(
            f"listening on {host}:{port}",
            got=error.strerror or str(error),
            expected="a free port",
            fix="Choose another port, or 0 for any free one; `ss -ltnp` shows who has it.",
        ) from error
    return runner, runner.addresses[0][1]


class Peer:
    """Calls the endpoints of one process."""

    def __init__(self, http: aiohttp.ClientSession, base_url: str, token: str, name: str) -> None:
        self._http, self._base, self.name = http, base_url, name
        self.headers = {"authorization": f"Bearer {token}"}

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return self._base

    async def call(self, path: str, message: Any, as_type: type[T], *, timeout_s: float | None = 60.0) -> T:
        """Ask and wait; a dead peer is `CellLostError`, a failure of the other side is raised as it was there."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.post(
                self._base + path, data=pack(message), headers=self.headers, timeout=timeout
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            raise CellLostError(f"asking {self.name} for {path}", got=f"{type(error).__name__}: {error}") from error
        except TimeoutError as error:
            raise InfrastructureError(
                f"asking {self.name} for {path}", got=f"no answer in {timeout_s} s", expected="an answer"
            ) from error
        if response.status == 200:
            return unpack(body, as_type)
        if response.status == 500:
            raise unpack(body, Fault).error()
        raise InfrastructureError(f"asking {self.name} for {path}", got=f"HTTP {response.status}: {body[:200]!r}")
