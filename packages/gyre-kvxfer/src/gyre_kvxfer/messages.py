"""The messages of a move, and their bytes.

A message is a frozen dataclass of ints, strings, booleans and flat numpy arrays. On the wire it is a JSON header
(names, values, array lengths) followed by the arrays' little-endian bytes; nothing is ever unpickled or evaluated.

Invariant: `decode(encode(m)) == m` for every message, and bytes that are not exactly one message of this version
raise `ProtocolError` and yield nothing.

Requests carry `seq`, rising by one; a reply repeats its request's `seq`. A receiver may see any message twice, late
or never; the machines in `source.py` and `destination.py` are built for that.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.errors import ProtocolError, explain

PROTOCOL = 1
"""Version of the message set. Sides of different versions do not talk."""

Array: TypeAlias = npt.NDArray[Any]

_EMPTY32 = np.zeros(0, np.int32)
_EMPTY64 = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Base: `move` names the move (32 hex digits), `seq` the request."""

    ARRAYS: ClassVar[dict[str, str]] = {}
    move: str
    seq: int

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.move, self.seq))


@dataclass(frozen=True, slots=True, eq=False)
class Open(Message):
    """Destination asks for a session. At most `freeze_below` bytes: freeze at once, there is nothing to pre-copy.

    `version`: only KV of this policy version is wanted (-1: any); another is refused before decoding is stopped.
    """

    session: str
    destination: str
    freeze_below: int
    digest: str
    version: int = -1


@dataclass(frozen=True, slots=True, eq=False)
class Extend(Message):
    """Destination has copied `have` tokens and asks what is new (pre-copy round)."""

    have: int


@dataclass(frozen=True, slots=True, eq=False)
class Freeze(Message):
    """Destination has copied `have` tokens and asks to stop decoding for the rest."""

    have: int


@dataclass(frozen=True, slots=True, eq=False)
class Renew(Message):
    """Destination is still copying: prolong the lease."""


@dataclass(frozen=True, slots=True, eq=False)
class Commit(Message):
    """Destination holds, has checked and has entered everything; it asks for the session."""

    generation: int
    token_digest: str


@dataclass(frozen=True, slots=True, eq=False)
class Abort(Message):
    """Destination will not take the session."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Done(Message):
    """Destination owns the session; the source may drop its KV."""


@dataclass(frozen=True, slots=True, eq=False)
class Offer(Message):
    """The manifest of what is pinned, counted from token `have` on.

    `token_ids` int32[n_tokens - have]; `block_ids` int32, the table from block `have // block_size` (the source's)
    on; `token_digest` covers all `n_tokens` tokens, the version and the layout's meaning. A frozen offer also carries
    `digests` uint64[all blocks], if asked for. `lease_ms` runs from the moment the request was sent. `access` (first
    offer only) is the JSON of `Access`.
    """

    ARRAYS: ClassVar[dict[str, str]] = {"token_ids": "<i4", "block_ids": "<i4", "digests": "<u8"}
    session: str
    generation: int
    version: int
    frozen: bool
    have: int
    n_tokens: int
    block_size: int
    token_digest: str
    fingerprint: str
    lease_ms: int
    access: str = ""
    token_ids: Array = field(default_factory=lambda: _EMPTY32)
    block_ids: Array = field(default_factory=lambda: _EMPTY32)
    digests: Array = field(default_factory=lambda: _EMPTY64)


@dataclass(frozen=True, slots=True, eq=False)
class Renewed(Message):
    """The lease runs `lease_ms` from the moment the request was sent."""

    lease_ms: int


@dataclass(frozen=True, slots=True, eq=False)
class Released(Message):
    """The source has given the session up for good. Sent again for every repeated `Commit`."""


@dataclass(frozen=True, slots=True, eq=False)
class Refused(Message):
    """The source keeps the session; this move is over."""

    code: str
    reason: str


TYPES: dict[str, type[Message]] = {
    t.__name__: t for t in (Open, Extend, Freeze, Renew, Commit, Abort, Done, Offer, Renewed, Released, Refused)
}


def encode(message: Message) -> bytes:
    """The message as one frame."""
    arrays, values = [], {}
    for f in fields(message):
        value = getattr(message, f.name)
        if f.name in message.ARRAYS:
            data = np.ascontiguousarray(value, dtype=message.ARRAYS[f.name])
            values[f.name] = len(data)
            arrays.append(data.tobytes())
        else:
            values[f.name] = value
    head = json.dumps([PROTOCOL, type(message).__name__, values], separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(head)), head, *arrays])


def decode(frame: bytes) -> Message:
    """The frame's message. Raises `ProtocolError` for anything else."""
    try:
        (size,) = struct.unpack_from("<I", frame)
        version, name, values = json.loads(frame[4 : 4 + size])
        if type(version) is int and version != PROTOCOL:
            raise ProtocolError(
                explain("reading a message", f"protocol {version}", f"protocol {PROTOCOL}", "Upgrade the older side.")
            )
        if version != PROTOCOL:
            raise ValueError(f"protocol {version!r}")
        return _build(TYPES[name], values, memoryview(frame)[4 + size :])
    except (struct.error, ValueError, KeyError, TypeError, UnicodeDecodeError) as err:
        raise ProtocolError(
            explain("reading a message", f"{type(err).__name__}: {err}", "one message", "Drop the connection.")
        ) from err


_PLAIN = {"str": str, "int": int, "bool": bool}


def _build(kind: type[Message], values: dict[str, Any], rest: memoryview) -> Message:
    names = {f.name: f for f in fields(kind)}
    if set(values) != set(names):
        raise ValueError(f"fields {sorted(values)} of {kind.__name__}")
    out = dict(values)
    for name, f in names.items():
        value = values[name]
        if name in kind.ARRAYS:
            dtype = np.dtype(kind.ARRAYS[name])
            if type(value) is not int or value < 0 or value * dtype.itemsize > len(rest):
                raise ValueError(f"{name} has {value!r} items, {len(rest)} bytes are left")
            out[name] = np.frombuffer(rest, dtype, count=value)
            rest = rest[value * dtype.itemsize :]
        elif type(value) is not _PLAIN[str(f.type)]:
            raise ValueError(f"{name} is {type(value).__name__}, not {f.type}")
    if len(rest):
        raise ValueError(f"{len(rest)} bytes too many")
    return kind(**out)
