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
import msgspec
from gyre_core import InfrastructureError

from gyre_sglang.process import ServerProcess

DEATH_PATIENCE_S = 1.0
"""How long a broken connection waits for the news that the process has ended."""
KEPT_S = 3.0
"""How long a connection is kept for the next request. The server closes it after 5 s, perhaps just as we write."""
READ_BYTES = 1 << 20
"""What may wait to be read, before the server has to wait: more than comes between two readings."""


class Pace:
    """When a stream is read on: after `seconds`, at once when it ends or when somebody needs all that has come.

    A server writes each token by itself. Reading many at a time costs a fraction of waking up for each.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._resting: asyncio.Future[None] | None = None
        self._over = False
        self._has_all = asyncio.Event()
        """Not set while somebody waits for what has come."""
        self._has_all.set()

    async def rest(self) -> None:
        """Called by the reader when it has handled what it read."""
        if self._seconds and not self._over and self._has_all.is_set():
            loop = asyncio.get_running_loop()
            self._resting = loop.create_future()
            timer = loop.call_later(self._seconds, self.wake)
            try:
                await self._resting
            finally:
                timer.cancel()
                self._resting = None

    def wake(self) -> None:
        """End the rest."""
        if self._resting is not None and not self._resting.done():
            self._resting.set_result(None)

    def end(self) -> None:
        """The stream has ended: no more rests."""
        self._over = True
        self.wake()

    def has_all(self) -> None:
        """Called by the reader when nothing unread is left."""
        self._has_all.set()

    async def catch_up(self) -> None:
        """Return when all that has arrived by now is read."""
        if self._resting is not None:  # else the reader waits for the next byte
            self._has_all.clear()
            self.wake()
            await self._has_all.wait()


class Client:
    """Requests to one server. `process` is None for a server that somebody else started."""

    def __init__(self, url: str, name: str, api_key: str = "", process: ServerProcess | None = None) -> None:
        self.url, self.name, self.process = url.rstrip("/"), name, process
        self.paused = False
        """The server was told to sample nothing, and has not said that it goes on."""
        self.last_heard = 0.0
        """Time (of the event loop) of the last byte that came from it."""
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S)
        self._session = aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=READ_BYTES
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

    async def stream(
        self, path: str, body: Mapping[str, Any], doing: str, pace: Pace | None = None
    ) -> AsyncGenerator[bytes, None]:
        """POST; the answer as it comes, in blocks of whole lines, read at `pace`."""
        loop, pace = asyncio.get_running_loop(), pace or Pace(0.0)
        try:
            data, kind = msgspec.json.encode(body), {"content-type": "application/json"}
            async with self._session.post(self.url + path, data=data, headers=kind) as response:
                if response.status != 200:
                    text = await response.text()
                    raise InfrastructureError(
                        doing, got=f"HTTP {response.status}: {_message(_json(text), text)}", expected="200"
                    )
                content, rest = response.content, b""
                content.on_eof(pace.end)
                data = await content.readany()
                while data:
                    self.last_heard = loop.time()
                    block, mark, rest = (rest + data).rpartition(b"\n")
                    if mark:
                        yield block
                    await pace.rest()
                    data = content.read_nowait()
                    if not data and not content.at_eof():
                        pace.has_all()
                        data = await content.readany()
                if rest:
                    yield rest
        except (aiohttp.ClientError, ConnectionError) as error:
            raise await self.broken(doing, error) from error
        finally:
            pace.has_all()

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


class DeadServerError(InfrastructureError):
    """The server's process has ended."""


def dead(name: str, process: ServerProcess, doing: str) -> DeadServerError:
    """The error of a server whose process has ended."""
    status = process.exited.result()
    number = -status if status < 0 else status - 128
    how = f"signal {number}" if number > 0 else f"status {status}"
    return DeadServerError(
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
