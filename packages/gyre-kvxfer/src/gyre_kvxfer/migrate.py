"""`migrate`: fetch one session into this process. Carries out `DestinationMachine`; decides nothing.

A move that does not happen is an answer, not an exception: `MoveReport.carried` is false, the source still owns the
session (or, with outcome `unknown`, cannot be asked), and the caller prefills. Exceptions are for wrong arguments.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_kvxfer import destination as m
from gyre_kvxfer import lingering
from gyre_kvxfer.channel import SocketChannel, connect
from gyre_kvxfer.copier import Copier
from gyre_kvxfer.engine import Int32, KVSink
from gyre_kvxfer.errors import KVError, LayoutRefused, MoveRefused, ProtocolError, TransportError, explain
from gyre_kvxfer.messages import Message, Offer, decode, encode
from gyre_kvxfer.source import ActionFailed, Fenced, Received, Send, Tick
from gyre_kvxfer.transports.base import Access, Reader, Transport
from gyre_kvxfer.transports.choose import choose

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class MoveReport:
    """What became of a move.

    `carried`: the session is this side's now. `outcome`: `owner`, `failed` or `unknown`. `code`, `reason`: why not.
    `tokens` carried; `bytes` read; `rounds` of copying; `seconds` in all; `pause_seconds` from the request to stop
    decoding to owning it here; `transport` taken and `transports`, why each was or was not.
    """

    session: str
    carried: bool
    outcome: str
    code: str
    reason: str
    transport: str
    version: int
    tokens: int
    bytes: int
    rounds: int
    seconds: float
    pause_seconds: float
    transports: dict[str, str]


async def migrate(
    session: str,
    source_endpoint: str,
    sink: KVSink,
    *,
    key: bytes,
    transport: str = "auto",
    destination: str = "",
    policy: m.MovePolicy | None = None,
    fenced: asyncio.Event | None = None,
    extra: Sequence[Transport] = (),
) -> MoveReport:
    """Move `session` from the `MigrationServer` at `source_endpoint` into `sink`.

    `extra` transports are tried before this package's. `destination` names this side to the source (for fencing;
    default: a fresh name). Set `fenced` when the source is dead for certain. Cancelling ends the move cleanly, except
    that the wait for a source already asked for the session goes on to its end. Blocks that a transport may still
    write to stay reserved when the move fails (`MoveReport.transports["cancel"]`), and the session cannot be moved
    here meanwhile (`busy`). Raises `KVError` for an empty key or an address that is none.
    """
    if not key:
        raise KVError(
            explain("moving a session", "an empty key", "the source's shared key", "Give both sides one key.")
        )
    await lingering.give_back(sink)
    if lingering.kept(sink, session):
        reason = "the transport of an earlier move may still write to the session's blocks here"
        return MoveReport(session, False, "failed", "busy", reason, "", 0, 0, 0, 0, 0.0, 0.0, {})
    fetch = _Fetch(session, source_endpoint, sink, key, transport, destination, policy or m.MovePolicy())
    fetch.extra = tuple(extra)
    return await fetch.run(fenced)


class _Fetch:
    """One run of a destination machine."""

    def __init__(
        self, session: str, endpoint: str, sink: KVSink, key: bytes, transport: str, name: str, policy: m.MovePolicy
    ) -> None:
        self._session, self._endpoint, self._sink, self._key = session, endpoint, sink, key
        self._transport, self._policy = transport, policy
        self.extra: tuple[Transport, ...] = ()
        self._layout = sink.layout()
        move = uuid.uuid4().hex
        self._machine = m.DestinationMachine(move, session, name or move, self._layout, policy)
        self._events: asyncio.Queue[m.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._work: set[asyncio.Task[None]] = set()
        self._channel: SocketChannel | None = None
        self._reader: Reader | None = None
        self._copier: Copier | None = None
        self._access: Access | None = None
        self._reasons: dict[str, str] = {}
        self._version = 0
        self._ended: m.Finished | None = None
        self._ended_at = 0.0

    async def run(self, fenced: asyncio.Event | None) -> MoveReport:
        began = time.monotonic()
        if fenced is not None:
            self._spawn(self._watch(fenced))
        cancelled = False
        try:
            await self._act(self._machine.handle(m.Begin(began)))
            while self._ended is None:
                try:
                    event = await self._next()
                except asyncio.CancelledError:
                    cancelled = True
                    event = ActionFailed("cancel", "cancelled", "the move was cancelled here")
                await self._act(self._machine.handle(event))
        finally:
            await self._clean_up()
        if cancelled:
            raise asyncio.CancelledError
        return self._report(began)

    async def _next(self) -> m.Event:
        try:
            async with asyncio.timeout(TICK_S):
                return await self._events.get()
        except TimeoutError:
            return Tick(time.monotonic())

    async def _clean_up(self) -> None:
        await self._stop_work()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reader is not None:
            await self._reader.close()
        if self._channel is not None:
            await self._channel.close()

    def _report(self, began: float) -> MoveReport:
        assert self._ended is not None
        now = self._ended_at
        carried = self._ended.outcome == "owner"
        return MoveReport(
            *(self._session, carried, self._ended.outcome, self._ended.code, self._ended.reason),
            transport=self._reader.name if self._reader else "",
            version=self._version,
            tokens=len(self._machine.tokens) if carried else 0,
            bytes=self._copier.nbytes if self._copier else 0,
            rounds=self._machine.rounds,
            seconds=now - began,
            pause_seconds=now - self._machine.frozen_at if self._machine.frozen_at else 0.0,
            transports=self._reasons,
        )

    # -- actions -------------------------------------------------------------------------------------------------
    async def _act(self, actions: list[m.Action]) -> None:
        for action in actions:
            match action:
                case Send(message):
                    await self._send(message)
                case m.DoReserve(n, version):
                    self._version = version
                    self._do("reserve", self._reserve(n, version))
                case m.DoCopy():
                    self._do("copy", self._copy(action))
                case m.DoEnter(version, tokens, blocks):
                    self._do("enter", self._enter(version, tokens, blocks))
                case m.DoCancel():
                    await self._stop_work()
                    await self._cancel()
                case m.Finished():
                    self._ended, self._ended_at = action, time.monotonic()

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]] | None = None) -> None:
        tasks = self._tasks if among is None else among
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _do(self, name: str, work: Coroutine[Any, Any, m.Event]) -> None:
        self._spawn(self._guard(name, work), self._work)

    async def _guard(self, name: str, work: Coroutine[Any, Any, m.Event]) -> None:
        try:
            event = await work
        except MoveRefused as err:
            event = ActionFailed(name, err.code, str(err))
        except TransportError as err:
            event = ActionFailed(name, "transport", str(err))
        except KVError as err:
            event = ActionFailed(name, "layout", str(err))
        except Exception as err:  # noqa: BLE001 - boundary: whatever the engine raises ends the move with its words
            event = ActionFailed(name, "engine", f"{type(err).__name__}: {err}")
        self._events.put_nowait(event)

    async def _stop_work(self) -> None:
        """Let reads and engine calls end before the blocks they write to are given back; a read ends early."""
        if self._reader is not None:
            self._reader.stop()
        while self._work:
            await asyncio.wait(self._work)

    async def _reserve(self, n: int, version: int) -> m.Event:
        blocks = await self._sink.reserve(self._session, n, version)
        return m.Reserved(np.asarray(blocks, np.int32), time.monotonic())

    async def _copy(self, action: m.DoCopy) -> m.Event:
        reader, copier = await self._open_reader()
        await copier.copy(reader, self._machine.move, action.start, action.stop, action.src_blocks, action.dst_blocks)
        done = time.monotonic()
        if action.final:
            copier.verify(action.digests, action.stop)
        return m.Copied(done)

    async def _open_reader(self) -> tuple[Reader, Copier]:
        if self._reader is None or self._copier is None:
            if self._access is None:
                raise TransportError(explain("copying", "no access in the first offer", "one", "Abort."))
            into = self._sink.regions()
            policy = self._policy
            self._copier = Copier(self._access, self._layout, into, policy.digest, policy.finite)
            choice = await choose(self._access, self._endpoint, self._key, into, self._transport, self.extra)
            self._reader, self._reasons = choice.reader, choice.reasons
        return self._reader, self._copier

    async def _enter(self, version: int, tokens: Int32, blocks: Int32) -> m.Event:
        await self._sink.commit(self._session, version, tokens, blocks)
        return m.Entered(time.monotonic())

    async def _cancel(self) -> None:
        if lingering.keep(self._sink, self._session, self._reader, self._copier):
            self._reasons["cancel"] = "the blocks stay reserved: the transport may still write to them"
            return
        try:
            await self._sink.cancel(self._session)
        except Exception as err:  # noqa: BLE001 - boundary: the move has ended already; say it in the report
            self._reasons["cancel"] = f"{type(err).__name__}: {err}"

    # -- messages ------------------------------------------------------------------------------------------------
    async def _send(self, message: Message) -> None:
        """Send, connecting first if need be. A message that cannot be sent is lost; the machine repeats it."""
        try:
            channel = self._channel or await self._connect()
            await channel.send(encode(message))
        except KVError as err:
            self._lost(err)

    async def _connect(self) -> SocketChannel:
        self._channel = channel = await connect(self._endpoint, self._key)
        self._spawn(self._listen(channel))
        return channel

    def _lost(self, err: KVError) -> None:
        self._channel = None
        self._events.put_nowait(ActionFailed("connect", "silent", str(err)))

    async def _listen(self, channel: SocketChannel) -> None:
        """Messages until the connection ends; then one new connection, over which requests are repeated."""
        try:
            while True:
                frame = await channel.recv()
                try:
                    self._take(decode(frame))
                except (ProtocolError, LayoutRefused) as err:  # the same would come again, so its words end the move
                    code = "layout" if isinstance(err, LayoutRefused) else "protocol"
                    self._events.put_nowait(ActionFailed("listen", code, str(err)))
        except KVError:
            await channel.close()
        try:
            await self._connect()
        except KVError as err:
            self._lost(err)

    def _take(self, message: Message) -> None:
        if isinstance(message, Offer) and message.access and self._access is None:
            self._access = Access.loads(message.access)
        self._events.put_nowait(Received(message, time.monotonic()))

    async def _watch(self, fenced: asyncio.Event) -> None:
        await fenced.wait()
        self._events.put_nowait(Fenced())
