"""A running server by HTTP: control requests and call streams.

Invariant: whatever goes wrong is one InfrastructureError that names the server, what was asked and, when the server's
process has ended, its exit status and last words. Not here: what the answers mean.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
from gyre_core import InfrastructureError

from gyre_sglang.process import ServerProcess

DEATH_PATIENCE_S = 1.0
"""How long a broken connection waits for the news that the process has ended."""


class Client:
    """Requests to one server. `process` is None for a server that somebody else started."""

    def __init__(self, url: str, name: str, api_key: str = "", process: ServerProcess | None = None) -> None:
        self.url, self.name, self.process = url.rstrip("/"), name, process
        self.last_heard = 0.0
        """Time (of the event loop) of the last byte that came from it."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # Kept connections are used again within a second only: the server closes them after five, perhaps just as we
        # write the next request.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=1.0)
        self._session = aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._session.close()

    async def get(self, path: str, timeout_s: float) -> Any:
        """GET; the JSON answer."""
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """POST; the JSON answer, None for an empty one."""
        return await self._ask("POST", path, body, timeout_s)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        doing = f"asking SGLang of {self.name} for {method} {path}"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._session.request(method, self.url + path, json=body) as response:
                    text = await response.text()
                    self.last_heard = asyncio.get_running_loop().time()
        except TimeoutError as error:
            raise InfrastructureError(
                doing, got=f"no answer in {timeout_s:g} s", expected="an answer", fix=self._hint()
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise await self.broken(doing, error) from error
        answer = _json(text)
        if response.status != 200:
            raise InfrastructureError(
                doing, got=f"HTTP {response.status}: {_message(answer, text)}", expected="200", fix=self._hint()
            )
        return answer

    async def alive(self) -> bool:
        """Whether /health says 200."""
        try:
            async with asyncio.timeout(5.0), self._session.get(self.url + "/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False

    async def stream(self, path: str, body: Mapping[str, Any], doing: str) -> AsyncGenerator[bytes, None]:
        """POST; the lines of the answer as they come, without the empty ones."""
        loop = asyncio.get_running_loop()
        try:
            async with self._session.post(self.url + path, json=body) as response:
                if response.status != 200:
                    text = await response.text()
                    raise InfrastructureError(
                        doing, got=f"HTTP {response.status}: {_message(_json(text), text)}", expected="200"
                    )
                rest = b""
                async for data in response.content.iter_any():
                    self.last_heard = loop.time()
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line:
                            yield line
                if rest:
                    yield rest
        except (aiohttp.ClientError, ConnectionError) as error:
            raise await self.broken(doing, error) from error

    async def broken(self, doing: str, error: Exception) -> InfrastructureError:
        """The error of a connection that broke: the server's death when it has died."""
        if self.process is not None:
            await asyncio.wait([self.process.exited], timeout=DEATH_PATIENCE_S)
            if self.process.exited.done():
                return dead(self.name, self.process, doing)
        return InfrastructureError(
            doing, got=f"{type(error).__name__}: {error}", expected="an answer from SGLang", fix=self._hint()
        )

    def _hint(self) -> str:
        return f"Its output is in {self.process.log}." if self.process else f"Look at the server at {self.url}."


def dead(name: str, process: ServerProcess, doing: str) -> InfrastructureError:
    """The error of a server whose process has ended."""
    status = process.exited.result()
    how = f"signal {status - 128}" if status > 128 else f"status {status}"
    return InfrastructureError(
        doing, got=f"a server that ended with {how}; its last lines:\n{process.tail()}\n",
        expected=f"SGLang of {name} to live", fix=f"Its whole output is in {process.log}.",
    )  # fmt: skip


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return text


def _message(answer: Any, text: str) -> str:
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:600]
    return text[:600]
