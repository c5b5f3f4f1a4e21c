"""Which recorded history does a request continue?

Invariant: a recorded answer counts as part of a request's history only if every message before it is the same and the
answer itself came back with the meaning it was given. Work is proportional to the messages that are new: the part of
the body that an earlier request already contained is recognised by comparing bytes and is not decoded.

Knows messages and digests; no tokens, no model.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

from gyre_tito.messages import DIGEST_SIZE, Message, chain, chain_start, reasoning_digest, validate
from gyre_tito.requests import Transcript

_CURSORS = 64
_TEXTS = 4
_TEXT_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer that was given: by which call, in which session, with what reasoning."""

    call: int
    session: str
    reasoning: bytes


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a request's history.

    `recorded` is its latest known answer (None: nothing is known) and `new` the messages after it; with nothing known
    `new` is empty and the transcript must be decoded whole. `chain` names the whole message list, `head` its
    instructions and tools, `count` how many messages it has. `broken`: the client changed an answer's reasoning.
    """

    recorded: Recorded | None
    new: tuple[Message, ...]
    chain: bytes
    head: bytes
    count: int
    broken: bool


@dataclass(slots=True)
class _Cursor:
    """A message list seen before: its bytes, and the state of the walk at its end.

    The list is the first `size` bytes of `text`, which a longer list of the same conversation may share; once `text` is
    let go, `digest` stands for it.
    """

    seed: bytes
    size: int
    walk: _Walk
    text: bytes | None
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class _Walk:
    chain: bytes
    head: bytes
    count: int
    recorded: Recorded | None
    new: tuple[Message, ...]
    broken: bool
    in_head: bool
    last_role: str


class Matcher:
    """The answers of one execution, by the history that led to them."""

    def __init__(self) -> None:
        self._answers: dict[bytes, Recorded] = {}
        self._cursors: list[_Cursor] = []

    def answered(self, request_chain: bytes, message: Message, recorded: Recorded) -> bytes:
        """Note that the list named `request_chain` was answered by `message`; returns the longer list's name."""
        name = chain(request_chain, message)
        self._answers[name] = recorded
        return name

    def restore(self, name: bytes, recorded: Recorded) -> None:
        """Put back what `answered` noted in an earlier life of the process."""
        self._answers[name] = recorded

    def match(self, transcript: Transcript) -> Match:
        """Find the longest recorded history. Errors: `HistoryError` and whatever the dialect's decoder raises."""
        content = _content(transcript.raw)
        seed = _seed(transcript)
        known = self._longest_cursor(seed, content)
        start = known
        messages: tuple[Message, ...] = ()
        if start is not None and start.size < len(content):
            messages = transcript.decode(b"[" + content[start.size :].lstrip(b" \t\r\n,") + b"]")
            if not messages or messages[0].role == "tool" or start.walk.last_role == "assistant":
                start = None  # such messages may belong to the turn before them: read the list as a whole
        if start is None:
            messages = transcript.decode(transcript.raw)
            validate(messages)
            walk = self._start(transcript)
        else:
            validate(messages, start.walk.count - len(transcript.preface))
            walk = start.walk
        walk = self._advance(walk, messages)
        self._remember(_Cursor(seed, len(content), walk, content), known)
        return Match(walk.recorded, walk.new, walk.chain, walk.head, walk.count, walk.broken)

    def _start(self, transcript: Transcript) -> _Walk:
        begin = chain_start(transcript.tools)
        walk = _Walk(begin, begin, 0, None, (), False, True, "")
        return self._advance(walk, transcript.preface)

    def _advance(self, walk: _Walk, messages: tuple[Message, ...]) -> _Walk:
        name, head, recorded, broken, in_head = walk.chain, walk.head, walk.recorded, walk.broken, walk.in_head
        new = list(walk.new)
        for message in messages:
            name = chain(name, message)
            in_head = in_head and message.role == "system"
            head = name if in_head else head
            new.append(message)
            found = self._answers.get(name) if message.role == "assistant" and not broken else None
            if found is None:
                continue
            if message.reasoning is not None and reasoning_digest(message.reasoning) != found.reasoning:
                broken = True
                continue
            recorded, new = found, []
        kept = tuple(new) if recorded is not None else ()
        last = messages[-1].role if messages else walk.last_role
        return _Walk(name, head, walk.count + len(messages), recorded, kept, broken, in_head, last)

    def _longest_cursor(self, seed: bytes, content: bytes) -> _Cursor | None:
        """The longest earlier list that `content` begins with; kept text is compared, the rest goes by digest."""
        best: _Cursor | None = None
        digests = []
        for cursor in reversed(self._cursors):
            if cursor.seed != seed or cursor.size > len(content) or (best and cursor.size <= best.size):
                continue
            if cursor.text is None:
                digests.append(cursor)
            elif content.startswith(cursor.text if len(cursor.text) == cursor.size else cursor.text[: cursor.size]):
                best = cursor
        hasher, done = _hasher(), 0
        for cursor in sorted(digests, key=lambda one: one.size):
            if best is None or cursor.size > best.size:
                hasher.update(memoryview(content)[done : cursor.size])
                done = cursor.size
                best = cursor if hasher.copy().digest() == cursor.digest else best
        return best

    def _remember(self, fresh: _Cursor, before: _Cursor | None) -> None:
        """Keep a list. One that continues an older list shares its text; see `_let_go`."""
        if before is not None and before.text is not None:
            old = before.text
            for cursor in self._cursors:
                if cursor.text is old and cursor.size <= before.size:
                    cursor.text = fresh.text
        self._cursors.append(fresh)
        del self._cursors[:-_CURSORS]
        self._let_go()

    def _let_go(self) -> None:
        """Keep the newest text, and a few others while they are small together; digests stand for the rest."""
        kept: list[bytes] = []
        gone: dict[int, list[_Cursor]] = {}
        room = _TEXT_BYTES
        for cursor in reversed(self._cursors):
            text = cursor.text
            if text is None or any(text is one for one in kept):
                continue
            if id(text) not in gone and (not kept or (len(kept) < _TEXTS and len(text) <= room)):
                kept.append(text)
                room -= len(text)
            else:
                gone.setdefault(id(text), []).append(cursor)
        for cursors in gone.values():
            _forget_text(cursors)


