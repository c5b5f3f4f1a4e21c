"""The HTTP face of the proxy: routes, authentication, limits, streams. Embeds into any asyncio process.

Invariant: every failure leaves in the shape of the dialect that was spoken. Loopback by default. The agent's routes and
the admin's routes take different keys. No rendering, matching or recording happens here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gyre_tito.admin import admin_routes
from gyre_tito.batch import Reader
from gyre_tito.dialects import common, completions
from gyre_tito.dialects.anthropic import AnthropicMessages, anthropic_error, read_count
from gyre_tito.dialects.chat import ChatCompletions
from gyre_tito.dialects.common import ChatDialect, StreamWriter
from gyre_tito.dialects.responses import Responses
from gyre_tito.execution import Execution
from gyre_tito.messages import HistoryError
from gyre_tito.requests import ApiError, Piece, invalid
from gyre_tito.retries import HEADER, request_name
from gyre_tito.schema import StoreError
from gyre_tito.service import TitoService

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SESSION_HEADER = "x-gyre-session"
PARENT_HEADER = "x-gyre-parent"
_log = logging.getLogger("gyre_tito")
_encode = msgspec.json.Encoder().encode


class ProxyServer:
    """A running HTTP proxy in front of a `TitoService`. `port=0` takes a free port; see `base_url` after `start`."""

    def __init__(
        self,
        service: TitoService,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        admin_token: str | None = None,
        max_body_bytes: int = 32 * 1024 * 1024,
    ) -> None:
        self.service = service
        self.host = host
        self.port = port
        self._app = create_app(service, admin_token=admin_token, max_body_bytes=max_body_bytes)
        self._runner: web.AppRunner | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Where the proxy listens, without `/v1`."""
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        """Bind and serve. Error: OSError if the port is taken."""
        self._runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.service.base_url = self.base_url
        self._watch = asyncio.create_task(self.service.metrics.watch_loop())

    async def stop(self) -> None:
        """Cut what runs (it is recorded), stop serving."""
        if self._watch is not None:
            self._watch.cancel()
        await self.service.close()
        if self._runner is not None:
            await self._runner.cleanup()


def create_app(
    service: TitoService, *, admin_token: str | None = None, max_body_bytes: int = 32 * 1024 * 1024
) -> web.Application:
    """The aiohttp application. Without `admin_token` there is no admin API over HTTP."""
    app = web.Application(client_max_size=max_body_bytes)
    agent = AgentRoutes(service, max_body_bytes)
    for prefix in ("", "/x/{key}", "/s/{session}", "/x/{key}/s/{session}"):
        agent.add(app, prefix)
    app.router.add_get("/healthz", _health)
    app.router.add_get("/metrics", _metrics(service))
    app.router.add_get("/openapi.json", _openapi(service))
    if admin_token:
        app.add_routes(admin_routes(service, admin_token))
    app.router.add_route("*", "/{path:.*}", _nowhere)
    return app


