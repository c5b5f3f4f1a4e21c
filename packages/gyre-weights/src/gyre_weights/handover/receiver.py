"""The core's side of a handover: takes gradients while the core computes, and keeps them until they are counted.

One `Receiver` a process of the core, with threads of its own. Invariants: a contribution is held only whole, verified
and sealed by its sender; one that is cut off, late, of another version or known already leaves nothing behind; taking
one out ends its life here, and nobody can bring it again in the same step. Not here: whether it counts (the ledger
says).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_weights.arrays import DTYPE_BYTES, Bytes, HostTensor
from gyre_weights.errors import CorruptError, PeerError
from gyre_weights.groups import StoreServer
from gyre_weights.handover.holder import give_version
from gyre_weights.handover.lanes import Lane, receive_group, receive_memory, receive_socket
from gyre_weights.handover.listening import Listener
from gyre_weights.handover.plan import Piece, ShardPlan
from gyre_weights.handover.wire import SLOWEST, Channel, Endpoint


@dataclass(frozen=True, slots=True)
class Arrived:
    """A contribution's shard, whole and verified."""

    id: str
    version: int
    meta: Mapping[str, Any]
    """What the sender told of it; JSON."""
    plan: ShardPlan
    data: Bytes

    def pieces(self) -> Iterator[tuple[Piece, HostTensor]]:
        """Each piece of this process's shard as a flat tensor over the arrived memory."""
        for piece, at in zip(self.plan.pieces, self.plan.offsets(), strict=True):
            dtype = self.plan.forms[piece.name][0]
            stop = at + piece.elements * DTYPE_BYTES[dtype]
            yield piece, HostTensor(dtype, (piece.elements,), self.data[at:stop])

    def tensors(self) -> dict[str, HostTensor]:
        """Whole gradients by name; ValueError when the shard has parts only."""
        found = {}
        for piece, tensor in self.pieces():
            shape = self.plan.forms[piece.name][1]
            whole = HostTensor(tensor.dtype, shape, tensor.data)
            if whole.elements != piece.elements:
                raise ValueError(f"taking {piece.name} of contribution {self.id!r}: got a part, expected the whole")
            found[piece.name] = whole
        return found


@dataclass(slots=True)
class Counts:
    """What a receiver has seen since its start."""

    sealed: int = 0
    refused: int = 0
    broken: int = 0
    """Handovers that ended in the middle."""
    payload_bytes: int = 0
    """Bytes of gradients that arrived."""
    lanes: dict[str, int] = field(default_factory=dict)


