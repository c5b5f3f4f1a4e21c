"""Reservations that a transport may write to after their move has ended.

Invariant: such blocks are not given back to the sink, nor is their memory freed or reserved again for a new move of
the session, before the transport is known to have ended. Most transports never leave any (`LingeringReader`).
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre_kvxfer.copier import Copier
from gyre_kvxfer.engine import KVSink
from gyre_kvxfer.transports.base import LingeringReader, Reader


@dataclass(frozen=True, slots=True)
class _Kept:
    sink: KVSink
    session: str
    reader: LingeringReader
    copier: Copier | None
    """Holds the staging memory."""


_kept: list[_Kept] = []


def keep(sink: KVSink, session: str, reader: Reader | None, copier: Copier | None) -> bool:
    """Keep a reservation back if its reader may still write; whether that is so."""
    if not isinstance(reader, LingeringReader) or not reader.still_writing:
        return False
    _kept.append(_Kept(sink, session, reader, copier))
    return True


async def give_back(sink: KVSink) -> None:
    """Cancel the sink's reservations that nobody writes to any more."""
    for one in [x for x in _kept if x.sink is sink and not x.reader.still_writing]:
        _kept.remove(one)
        await sink.cancel(one.session)


def kept(sink: KVSink, session: str) -> bool:
    """Whether the session's reservation in this sink is kept back."""
    return any(x.sink is sink and x.session == session for x in _kept)
