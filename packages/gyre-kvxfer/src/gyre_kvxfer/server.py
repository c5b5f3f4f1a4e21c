"""`MigrationServer`: what a cell runs so that others can fetch its sessions.

One listening endpoint for control and data connections. Each move is a `SourceMachine`; this file only carries its
actions out and brings it messages, engine answers and the time.

Invariant: one live move a session; engine calls of one move never overlap; a finished move is remembered (`REMEMBER`
of them) so that a repeated message gets the answer it got before. A peer that has fallen silent or does not read keeps
neither a connection nor a session for good, and after `close` nothing reads the pool any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_kvxfer import source as m
from gyre_kvxfer.channel import DATA, Channel, SocketChannel, accept, listen
from gyre_kvxfer.copier import kept_digests, source_digests
from gyre_kvxfer.digest import U64
from gyre_kvxfer.engine import KVSource, Pinned, Region
from gyre_kvxfer.errors import KVError, MoveRefused, TransportError, explain
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.messages import Commit, Message, Offer, Open, Refused, decode, encode
from gyre_kvxfer.naming import TokenDigest
from gyre_kvxfer.transports import nixl
from gyre_kvxfer.transports.base import Access, Exporter, Transport
from gyre_kvxfer.transports.bulk import BulkServer, shm_meta
from gyre_kvxfer.transports.choose import has_rdma
from gyre_kvxfer.transports.process_vm import ProcessVmExporter

REMEMBER = 4096
TICK_S = 0.25
MAX_CONNECTIONS = 1024
IDLE_S = 120.0
"""A control connection over which nothing came for so long is closed: its peer hangs, or is gone without a word. Who
lives renews, repeats its requests, and connects again."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ServedMove:
    """A move at the source: its machine and what carrying it out needs."""

    machine: m.SourceMachine
    session: str
    destination: str
    digest: str
    reply_to: Channel
    task: asyncio.Task[None] | None = None
    tokens: TokenDigest | None = None
    sums: asyncio.Task[U64] | None = None
    summed_after: U64 | None = None
    """Digests that the engine had kept when summing the rest began: a later pin may come without them."""