class Receiver:
    """Listens from `start` to `close`. `index` of `shards` says which process of the core this is."""

    def __init__(
        self,
        plan: ShardPlan,
        *,
        index: int = 0,
        shards: int = 1,
        host: str = "127.0.0.1",
        idle_s: float = 30.0,
        total_s: float = 600.0,
        snapshots: Callable[[int], str | Path | None] = lambda version: None,
    ) -> None:
        """`idle_s`: longest silence of a peer; `total_s`: longest handover. `snapshots(version)` is the folder of a
        version that satellites without the core's file system may fetch, or None."""
        self.plan, self.index, self.shards = plan, index, shards
        self.counts = Counts()
        self._total, self._snapshots, self._host = total_s, snapshots, host
        self._lock = threading.Lock()
        self._version = -1
        self._held: dict[str, Arrived] = {}
        self._known: set[str] = set()
        self._store: StoreServer | None = None
        self._closed = False
        self._listener = Listener(self._serve, "taking a gradient", host=host, idle_s=idle_s, total_s=total_s)

    # Life

    def start(self) -> Endpoint:
        """Listen; where."""
        return self._listener.start()

    def close(self) -> None:
        """Stop listening, end what is open, forget what is held. Waits for its threads."""
        with self._lock:
            self._closed = True
            self._held.clear()
        self._listener.close()
        if self._store is not None:
            self._store.close()

    @property
    def peers(self) -> int:
        """Satellites connected now."""
        return self._listener.peers

    # The step

    def open_step(self, version: int) -> None:
        """From now on take gradients computed under `version`; what is held of another is dropped."""
        with self._lock:
            self._version = version
            self._known.clear()
            self._held.clear()

    def put(self, contribution: str, version: int, meta: Mapping[str, Any], data: Bytes) -> None:
        """The core's own contribution: its shard (uint8, in the plan's order) without a copy. Errors as for others."""
        with self._lock:
            reason = self._refusal(contribution, version)
            if reason:
                raise PeerError(f"keeping contribution {contribution!r}", got=reason, expected="a new one")
            self._known.add(contribution)
            self._held[contribution] = Arrived(contribution, version, dict(meta), self.plan, data)

    def take(self, contribution: str) -> Arrived:
        """Take a sealed contribution out. PeerError when it is not held: its sender did not finish, it was taken
        before, or this process was started since."""
        with self._lock:
            found = self._held.pop(contribution, None)
        if found is None:
            raise PeerError(
                f"taking contribution {contribution!r}", got="none of that name in memory", expected="a sealed one",
                fix="Lease its micro-batches again.",
            )  # fmt: skip
        return found

    def drop(self, contribution: str) -> None:
        """Forget one; no error when there is none."""
        with self._lock:
            self._held.pop(contribution, None)

    @property
    def held(self) -> list[str]:
        """Sealed and not taken."""
        with self._lock:
            return sorted(self._held)

    def _refusal(self, contribution: str, version: int) -> str:
        if self._closed:
            return "the core is closing"
        if version != self._version:
            return f"gradients of policy version {version}; this step is of version {self._version}"
        if contribution in self._known:
            return f"contribution {contribution!r} is known already"
        return ""

    # Peers

    def _serve(self, channel: Channel, first: Mapping[str, Any]) -> None:
        if first.get("do") == "fetch":
            give_version(channel, int(first["version"]), self._snapshots)
        else:
            self._handover(channel, first)

    def _handover(self, channel: Channel, first: Mapping[str, Any]) -> None:
        name, version = str(first["id"]), int(first["version"])
        channel.doing = f"taking contribution {name!r}"
        with self._lock:
            reason = self._refusal(name, version) or self._misfit(first["forms"])
            if not reason:
                self._known.add(name)  # the first who offers a name has it until he fails
            self.counts.refused += bool(reason)
        if reason:
            channel.send({"refused": reason, "expected": "a contribution of this step and model"})
            return
        sealed, refusal = False, ""
        try:
            arrived = self._receive(channel, name, version, first)
            channel.send({"arrived": True})
            channel.receive(more_s=self._total)  # the seal: all the core's processes have their shards
            with self._lock:
                if self._closed or version != self._version:
                    raise PeerError(channel.doing, got="the end of its step", expected="a seal in time")
                self._held[name] = arrived
                sealed = True
                self.counts.sealed += 1
            channel.send({"sealed": True})
        except CorruptError as error:
            refusal = str(error)
            raise
        finally:
            if not sealed:
                with self._lock:
                    self._known.discard(name)
                    self.counts.broken += 1
            if refusal:  # told once the name is free: who hears it may bring the gradient again at once
                channel.send({"refused": refusal, "expected": "the bytes that the sender summed"})

    def _receive(self, channel: Channel, name: str, version: int, first: Mapping[str, Any]) -> Arrived:
        nbytes = self.plan.nbytes
        pieces = [[piece.name, piece.start, piece.stop] for piece in self.plan.pieces]
        channel.send({"pieces": pieces, "bytes": nbytes, "index": self.index, "shards": self.shards})
        lane = Lane(channel.receive()["lane"])
        if lane is Lane.MEMORY:
            data, digest = receive_memory(channel, nbytes)
        elif lane is Lane.SOCKET:
            data, digest = receive_socket(channel, nbytes)
        else:
            data, digest = receive_group(channel, nbytes, self._store_place())
        told = str(channel.receive(more_s=nbytes / SLOWEST)["digest"])
        found = digest()
        if found != told:
            raise CorruptError(channel.doing, got=f"other bytes than sent (digest {found})", expected=told)
        with self._lock:
            self.counts.payload_bytes += nbytes
            self.counts.lanes[lane.value] = self.counts.lanes.get(lane.value, 0) + 1
        return Arrived(name, version, dict(first.get("meta", {})), self.plan, data)

    def _misfit(self, forms: Mapping[str, Any]) -> str:
        found = {name: (str(dtype), tuple(shape)) for name, (dtype, shape) in forms.items()}
        for name in sorted(set(found) | set(self.plan.forms)):
            if found.get(name) != self.plan.forms.get(name):
                return f"{name} as {found.get(name)}; this core has {self.plan.forms.get(name)}"
        return ""

    def _store_place(self) -> tuple[str, int]:
        with self._lock:
            if self._store is None:
                self._store = StoreServer(self._host)
            return self._store.host, self._store.port
