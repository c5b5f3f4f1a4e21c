"""A vLLM server's HTTP interface, call by call.

Invariant: every failure is an InfrastructureError that names the server, the path and what came; nothing is retried
here. Not here: policy versions, sessions, when to ask what.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from gyre_core import InfrastructureError

from gyre_vllm.metrics import ServerLoad, read_metrics
from gyre_vllm.wire import GENERATE, ID_PREFIX

RPC = "/collective_rpc"
RESTING = ("/pause", "/resume", "/abort_requests", "/update_weight_version")
"""Paths of the RL interface this plugin cannot do without; they need VLLM_SERVER_DEV_MODE=1."""
_BAD_REQUEST = (400, 413, 422)
"""What the server says of a request; 404 is of another model, so from another server."""


class ServerClient:
    """Requests to one server. Close it when done."""

    def __init__(self, url: str, control_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._timeout = control_timeout_s
        # No keep-alive: a server may close a kept connection (after a 500, or by its own clock) as we write to it.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            read_bufsize=1 << 18,
        )

    async def close(self) -> None:
        """Cut all connections."""
        await self._http.close()

    # -- asking ------------------------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float | None = None,
        query: dict[str, str] | None = None,
        body: Any = None,
    ) -> bytes:
        """The answer's body; InfrastructureError on any status but 200."""
        doing = f"asking {self.url}{path}"
        limit = self._timeout if timeout_s is None else timeout_s
        if self._http.closed:
            raise InfrastructureError(doing, got="connections that were closed before", expected="an engine in use")
        data = None if body is None else msgspec.json.encode(body)
        headers = {"content-type": "application/json"} if data else None
        try:
            async with (
                asyncio.timeout(limit),
                self._http.request(method, self.url + path, params=query, data=data, headers=headers) as answer,
            ):
                content = await answer.read()
                if answer.status != 200:
                    raise InfrastructureError(doing, got=f"HTTP {answer.status}: {said(content)}", expected="HTTP 200")
                return content
        except TimeoutError as error:
            raise InfrastructureError(doing, got=f"no answer in {limit} s", expected="a live server") from error
        except (aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(doing, got=f"{type(error).__name__}: {error}", expected="an answer") from error

    async def alive(self) -> bool:
        """Whether `/health` answers 200 soon."""
        try:
            await self.ask("GET", "/health", timeout_s=min(10.0, self._timeout))
        except InfrastructureError:
            return False
        return True

    async def version(self) -> str:
        """vLLM's version."""
        return str(_object(await self.ask("GET", "/version")).get("version", ""))

    async def paths(self) -> frozenset[str]:
        """What the server offers."""
        return frozenset(_object(await self.ask("GET", "/openapi.json")).get("paths", {}))

    async def model(self) -> tuple[str, int]:
        """Name and longest context of the model it serves."""
        told = _object(await self.ask("GET", "/v1/models"))
        try:
            first = told["data"][0]
            return str(first["id"]), int(first.get("max_model_len") or 0)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InfrastructureError(
                f"asking {self.url} for its model", got=f"{str(told)[:200]}", expected="a list of one"
            ) from error

    async def configuration(self) -> dict[str, Any]:
        """vLLM's own configuration; takes seconds the first time."""
        found = _object(await self.ask("GET", "/server_info", query={"config_format": "json"}))
        return dict(found.get("vllm_config", {}))

    async def load(self) -> ServerLoad:
        """Its load and totals."""
        return read_metrics((await self.ask("GET", "/metrics")).decode(errors="replace"))

    # -- steering ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Stop the scheduler: "keep" the running calls or "abort" them."""
        await self.ask("POST", "/pause", query={"mode": mode, "clear_cache": "false"})

    async def resume(self) -> None:
        """Let the scheduler go on."""
        await self.ask("POST", "/resume")

    async def abort(self, server_ids: list[str]) -> None:
        """End calls by the ids they were sent with."""
        await self.ask("POST", "/abort_requests", body={"request_ids": [ID_PREFIX + name for name in server_ids]})

    async def forget_prefixes(self) -> None:
        """Drop the prefix cache. The server refuses while calls hold blocks, which is no error: what must not be found
        is under a salt that nobody asks for."""
        await self.ask("POST", "/reset_prefix_cache")

    async def set_version(self, version: int) -> None:
        """The weight version the server writes into its answers."""
        await self.ask("POST", "/update_weight_version", body={"new_version": str(version)})

    async def rpc(self, method: str, *, timeout_s: float | None = None, **arguments: Any) -> list[Any]:
        """Call a method on every worker; their answers."""
        # No timeout in it: vLLM's workers answer in order, and an answer that its executor does not wait for is taken
        # for that of the next order.
        body = {"method": method, "kwargs": arguments}
        content = await self.ask("POST", RPC, timeout_s=timeout_s, body=body)
        told = list(_object(content).get("results", [])) if content else []
        failed = [str(answer["error"]) for answer in told if isinstance(answer, dict) and answer.get("error")]
        if failed:
            raise InfrastructureError(f"asking {self.url}{RPC} for {method}", got=failed[0], expected="an answer")
        return told

    # -- calls -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def stream(self, body: bytes, server_id: str, doing: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """A call's answer, to be read as it comes. ValueError when the server refuses the request (HTTP 4xx)."""
        headers = {"content-type": "application/json", "x-request-id": server_id}
        async with self._http.post(self.url + GENERATE, data=body, headers=headers) as answer:
            if answer.status in _BAD_REQUEST:
                raise ValueError(
                    f"{doing}: {self.url} refused it with HTTP {answer.status}: {said(await answer.read())}"
                )
            if answer.status != 200:
                raise InfrastructureError(
                    f"{doing} on {self.url}", got=f"HTTP {answer.status}: {said(await answer.read())}"
                )
            yield answer


def said(content: bytes) -> str:
    """The message inside an error answer."""
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content.decode(errors="replace")[:300]
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail") or str(found)
    return str(found)[:300]


def _object(content: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise InfrastructureError("reading a server's answer", got=repr(content[:100]), expected="JSON") from error
    if not isinstance(found, dict):
        raise InfrastructureError("reading a server's answer", got=repr(found)[:100], expected="an object")
    return found