class AgentRoutes:
    """Handlers of the agent-facing routes."""

    def __init__(self, service: TitoService, max_body_bytes: int) -> None:
        self._service = service
        self._max_body = max_body_bytes

    def add(self, app: web.Application, prefix: str) -> None:
        """Register all routes under a prefix."""
        app.router.add_post(f"{prefix}/v1/chat/completions", self._chat(ChatCompletions()))
        app.router.add_post(f"{prefix}/v1/responses", self._chat(Responses()))
        app.router.add_post(f"{prefix}/v1/messages", self._chat(AnthropicMessages()))
        app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._guard(self._count, anthropic_error))
        app.router.add_post(f"{prefix}/v1/completions", self._guard(self._completions, common.openai_error))
        app.router.add_get(f"{prefix}/v1/models", self._guard(self._models, common.openai_error))
        app.router.add_get(prefix + "/v1/models/{model:.+}", self._guard(self._model, common.openai_error))

    def _chat(self, dialect: ChatDialect) -> Handler:
        service = self._service

        async def handle(request: web.Request) -> web.StreamResponse:
            execution = self._execution(request)
            body = await self._body(request)
            with service.metrics.phase("read"):
                asked, stream = dialect.request(body, len(service.chat_format.tokenizer))
            session = _session(request, execution)
            name = request_name(request.headers.get(HEADER, ""), session, dialect.name, body)
            reader = await service.chat(execution, asked, session, name)
            if stream:
                return await self._stream(request, [reader], reader.stream(), dialect.stream(asked, service.model))
            answer = await reader.finish()
            with service.metrics.phase("respond"):
                return _json(dialect.response(asked, answer, service.model), [reader])

        return self._guard(handle, dialect.error, dialect.name)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        service = self._service
        execution = self._execution(request)
        body = await self._body(request)
        asked, stream = completions.read(body, len(service.chat_format.tokenizer))
        session = _session(request, execution)
        name = request_name(request.headers.get(HEADER, ""), session, "completions", body)
        readers = await service.text(execution, asked, session, name)
        try:
            if stream:
                pieces = completions.merged([reader.stream() for reader in readers], asked.sampling.n)
                return await self._stream(request, readers, pieces, completions.TextStream(asked, service.model))
            answers = [await reader.finish() for reader in readers]
        finally:
            for reader in readers:
                reader.leave()
        return _json(completions.response(asked, answers, service.model), readers)

    async def _stream(
        self,
        request: web.Request,
        readers: Sequence[Reader],
        pieces: AsyncGenerator[Piece],
        writer: StreamWriter,
    ) -> web.StreamResponse:
        """Write a stream. The first piece is awaited before the header, so that early errors keep their status."""
        async with contextlib.aclosing(pieces):
            first = await anext(pieces)
            head = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **_repeated(readers)}
            response = web.StreamResponse(headers=head)
            await response.prepare(request)
            try:
                await response.write(common.write(writer, first))
                async for piece in pieces:
                    await response.write(common.write(writer, piece))
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: the header is out, so the stream tells it
                known = as_api_error(error)
                self._service.metrics.count("errors", f"stream:{known.status}")
                await response.write(writer.error(known))
            await response.write_eof()
            return response

    def _guard(self, handler: Handler, shape: Callable[[ApiError], Mapping[str, Any]], name: str = "other") -> Handler:
        """Every failure in the dialect's shape; requests are counted."""
        metrics = self._service.metrics

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                answer = await handler(request)
            except (ConnectionError, asyncio.CancelledError):
                metrics.count("disconnects", name)
                raise
            except Exception as error:  # noqa: BLE001 - the boundary: every failure becomes the dialect's error
                refused = self._refuse(error, shape, name)
                if request.content.exception() is not None:  # nothing more can be read from this connection
                    request.content.feed_eof()
                    refused.force_close()
                return refused
            metrics.count("requests", name)
            return answer

        return handle

    def _refuse(self, error: Exception, shape: Callable[[ApiError], Mapping[str, Any]], dialect: str) -> web.Response:
        known = as_api_error(error)
        self._service.metrics.count("errors", f"{dialect}:{known.status}")
        headers = {"Retry-After": "1"} if known.kind == "overloaded" else None
        return web.Response(
            body=_encode(shape(known)), status=known.status, content_type="application/json", headers=headers
        )

    def _execution(self, request: web.Request) -> Execution:
        key = request.match_info.get("key", "")
        if not key:
            key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return self._service.authenticate(key or request.headers.get("x-api-key", ""))

    async def _body(self, request: web.Request) -> bytes:
        if request.content_length is not None and request.content_length > self._max_body:
            raise _too_large(self._max_body)
        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise _too_large(self._max_body) from error
        except web.RequestPayloadError as error:
            kind = request.headers.get("Content-Encoding", "none")
            raise invalid(
                f"the request body cannot be read: cut short, or not in its Content-Encoding ({kind})"
            ) from error

    async def _count(self, request: web.Request) -> web.Response:
        self._execution(request)
        transcript = read_count(await self._body(request))
        return _json({"input_tokens": await self._service.count_tokens(transcript)})

    async def _models(self, request: web.Request) -> web.Response:
        self._execution(request)
        card = _card(self._service.model)
        return _json(
            {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
        )

    async def _model(self, request: web.Request) -> web.Response:
        self._execution(request)
        asked = request.match_info["model"]
        if asked != self._service.model:
            raise ApiError(
                404, "not_found", f"there is no model {asked!r} here; this proxy serves {self._service.model!r}"
            )
        return _json(_card(asked))


def _card(model: str) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "type": "model",
        "display_name": model,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "gyre",
    }


def as_api_error(error: Exception) -> ApiError:
    """Any failure as an error a client can be told. What is not expected is logged, and told without its insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HistoryError):
        return ApiError(400, "invalid_request", str(error), param="messages")
    if isinstance(error, StoreError):
        return ApiError(503, "engine", str(error))
    if isinstance(error, ValueError):
        return ApiError(400, "invalid_request", f"the messages cannot be rendered for this model: {error}")
    _log.error("unexpected failure while answering a request", exc_info=error)
    return ApiError(500, "engine", f"unexpected {type(error).__name__} inside the proxy; its log has the details")


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "too_large", f"the request body is larger than {limit} bytes, the limit of this proxy")


def _session(request: web.Request, execution: Execution) -> str | None:
    """The session that a request names, if any; with the header for it, whose sub-agent it is."""
    session = request.match_info.get("session") or request.headers.get(SESSION_HEADER) or None
    parent = request.headers.get(PARENT_HEADER)
    if session and parent:
        execution.introduce(session, parent)
    return session


def _json(value: Mapping[str, Any], readers: Sequence[Reader] = ()) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json", headers=_repeated(readers))


def _repeated(readers: Sequence[Reader]) -> dict[str, str]:
    """Says so if the answer is one that was given, or is being given, to an earlier request."""
    return {"Idempotent-Replayed": "true"} if any(reader.repeated for reader in readers) else {}


async def _nowhere(request: web.Request) -> web.Response:
    """Whatever no route takes, in the shape of the dialect that its path is nearest to."""
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource is not request.match_info.route.resource:
            allowed |= (await resource.resolve(request))[1]
    if allowed:
        known = ApiError(
            405, "invalid_request", f"{request.path} takes {', '.join(sorted(allowed))}, not {request.method}"
        )
    else:
        known = ApiError(404, "not_found", f"there is no route {request.path}; GET /openapi.json lists those that are")
    shape = anthropic_error if "/v1/messages" in request.path else common.openai_error
    headers = {"Allow": ", ".join(sorted(allowed))} if allowed else None
    return web.Response(
        body=_encode(shape(known)), status=known.status, content_type="application/json", headers=headers
    )


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _openapi(service: TitoService) -> Handler:
    async def show(_: web.Request) -> web.Response:
        from gyre_tito.openapi import describe_api

        return _json(describe_api(service.model))

    return show


def _metrics(service: TitoService) -> Handler:
    async def show(_: web.Request) -> web.Response:
        if service.store.writable:
            service.metrics.gauges["store_backlog"] = service.store.writer.backlog
        return web.Response(text=service.metrics.prometheus())

    return show
