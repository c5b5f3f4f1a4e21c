"""What the store keeps of a call beside the call itself, so that a restarted proxy knows the conversation again.

Invariant: fields are only ever added at the end, with a default, so that an older note can be read. Plain data.
"""

from __future__ import annotations

import msgspec


class RetryNote(msgspec.Struct, frozen=True, array_like=True):
    """The call answers choice `number` of `choices` of a request that the client named.

    `key` and `body` are digests (see `gyre_tito.retries`); `first` is the index of the request's first call, which
    tells one try from another. `stop_string` and `top` (alternatives of every sampled token) are what an answer shows
    and the call does not say.
    """

    key: bytes
    body: bytes
    number: int
    choices: int
    first: int
    stop_string: str | None = None
    top: list[list[tuple[int, float]]] = []


class TextNote(msgspec.Struct, frozen=True, array_like=True):
    """A plain completion: prompt and answer are `size` characters with this digest, the path's first `tokens`."""

    size: int
    digest: bytes
    tokens: int


class Note(msgspec.Struct, frozen=True, array_like=True):
    """`request` names the message list that was answered (empty: plain text), `answer` the list with the answer (empty:
    the client was told nothing), `reasoning` the answer's reasoning, `head` instructions and tools; `count` messages.
    """

    request: bytes = b""
    answer: bytes = b""
    reasoning: bytes = b""
    head: bytes = b""
    count: int = 0
    retry: RetryNote | None = None
    text: TextNote | None = None


def pack_note(note: Note) -> bytes:
    """A note as it is stored; nothing for one that says nothing."""
    return b"" if note == Note() else msgspec.msgpack.encode(note)


def read_note(data: bytes) -> Note:
    """The note that `pack_note` wrote."""
    return msgspec.msgpack.decode(data, type=Note) if data else Note()
