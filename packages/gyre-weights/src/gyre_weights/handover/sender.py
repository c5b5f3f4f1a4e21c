"""The satellite's side of a handover: a gradient into the memory of the core's processes.

Invariants: it ends by its time-outs, whatever the core does; when it returns, every process of the core holds its shard
whole and sealed; when it raises, no process will count it. Nothing is written to disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from gyre_weights.arrays import DTYPE_BYTES, Bytes, HostTensor, Named, named_host_tensors
from gyre_weights.errors import PeerError
from gyre_weights.handover.lanes import Lane, choose_lane, send_group, send_memory, send_socket, window
from gyre_weights.handover.plan import Form, Piece, check_cover
from gyre_weights.handover.wire import SLOWEST, Channel, Endpoint, connect


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What a handover took."""

    bytes: int
    """Payload over all shards; equals the gradient's bytes."""
    seconds: float
    lanes: tuple[str, ...]


def hand_over(
    endpoints: Sequence[Endpoint] | Endpoint,
    contribution: str,
    version: int,
    tensors: Named,
    *,
    meta: Mapping[str, Any] | None = None,
    lane: Lane | str | None = None,
    idle_s: float = 30.0,
    total_s: float = 600.0,
) -> HandedOver:
    """Give the gradient `tensors`, computed under `version`, to the core's processes at `endpoints`.

    `lane` None takes memory on one machine, else the socket. PeerError when a process refuses (stale version, known
    contribution, other model), dies, or is silent for `idle_s` or longer than `total_s` in all; MismatchError when the
    processes' shards do not cover the gradient.
    """
    if lane == Lane.GROUP:
        import_module("torch.distributed")  # its first import takes seconds: before anybody waits for us
    started = time.perf_counter()
    places = [endpoints] if isinstance(endpoints, Endpoint) else list(endpoints)
    held = dict(named_host_tensors(tensors))
    forms: dict[str, Form] = {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()}
    doing = f"handing over contribution {contribution!r}"
    first = {"do": "offer", "id": contribution, "version": version, "meta": dict(meta or {}), "forms": forms}
    with ExitStack() as stack:
        channels: list[Channel] = []
        wanted: list[list[Piece]] = []
        for place in places:
            channel = connect(place, first, doing, idle_s=idle_s, total_s=total_s)
            stack.callback(channel.close)
            channels.append(channel)
            wanted.append([Piece(str(n), int(a), int(b)) for n, a, b in channel.receive()["pieces"]])
        check_cover(forms, wanted)
        lanes = [choose_lane(None if lane is None else Lane(lane), channel) for channel in channels]
        with ThreadPoolExecutor(len(channels)) as pool:  # side by side: a process that waits is not silent for long
            sent = sum(pool.map(partial(_send, held), channels, places, lanes, wanted))
        for channel in channels:
            channel.send({"seal": True})
        for channel in channels:
            if not channel.receive().get("sealed"):
                raise PeerError(doing, got="no seal", expected="one from each process of the core")
    return HandedOver(sent, time.perf_counter() - started, tuple(lane.value for lane in lanes))


def _send(
    held: Mapping[str, HostTensor], channel: Channel, place: Endpoint, lane: Lane, pieces: Sequence[Piece]
) -> int:
    def windows() -> Iterator[Bytes]:
        for piece in pieces:
            tensor = held[piece.name]
            yield window(tensor, piece.start, piece.stop, DTYPE_BYTES[tensor.dtype])

    channel.send({"lane": lane.value})
    if lane is Lane.MEMORY:
        digest = send_memory(channel, windows())
    elif lane is Lane.SOCKET:
        digest = send_socket(channel, windows())
    else:
        digest = send_group(channel, place.host, windows())
    channel.send({"digest": digest})
    nbytes = sum(piece.elements * DTYPE_BYTES[held[piece.name].dtype] for piece in pieces)
    channel.receive(more_s=nbytes / SLOWEST)  # arrived, and its digest agrees
    return nbytes
