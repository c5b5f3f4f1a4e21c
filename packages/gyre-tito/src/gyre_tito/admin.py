"""The admin API over HTTP: open, reopen, label, close and list executions. The same as the methods of `TitoService`.

Every route needs `Authorization: Bearer <admin token>`. Errors are JSON: `{"error": {"message": ...}}`.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from gyre_tito.records import ExecutionInfo, ExecutionSpec, Prescribed, Score, Status
from gyre_tito.requests import ApiError
from gyre_tito.schema import StoreError
from gyre_tito.service import TitoService

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PrescribedBody(msgspec.Struct):
    """Sampling that holds whatever the agent asks for."""

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class OpenBody(msgspec.Struct):
    """Open an execution."""

    execution: str
    task: str = ""
    group: str = ""
    step: int = 0
    purpose: Literal["train", "eval"] = "train"
    metadata: dict[str, Any] = {}
    prescribed: PrescribedBody | None = None


class LabelBody(msgspec.Struct):
    """Name a session."""

    session: str
    kind: Literal["main", "sub_agent"] = "main"
    parent: str | None = None


class _Score(msgspec.Struct):
    value: float
    milestones: dict[str, float] = {}


class CloseBody(msgspec.Struct):
    """End an execution."""

    status: Status
    score: _Score | None = None
    cause: str = ""


def admin_routes(service: TitoService, token: str) -> list[web.RouteDef]:
    """The routes, guarded by `token`."""

    async def open_execution(request: web.Request) -> Any:
        asked = await _read(request, OpenBody)
        rule = None if asked.prescribed is None else Prescribed(asked.prescribed.temperature, asked.prescribed.top_p)
        spec = ExecutionSpec(asked.execution, asked.task, asked.group, asked.step, asked.purpose, asked.metadata, rule)
        return dataclasses.asdict(await service.open_execution(spec))

    async def reopen(request: web.Request) -> Any:
        return dataclasses.asdict(await service.reopen_execution(request.match_info["execution"]))

    async def label(request: web.Request) -> Any:
        asked = await _read(request, LabelBody)
        info = await service.open_session(request.match_info["execution"], asked.session, asked.kind, asked.parent)
        return {"session": info.session, "kind": info.kind, "parent": info.parent}

    async def close(request: web.Request) -> Any:
        asked = await _read(request, CloseBody)
        score = None if asked.score is None else Score(asked.score.value, asked.score.milestones)
        info = await service.close_execution(request.match_info["execution"], asked.status, score, asked.cause)
        return describe(info)

    async def listed(request: web.Request) -> Any:
        step = request.query.get("step")
        if step is not None and not step.lstrip("-").isdigit():
            raise ApiError(400, "invalid_request", f"step is a number, got {step!r}")
        found = service.store.executions(step=None if step is None else int(step), group=request.query.get("group"))
        return {"executions": [describe(info) for info in found]}

    async def one(request: web.Request) -> Any:
        name = request.match_info["execution"]
        sessions = [
            {"session": s.session, "kind": s.kind, "parent": s.parent, "inferred": s.inferred}
            for s in service.store.sessions(name)
        ]
        return {**describe(service.store.execution(name)), "sessions": sessions}

    root = "/admin/v1/executions"
    return [
        web.post(root, _guarded(open_execution, token)),
        web.get(root, _guarded(listed, token)),
        web.get(root + "/{execution}", _guarded(one, token)),
        web.post(root + "/{execution}/reopen", _guarded(reopen, token)),
        web.post(root + "/{execution}/sessions", _guarded(label, token)),
        web.post(root + "/{execution}/close", _guarded(close, token)),
    ]


def describe(info: ExecutionInfo) -> dict[str, Any]:
    """An execution as JSON."""
    score = None if info.score is None else {"value": info.score.value, "milestones": dict(info.score.milestones)}
    return {
        "execution": info.execution,
        "task": info.task,
        "group": info.group,
        "step": info.step,
        "purpose": info.purpose,
        "metadata": dict(info.metadata),
        "prescribed": None if info.prescribed is None else dataclasses.asdict(info.prescribed),
        "status": str(info.status),
        "score": score,
        "cause": info.cause,
        "opened_at": info.opened_at,
        "closed_at": info.closed_at,
        "calls": info.calls,
        "context_tokens": info.context_tokens,
        "sampled_tokens": info.sampled_tokens,
    }


async def _read(request: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, web.RequestPayloadError) as error:
        raise ApiError(400, "invalid_request", f"the request body: {error}") from error


def _guarded(handler: Callable[[web.Request], Awaitable[Any]], token: str) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), token.encode()):
            return _error(401, "the admin API needs 'Authorization: Bearer <admin token>'")
        try:
            return web.Response(body=msgspec.json.encode(await handler(request)), content_type="application/json")
        except ApiError as error:
            return _error(error.status, error.message)
        except StoreError as error:
            return _error(404 if "no execution" in str(error) else 503, str(error))

    return handle


def _error(status: int, message: str) -> web.Response:
    return web.Response(
        body=msgspec.json.encode({"error": {"message": message}}), status=status, content_type="application/json"
    )