def _forget_text(cursors: list[_Cursor]) -> None:
    """Replace a text by the digests of the lists that share it, in one pass over it."""
    hasher, done = _hasher(), 0
    for cursor in sorted(cursors, key=lambda one: one.size):
        assert cursor.text is not None
        hasher.update(memoryview(cursor.text)[done : cursor.size])
        done = cursor.size
        cursor.text, cursor.digest = None, hasher.copy().digest()


def _hasher() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=32)


class TextHistory:
    """Texts (prompt and completion) of plain completions, so that a prompt that goes on from one is recognised."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()

    def add(self, text: str, call: int, length: int) -> tuple[int, bytes]:
        """The first `length` tokens of `call`'s path say `text`; returns its size and digest, for `restore`."""
        size, digest = len(text), _text_digest(text)
        self.restore(size, digest, call, length)
        return size, digest

    def restore(self, size: int, digest: bytes, call: int, length: int) -> None:
        """Put back what `add` noted in an earlier life of the process."""
        self._known[size, digest] = (call, length)
        while len(self._known) > _CURSORS:
            self._known.popitem(last=False)

    def longest(self, prompt: str) -> tuple[int, int, str]:
        """(call, tokens, the text after them); (-1, 0, prompt) when nothing known comes first."""
        for size in sorted({size for size, _ in self._known if size <= len(prompt)}, reverse=True):
            found = self._known.get((size, _text_digest(prompt[:size])))
            if found is not None:
                return *found, prompt[size:]
        return -1, 0, prompt


def _text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_SIZE).digest()


def _content(raw: bytes) -> bytes:
    """The list's text without its closing bracket."""
    return raw.rstrip(b" \t\r\n")[:-1].rstrip(b" \t\r\n")


def _seed(transcript: Transcript) -> bytes:
    """What must be equal besides the list itself for two requests to be comparable byte by byte."""
    hasher = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in (transcript.dialect.encode(), transcript.tools_raw):
        hasher.update(len(part).to_bytes(8, "little") + part)
    name = hasher.digest()
    for message in transcript.preface:
        name = chain(name, message)
    return name