class MigrationServer:
    """Serves an engine's sessions to destinations that hold the key.

    `listen`: `tcp://host:port` (port 0: any) or `unix:///path`; `advertise` replaces the host others should use.
    `transports`: names to offer, or None for those that fit this machine; `extra`: more, from outside this package.
    `lease_s`: how long a silent destination keeps pins (and a frozen session) here.
    """

    def __init__(
        self,
        source: KVSource,
        *,
        key: bytes,
        listen: str = "tcp://127.0.0.1:0",
        advertise: str = "",
        transports: tuple[str, ...] | None = None,
        extra: tuple[Transport, ...] = (),
        lease_s: float = 10.0,
    ) -> None:
        if not key:
            raise KVError(
                explain("making a migration server", "an empty key", "a shared secret", "Give both sides one.")
            )
        self._source, self._key, self._listen, self._advertise = source, key, listen, advertise
        self._wanted, self._lease_s, self._extra = transports, lease_s, extra
        self._moves: OrderedDict[str, ServedMove] = OrderedDict()
        self._by_session: dict[str, str] = {}
        self._exports: dict[str, Exporter] = {}
        self._regions: tuple[Region, ...] = ()
        self._socket: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[SocketChannel] = set()
        self._serving: set[threading.Thread] = set()
        self.endpoint = ""

    # -- life ----------------------------------------------------------------------------------------------------
    async def start(self) -> MigrationServer:
        """Listen; `endpoint` is set afterwards."""
        self._socket, real = listen(self._listen)
        self.endpoint = f"tcp://{self._advertise}:{real.rpartition(':')[2]}" if self._advertise else real
        self._spawn(self._accept())
        self._spawn(self._ticks())
        return self

    async def close(self) -> None:
        """Stop listening, end all moves (their sessions stay here, unless given), let go of transports."""
        for move in list(self._moves.values()):
            if move.machine.owns:
                await self._run(move, move.machine.handle(m.ActionFailed("pin", "closed", "the source shuts down")))
        engine = [x.task for x in self._moves.values() if x.task is not None and not x.task.done()]
        sums = [x.sums for x in self._moves.values() if x.sums is not None and not x.sums.done()]
        if engine:
            await asyncio.wait(engine, timeout=self._lease_s)
        if sums:
            await asyncio.wait(sums)  # they read the pool, which its owner may free after this
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hang_up()
        if self._socket is not None:
            self._socket.close()
        for export in self._exports.values():
            export.close()
        self._exports.clear()
        if self._listen.startswith("unix://"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._listen.removeprefix("unix://"))

    async def _hang_up(self) -> None:
        """Close all connections. Those of data are closed by their threads, when they have let go of the pool."""
        for channel in list(self._open):
            channel.hang_up()
        for thread in list(self._serving):
            await asyncio.to_thread(thread.join)
        for channel in list(self._open):
            await channel.close()

    async def __aenter__(self) -> MigrationServer:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # -- for the owner -------------------------------------------------------------------------------------------
    def moves(self) -> dict[str, tuple[str, str]]:
        """Session and state of every remembered move, by move name."""
        return {name: (x.session, x.machine.state) for name, x in self._moves.items()}

    async def fence(self, destination: str) -> list[str]:
        """This destination is dead for certain: take its sessions back. Returns those that came back after being
        given.
        """
        back = []
        for move in [x for x in self._moves.values() if x.destination == destination]:
            given = move.machine.state == "given"
            await self._run(move, move.machine.handle(m.Fenced()))
            back += [move.session] if given else []
        return back

    # -- connections ---------------------------------------------------------------------------------------------
    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self) -> None:
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as err:  # out of file descriptors, or the peer went away again
                log.warning("accepting a connection failed: %s", err)
                await asyncio.sleep(TICK_S)
                continue
            sock.setblocking(False)
            if len(self._open) >= MAX_CONNECTIONS:
                sock.close()
                continue
            self._spawn(self._connection(sock))

    async def _connection(self, sock: socket.socket) -> None:
        try:
            kind, channel = await accept(sock, self._key)
        except (KVError, OSError, TimeoutError) as err:
            log.warning("a connection was turned away: %s", err)
            return
        self._open.add(channel)
        if kind == DATA:
            thread = threading.Thread(target=self._serve_data, args=(channel,), daemon=True)
            self._serving.add(thread)
            thread.start()
            return
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    frame = await channel.recv()
                await self._message(await self._read(frame, channel), channel)
        except (TransportError, TimeoutError):
            pass
        except KVError as err:
            log.warning("a control connection was dropped: %s", err)
        finally:
            self._open.discard(channel)
            await channel.close()

    async def _read(self, frame: bytes, channel: SocketChannel) -> Message:
        """The frame's message. Who sends what cannot be read here is told so: it would only repeat it."""
        try:
            return decode(frame)
        except KVError as err:
            await self._send(channel, Refused("", 0, "protocol", f"at the source: {err}"))
            raise

    def _serve_data(self, channel: SocketChannel) -> None:
        try:
            BulkServer(self._regions, self._readable).serve(channel)
        except (KVError, OSError) as err:
            log.debug("a data connection ended: %s", err)
        finally:
            channel.sock.close()
            self._open.discard(channel)
            self._serving.discard(threading.current_thread())

    def _readable(self, move: str) -> bool:
        known = self._moves.get(move)
        return known is not None and known.machine.readable

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for move in list(self._moves.values()):
                await self._run(move, move.machine.handle(m.Tick(now)))

    # -- messages ------------------------------------------------------------------------------------------------
    async def _message(self, message: Message, channel: Channel) -> None:
        move = self._moves.get(message.move)
        if move is None:
            if not isinstance(message, Open):
                if isinstance(message, Commit):
                    await self._send(channel, Refused(message.move, message.seq, "stale", "no such move is known here"))
                return
            refusal = await self._admit(message)
            if refusal is not None:
                await self._send(channel, refusal)
                return
            move = self._moves.get(message.move) or self._remember(message, channel)
        move.reply_to = channel
        await self._run(move, move.machine.handle(m.Received(message, time.monotonic())))

    async def _admit(self, message: Open) -> Refused | None:
        """Whether a new move may begin; an older move of the same destination gives way."""
        other = self._moves.get(self._by_session.get(message.session, ""))
        if other is not None and other.destination == message.destination and other.machine.readable:
            await self._run(other, other.machine.handle(m.ActionFailed("pin", "superseded", "a newer move")))
            if other.task is not None:
                await asyncio.wait([other.task])
            other = self._moves.get(self._by_session.get(message.session, ""))
        if other is not None:
            said = f"the session is in move {other.machine.move}, state {other.machine.state}"
            return Refused(message.move, message.seq, "busy", said)
        try:
            self._export()
        except Exception as err:  # noqa: BLE001 - boundary: an engine that has no pool now refuses with its words
            return Refused(message.move, message.seq, "engine", f"{type(err).__name__}: {err}")
        return None

    def _remember(self, message: Open, channel: Channel) -> ServedMove:
        machine = m.SourceMachine(message.move, self._lease_s)
        move = ServedMove(machine, message.session, message.destination, message.digest, channel)
        self._moves[message.move] = move
        self._by_session[message.session] = message.move
        while len(self._moves) > REMEMBER:
            oldest = next(iter(self._moves))
            if self._moves[oldest].machine.state not in ("moved", "aborted"):
                break
            del self._moves[oldest]
        return move

    async def _send(self, channel: Channel, message: Message) -> None:
        """Send, or let it be: who wants an answer asks again. A peer that does not read loses its connection."""
        try:
            async with asyncio.timeout(self._lease_s):
                await channel.send(encode(message))
        except TransportError:
            pass
        except TimeoutError:  # half of it may be sent
            if isinstance(channel, SocketChannel):
                channel.hang_up()

    # -- actions -------------------------------------------------------------------------------------------------
    async def _run(self, move: ServedMove, actions: list[m.Action]) -> None:
        for action in actions:
            match action:
                case m.Send(message):
                    await self._send(move.reply_to, message)
                case m.SendOffer():
                    await self._offer_or_end(move, action)
                case m.DoPin() | m.DoFreeze():
                    move.task = self._spawn(self._engine(move, action))
                case m.DoRelease(generation, forget):
                    await self._quietly(self._source.release(move.session, generation, forget=forget))
                case m.DoUnfreeze():
                    await self._quietly(self._source.unfreeze(move.session))
                case m.Closed():
                    if move.task is None or move.task.done():
                        self._free_session(move)

    def _free_session(self, move: ServedMove) -> None:
        """Another move of the session may begin. Not before this one's last engine call has ended and been undone."""
        if self._by_session.get(move.session) == move.machine.move:
            del self._by_session[move.session]

    async def _quietly(self, call: Awaitable[None]) -> None:
        try:
            await call
        except Exception:  # boundary: the move has ended and has been told so; what is left is the engine's, and logged
            log.exception("the engine failed while a move was being cleaned up")

    async def _engine(self, move: ServedMove, action: m.DoPin | m.DoFreeze) -> None:
        """Pin or freeze, then tell the machine."""
        name = "pin" if isinstance(action, m.DoPin) else "freeze"
        event: m.Event
        try:
            pinned = await (self._source.pin if name == "pin" else self._source.freeze)(move.session)
            layout = self._source.layout()
            digest = self._token_digest(move, layout, pinned)
            if name == "pin":
                event = m.PinDone(pinned, digest, len(pinned.token_ids) * layout.token_nbytes)
            else:
                event = m.FreezeDone(pinned, digest)
        except MoveRefused as err:
            event = m.ActionFailed(name, err.code, str(err))
        except Exception as err:  # noqa: BLE001 - boundary: whatever the engine raises is a refusal with its words
            event = m.ActionFailed(name, "engine", f"{type(err).__name__}: {err}")
        await self._run(move, move.machine.handle(event))
        if move.machine.state in ("moved", "aborted"):
            self._free_session(move)

    def _token_digest(self, move: ServedMove, layout: KVLayout, pinned: Pinned) -> str:
        """Digest of all tokens; those of earlier rounds are not hashed again."""
        if move.tokens is None:
            move.tokens = TokenDigest(layout.fingerprint(), pinned.version)
        move.tokens.update(pinned.token_ids[move.tokens.count :])
        return move.tokens.hex()

    async def _offer_or_end(self, move: ServedMove, offer: m.SendOffer) -> None:
        """Send the offer; a source that cannot even describe it ends the move."""
        try:
            await self._send_offer(move, offer)
        except Exception as err:  # noqa: BLE001 - boundary: an engine that sleeps or fails refuses with its words
            failed = m.ActionFailed("freeze" if offer.frozen else "pin", "engine", f"{type(err).__name__}: {err}")
            await self._run(move, move.machine.handle(failed))

    async def _send_offer(self, move: ServedMove, offer: m.SendOffer) -> None:
        pinned, layout = offer.pinned, self._source.layout()
        digests = await self._digests(move, offer, layout) if move.digest else np.zeros(0, np.uint64)
        access = ""
        if offer.first:
            metas = {name: x.meta() for name, x in self._exports.items()}
            metas |= {name: shm_meta() for name in ("shm", "tcp") if name in self._offered()}
            access = Access(layout, self._regions, metas).dumps()
        message = Offer(
            *(move.machine.move, offer.seq, move.session, int(pinned.generation), int(pinned.version), offer.frozen),
            *(offer.have, len(pinned.token_ids), layout.block_size, offer.token_digest),
            *(layout.fingerprint(), int(self._lease_s * 1000)),
            access,
            np.asarray(pinned.token_ids[offer.have :], np.int32),
            np.asarray(pinned.block_ids[offer.have // layout.block_size :], np.int32),
            digests,
        )
        await self._send(move.reply_to, message)

    async def _digests(self, move: ServedMove, offer: m.SendOffer, layout: KVLayout) -> U64:
        """Digests of all blocks for a frozen offer: those the engine kept, and the rest summed here; full blocks while
        the destination still pre-copies.
        """
        blocks, n = offer.pinned.block_ids, len(offer.pinned.token_ids)
        kept = kept_digests(offer.pinned, move.digest, layout, self._regions)

        async def sums(first: int, tokens: int) -> U64:
            return await asyncio.to_thread(source_digests, move.digest, layout, self._regions, blocks, first, tokens)

        if not offer.frozen:
            full = n // layout.block_size
            if move.sums is None and kept.shape[1] < full:
                move.sums = asyncio.ensure_future(sums(kept.shape[1], full * layout.block_size))
                move.summed_after = kept.copy()
            return np.zeros(0, np.uint64)
        known = kept
        if move.sums is not None and move.summed_after is not None:
            known = np.hstack([move.summed_after, await move.sums])
        if known.shape[1] < layout.blocks_for(n):
            known = np.hstack([known, await sums(known.shape[1], n)])
        return known.ravel()

    # -- transports ----------------------------------------------------------------------------------------------
    def _offered(self) -> tuple[str, ...]:
        if self._wanted is not None:
            return self._wanted
        if any(r.device != "cpu" for r in self._regions):
            return ("nixl",)
        return ("process_vm", "nixl", "shm", "tcp") if has_rdma() and nixl.flavour() else ("process_vm", "shm", "tcp")

    def _export(self) -> None:
        """Make the pool readable; again if the engine has moved it since."""
        regions = tuple(self._source.regions())
        if regions == self._regions and self._regions:
            return
        for old in self._exports.values():
            old.close()
        self._exports.clear()
        self._regions = regions
        if "process_vm" in self._offered():
            self._exports["process_vm"] = ProcessVmExporter()
        if "nixl" in self._offered():
            self._exports["nixl"] = nixl.NixlExporter(regions)
        for other in self._extra:
            self._exports[other.name] = other.export(regions)
