"""Frames between a trainer and its rank processes: a JSON header and raw bytes behind it.

Invariant: a frame is read whole or refused; nothing that comes over the wire is executed (no pickle). Both ends are on
one machine, joined by a socket pair that no one else can open.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

from gyre_core import errors
from gyre_core.errors import GyreError, InfrastructureError

_HEAD = struct.Struct("<4sIQ")
_MAGIC = b"GYRK"
MAX_HEADER = 1 << 26
MAX_PAYLOAD = 1 << 36


class WireError(Exception):
    """What came is no frame of this protocol."""


class RankCrashError(InfrastructureError):
    """A command failed in a rank by an error that nobody raised on purpose: its state is unknown."""


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header).encode()
    return _HEAD.pack(_MAGIC, len(text), len(payload)) + text + payload


def _sizes(head: bytes) -> tuple[int, int]:
    magic, header, payload = _HEAD.unpack(head)
    if magic != _MAGIC or header > MAX_HEADER or payload > MAX_PAYLOAD:
        raise WireError(f"got {head[:16]!r}, expected a frame that begins with {_MAGIC!r}")
    return int(header), int(payload)


def _header(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise WireError(f"got a header that is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise WireError(f"got a header that is a {type(found).__name__}, expected an object")
    return found


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    """The next frame; WireError for anything else, IncompleteReadError at the end of the stream."""
    header, payload = _sizes(await reader.readexactly(_HEAD.size))
    return _header(await reader.readexactly(header)), await reader.readexactly(payload)


def receive(link: socket.socket) -> tuple[dict[str, Any], bytes]:
    """`read_frame` of the rank's end; EOFError when the other end is gone."""
    header, payload = _sizes(_exactly(link, _HEAD.size))
    return _header(_exactly(link, header)), _exactly(link, payload)


def _exactly(link: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = link.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise EOFError("the trainer is gone")
        found += piece
    return bytes(found)


def describe(error: BaseException, doing: str) -> dict[str, str]:
    """An error as it travels; one that is neither ValueError nor ours becomes a RankCrashError."""
    if isinstance(error, GyreError):
        parts = {"doing": error.doing, "got": error.got, "expected": error.expected, "fix": error.fix}
        return {"type": type(error).__name__} | parts
    if isinstance(error, ValueError):
        return {"type": "ValueError", "doing": str(error)}
    return {"type": "RankCrashError", "doing": doing, "got": f"{type(error).__name__}: {error}"}


def restored(found: dict[str, str]) -> Exception:
    """The error that `describe` told."""
    if found.get("type") == "ValueError":
        return ValueError(found.get("doing", ""))
    kind = getattr(errors, found.get("type", ""), RankCrashError)
    if not (isinstance(kind, type) and issubclass(kind, GyreError)):
        kind = RankCrashError
    names = ("got", "expected", "fix")
    return kind(found.get("doing", "working in a rank"), **{name: found.get(name, "") for name in names})
