"""The lanes a shard can travel on, once both sides have agreed on its bytes.

memory: the core makes an anonymous memory file and passes its descriptor; the satellite writes into it; one machine,
one copy, and nothing is left behind whoever dies. socket: over the control channel's own socket. group: a process group
of two, formed for this handover outside any default world and dissolved after it (gloo). Invariant: the digest is taken
over what was written and compared with what has arrived.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

import numpy as np

from gyre_weights.arrays import Bytes, HostTensor
from gyre_weights.digest import CHUNK, Digest, digest_bytes
from gyre_weights.errors import PeerError
from gyre_weights.handover.wire import Channel


class Lane(StrEnum):
    """How a shard travels."""

    MEMORY = "memory"
    SOCKET = "socket"
    GROUP = "group"


def choose_lane(wanted: Lane | None, channel: Channel) -> Lane:
    """`wanted`, or the best this channel allows. PeerError for memory between two machines."""
    if wanted is None:
        return Lane.MEMORY if channel.is_local and hasattr(os, "memfd_create") else Lane.SOCKET
    if wanted is Lane.MEMORY and not channel.is_local:
        raise PeerError(channel.doing, got="the memory lane to another machine", expected="socket or group")
    return wanted


def chunks(windows: Iterable[Bytes]) -> Iterator[Bytes]:
    """The windows' bytes, end to end, in pieces of CHUNK bytes; copies only where a piece spans two windows."""
    held: list[Bytes] = []
    size = 0
    for window in windows:
        at = 0
        while at < window.nbytes:
            take = min(CHUNK - size, window.nbytes - at)
            held.append(window[at : at + take])
            size, at = size + take, at + take
            if size == CHUNK:
                yield held[0] if len(held) == 1 else np.concatenate(held)
                held, size = [], 0
    if held:
        yield held[0] if len(held) == 1 else np.concatenate(held)


# The satellite's side: each returns the digest of what it wrote.


def send_memory(channel: Channel, windows: Iterable[Bytes]) -> str:
    """Into the core's memory file."""
    channel.receive()
    handle = channel.receive_fd()
    digest, at = Digest(), 0
    try:
        for piece in chunks(windows):
            digest.add(piece)
            view = piece.data
            while view:
                count = os.pwrite(handle, view, at)
                view, at = view[count:], at + count
    finally:
        os.close(handle)
    return digest.hex()


def send_socket(channel: Channel, windows: Iterable[Bytes]) -> str:
    """Over the channel."""
    digest = Digest()
    for piece in chunks(windows):
        digest.add(piece)
        channel.send_bytes(piece)
    return digest.hex()


def send_group(channel: Channel, host: str, windows: Iterable[Bytes]) -> str:
    """As rank 1 of a group of two."""
    import torch

    from gyre_weights.groups import form_group

    place = channel.receive()
    digest = Digest()
    with form_group((host, int(place["port"])), str(place["group"]), 1, 2, timeout_s=channel.remaining()) as group:
        for piece in chunks(windows):
            digest.add(piece)
            group.send(torch.from_numpy(np.array(piece)), 0)
    return digest.hex()


# The core's side: each fills a buffer of its own and returns it with the digest of what arrived.


def receive_memory(channel: Channel, nbytes: int) -> tuple[Bytes, Callable[[], str]]:
    """Make the memory file, pass it, and map it. Take the digest when the satellite has said that it is done."""
    handle = os.memfd_create("gyre-handover", os.MFD_CLOEXEC)
    try:
        os.ftruncate(handle, max(nbytes, 1))
        channel.send_fd(handle, {"lane": Lane.MEMORY.value})
        data: Bytes = np.frombuffer(mmap.mmap(handle, max(nbytes, 1)), np.uint8)[:nbytes]
    finally:
        os.close(handle)
    return data, lambda: digest_bytes(data)


def receive_socket(channel: Channel, nbytes: int) -> tuple[Bytes, Callable[[], str]]:
    """From the channel, digested as it comes."""
    data, digest = np.empty(nbytes, np.uint8), Digest()
    channel.receive_into(data, digest)
    return data, digest.hex


def receive_group(channel: Channel, nbytes: int, store: tuple[str, int]) -> tuple[Bytes, Callable[[], str]]:
    """As rank 0 of a group of two that meets at `store`, host and port of this machine."""
    import torch

    from gyre_weights.groups import form_group

    name = f"handover-{secrets.token_hex(8)}"
    channel.send({"port": store[1], "group": name})
    data = np.empty(nbytes, np.uint8)
    with form_group(store, name, 0, 2, timeout_s=channel.remaining()) as group:
        for start in range(0, nbytes, CHUNK):
            group.receive(torch.from_numpy(data[start : start + CHUNK]), 1)
    return data, lambda: digest_bytes(data)


def window(tensor: HostTensor, start: int, stop: int, width: int) -> Bytes:
    """Elements [start, stop) of a flat tensor as bytes."""
    return tensor.data[start * width : stop * width]
