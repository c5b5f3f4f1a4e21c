"""`nixl`: reads through NIXL (RDMA, NVLink, shared memory or TCP, as UCX finds), host and device memory.

The library is optional and heavy, so it is looked up (`flavour`) without being imported, and imported when a pool is
first registered. Each reader has an agent of its own; metadata travels in our authenticated offers. NIXL's own
pickled descriptors are never used: addresses come from the offer and are checked here.

NIXL does not notice a peer that deregistered its memory (a read can still report success): leases and digests are
ours. Nor can it take back a read it has begun: releasing or disconnecting only forgets it, and UCX writes what comes
late. Invariant: a read that did not end well ends its agent, after which nothing writes to host memory any more (UCX
warns once for each piece that was under way); where that is not certain, `still_writing` says so.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import importlib
import importlib.util
import json
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from gyre_kvxfer.engine import Region
from gyre_kvxfer.errors import TransportError, explain
from gyre_kvxfer.memory import Iovecs, cut_streams, iovecs, pair_up
from gyre_kvxfer.plan import Runs
from gyre_kvxfer.transports.base import stopped

FLAVOURS = ("nixl_cu12", "nixl_cu13", "nixl")
POLL_S = 30e-6
"""Pause between looks at a running transfer: a tighter loop starves the other side on few cores."""

BATCH = 16384
"""Descriptors in one transfer."""

BATCH_BYTES = 256 << 20
"""Bytes in one transfer, which has `TIMEOUT_S` for them."""

TIMEOUT_S = 30.0


def flavour() -> str:
    """Name of the installed NIXL module, or an empty string. Imports nothing."""
    for name in FLAVOURS:
        if importlib.util.find_spec(name) is not None:
            return name
    return ""


def memory_kind(regions: Sequence[Region]) -> tuple[str, int]:
    """(NIXL memory kind, device number) of a pool. Raises `TransportError` for a pool over several devices."""
    devices = {r.device for r in regions}
    if len(devices) != 1:
        raise TransportError(explain("registering a pool", sorted(devices), "one device", "Offer each by itself."))
    name = devices.pop()
    if name == "cpu":
        return "DRAM", 0
    kind, _, number = name.partition(":")
    if kind != "cuda":
        raise TransportError(explain("registering a pool", name, "cpu or cuda:N", "NIXL knows no other."))
    return "VRAM", int(number or 0)


class Agent:
    """A NIXL agent and the pools registered with it."""

    def __init__(self, progress_thread: bool) -> None:
        name = flavour()
        if not name:
            raise TransportError(
                explain("loading nixl", "no NIXL module", FLAVOURS, "pip install --no-deps nixl-cu12 (or another).")
            )
        self.name = f"gyre-{uuid.uuid4().hex}"
        try:
            module = importlib.import_module(name)
            config = module.nixl_agent_config(enable_prog_thread=progress_thread, backends=["UCX"])
            self.raw: Any = module.nixl_agent(self.name, config)
        except Exception as err:  # the library has a type of error per fault; all mean "not this transport"
            raise TransportError(explain(f"starting {name}", err, "a NIXL agent", "Use another transport.")) from err
        self._held: list[Any] = []

    def register(self, regions: Sequence[Region]) -> None:
        """Register a pool."""
        kind, device = memory_kind(regions)
        areas = [(r.addr, r.nbytes, device, "") for r in regions]
        try:
            self._held.append(self.raw.register_memory(areas, kind))
        except Exception as err:  # as above
            raise TransportError(
                explain(f"registering {kind} with nixl", err, "memory it can read", "Use another.")
            ) from err

    def close(self) -> None:
        """Deregister everything."""
        while self._held:
            self.raw.deregister_memory(self._held.pop())

    def end(self, peer: str) -> weakref.ref[Any]:
        """End the agent with all that it has begun. The reference is dead when it has ended for certain."""
        inner = weakref.ref(self.raw.agent)
        with contextlib.suppress(Exception):  # the library has a type of error per fault; it ends nevertheless
            self.raw.remove_remote_agent(peer)
        with contextlib.suppress(Exception):
            self.close()
        self.raw.agent = None
        return inner


class NixlExporter:
    """Offers a pool through NIXL."""

    name = "nixl"

    def __init__(self, regions: Sequence[Region]) -> None:
        self._agent = Agent(progress_thread=True)
        self._agent.register(regions)
        self._kind, self._device = memory_kind(regions)

    def meta(self) -> str:
        """Agent metadata (addresses of its endpoints) and the kind of memory."""
        blob = base64.b64encode(self._agent.raw.get_agent_metadata()).decode()
        return json.dumps({"metadata": blob, "kind": self._kind, "device": self._device})

    def close(self) -> None:
        """Deregister."""
        self._agent.close()


class NixlReader:
    """Reads a pool offered through NIXL."""

    name = "nixl"

    def __init__(
        self, agent: Agent, peer: str, meta: dict[str, Any], regions: Sequence[Region], into: Sequence[Region]
    ) -> None:
        self._agent, self._peer, self._regions = agent, peer, tuple(regions)
        self._their_kind, self._their_device = str(meta["kind"]), int(meta["device"])
        self._own_kind, self._own_device = memory_kind(into)
        self._stopped = False
        self._ended: weakref.ref[Any] | None = None
        self._own = {(r.addr, r.nbytes) for r in into}

    @classmethod
    def open(cls, meta: str, regions: Sequence[Region], into: Sequence[Region]) -> NixlReader:
        """Register the own pool, load the peer's metadata and connect. Blocks; tens of milliseconds."""
        agent = Agent(progress_thread=False)
        data = json.loads(meta)
        agent.register(into)
        try:
            peer = agent.raw.add_remote_agent(base64.b64decode(data["metadata"]))
            peer = peer.decode() if isinstance(peer, bytes) else str(peer)
            agent.raw.make_connection(peer)
        except Exception as err:  # the library has a type of error per fault; all mean "not this transport"
            agent.close()
            raise TransportError(explain("connecting through nixl", err, "a reachable agent", "Use another.")) from err
        return cls(agent, peer, data, regions, into)

    async def read(self, move: str, remote: Runs, local: Runs, into: Sequence[Region]) -> None:
        """Read in a thread. Pieces outside the registered pool (staging) are registered for the time of the read."""
        theirs, ours = pair_up(iovecs(remote, self._regions), iovecs(local, into))
        await asyncio.to_thread(self._read, theirs, ours, into)

    def _read(self, theirs: Iovecs, ours: Iovecs, into: Sequence[Region]) -> None:
        raw = self._agent.raw
        extra = [(r.addr, r.nbytes, 0, "") for r in into if (r.addr, r.nbytes) not in self._own]
        held = raw.register_memory(extra, "DRAM") if extra else None
        own_kind, own_device = ("DRAM", 0) if extra else (self._own_kind, self._own_device)
        try:
            for far, near, _ in cut_streams(theirs, ours, BATCH, BATCH_BYTES):
                stopped(self._stopped)
                mine = raw.get_xfer_descs(_table(near, own_device), own_kind)
                peer = raw.get_xfer_descs(_table(far, self._their_device), self._their_kind)
                self._run(raw, mine, peer)
        except TransportError:
            raise
        except Exception as err:  # see `open`
            raise TransportError(explain("reading through nixl", err, "a live peer", "Use another transport.")) from err
        finally:
            if held is not None and self._ended is None:
                raw.deregister_memory(held)

    def _run(self, raw: Any, mine: Any, peer: Any) -> None:
        handle, state = raw.initialize_xfer("READ", mine, peer, self._peer), "PROC"
        until = time.monotonic() + TIMEOUT_S
        try:
            state = raw.transfer(handle)
            while state == "PROC" and not self._stopped and time.monotonic() < until:
                time.sleep(POLL_S)
                state = raw.check_xfer_state(handle)
        except Exception as err:  # noqa: BLE001 - as in `open`; chained, its traceback would hold the agent
            state = f"{type(err).__name__}: {err}"
        if state == "DONE":
            handle.release()
            return
        with contextlib.suppress(Exception):  # the agent ends with or without it
            handle.release()
        del handle
        self._ended = self._agent.end(self._peer)
        stopped(self._stopped)
        came = f"nothing for {TIMEOUT_S:g} s" if state == "PROC" else state
        raise TransportError(explain("reading through nixl", came, "DONE", "Use another transport."))

    @property
    def still_writing(self) -> bool:
        """Whether a read that ended badly may write on: to device memory, or while something holds its agent."""
        if self._ended is None:
            return False
        if self._own_kind != "DRAM":
            return True  # copies on the device go on by themselves, and nobody says when they end
        if self._ended() is not None:
            gc.collect()  # a frame of a traceback
        return self._ended() is not None

    def stop(self) -> None:
        """Make the read that is running end, and later ones not begin."""
        self._stopped = True

    async def close(self) -> None:
        """Drop the peer and deregister."""
        if self._ended is None:
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # a peer that is gone already
            self._agent.raw.remove_remote_agent(self._peer)
        self._agent.close()


def _table(pieces: Iovecs, device: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    out = np.empty((len(pieces), 3), np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = pieces["base"], pieces["size"], device
    return out
