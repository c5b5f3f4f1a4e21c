"""The one connection each child keeps to the run: events up, questions both ways, and death noticed at once.

Invariant: while a link is open both ends live; when it closes, the run treats the child as lost and the child ends
itself. An event that arrived is a fact and is handled to its end, also after the link's. Frames are msgpack in a
WebSocket; a question has a number and gets exactly one answer or the link's end. Not here: how long handling an event
may take; what it asks of others is bounded where it is asked.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import web
from gyre_core import CellLostError

from gyre_rl.procs.wire import Fault, pack, unpack

T = TypeVar("T")
Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """`number` 0: an event; >0: a question; <0: the answer to question -number (`fault` if it failed)."""

    number: int
    topic: str
    body: msgspec.Raw = msgspec.Raw(b"")
    fault: bool = False


Handler = Callable[[str, bytes], Awaitable[Any]]
"""(topic, msgpack body) -> answer; the answer of an event is ignored."""


class Link:
    """One end of the connection. Run `pump` until it returns: then the other side is gone."""

    def __init__(self, socket: Socket, handler: Handler, name: str) -> None:
        self._socket, self._handler, self.name = socket, handler, name
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._telling: set[asyncio.Task[None]] = set()
        self._answering: set[asyncio.Task[None]] = set()

    async def send(self, topic: str, message: Any) -> None:
        """Tell an event; raises `CellLostError` if the other side is gone."""
        await self._write(Frame(0, topic, msgspec.Raw(pack(message))))

    async def ask(self, topic: str, message: Any, as_type: type[T]) -> T:
        """Ask and wait for the answer, however long it takes."""
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await self._write(Frame(number, topic, msgspec.Raw(pack(message))))
            return unpack(await future, as_type)
        finally:
            self._waiting.pop(number, None)

    async def _write(self, frame: Frame) -> None:
        try:
            await self._socket.send_bytes(pack(frame))
        except (ConnectionError, aiohttp.ClientError, RuntimeError) as error:
            raise CellLostError(f"telling {self.name} of {frame.topic}", got="a closed connection") from error

    async def pump(self) -> None:
        """Read frames until the connection ends, then fail all open questions and see the events handled."""
        try:
            async for message in self._socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._take(unpack(message.data, Frame))
        finally:
            lost = CellLostError(f"waiting for an answer of {self.name}", got="the end of its connection")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(lost)
            for task in list(self._answering):
                task.cancel()  # nobody is there to hear the answer
        if self._telling:
            await asyncio.wait(list(self._telling))

    def _take(self, frame: Frame) -> None:
        if frame.number < 0:
            future = self._waiting.get(-frame.number)
            if future and not future.done():
                if frame.fault:
                    future.set_exception(unpack(bytes(frame.body), Fault).error())
                else:
                    future.set_result(bytes(frame.body))
            return
        task = asyncio.create_task(self._answer(frame))
        kept = self._answering if frame.number else self._telling
        kept.add(task)
        task.add_done_callback(kept.discard)

    async def _answer(self, frame: Frame) -> None:
        try:
            answer, fault = pack(await self._handler(frame.topic, bytes(frame.body))), False
        except Exception as error:  # noqa: BLE001 - boundary: the asker gets the failure as it was
            answer, fault = pack(Fault.of(error)), True
        if frame.number > 0:
            try:
                await self._write(Frame(-frame.number, frame.topic, msgspec.Raw(answer), fault))
            except CellLostError:
                return

    async def close(self) -> None:
        """Close the connection; `pump` returns on both sides."""
        await self._socket.close()
