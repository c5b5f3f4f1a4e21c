"""Requests that clients name (`Idempotency-Key`), so that sending one again does not sample a second answer.

Invariants. Within one execution and session a name stands for one body; another body under it is refused. A named
request that was answered is answered from the store, in this life of the proxy or a later one; one that is running is
joined; one that failed, or was cut, is made again. This module keeps who is who; it samples and stores nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gyre_tito.notes import RetryNote
from gyre_tito.requests import ApiError, invalid

if TYPE_CHECKING:
    from gyre_tito.batch import Batch
    from gyre_tito.execution import Plan

HEADER = "idempotency-key"
_LONGEST = 255


@dataclass(frozen=True, slots=True)
class RequestName:
    """Digests of a client's name for a request (with its session) and of the request's dialect and body."""

    key: bytes
    body: bytes


def request_name(key: str, session: str | None, dialect: str, body: bytes) -> RequestName | None:
    """The name of a request; None if the client gave none. Error: the key is too long."""
    if not key:
        return None
    if len(key) > _LONGEST:
        raise invalid(f"the {HEADER} header has {len(key)} characters; at most {_LONGEST} are kept", HEADER)
    return RequestName(_digest((session or "").encode(), key.encode()), _digest(dialect.encode(), body))


def _digest(first: bytes, second: bytes) -> bytes:
    hasher = hashlib.blake2b(len(first).to_bytes(8, "little") + first, digest_size=16)
    hasher.update(second)
    return hasher.digest()


def retry_notes(name: RequestName | None, plans: Sequence[Plan]) -> list[RetryNote]:
    """What each call of a named request notes of it; nothing for one without a name."""
    if name is None:
        return []
    first = plans[0].index
    return [RetryNote(name.key, name.body, number, len(plans), first) for number in range(len(plans))]


@dataclass(frozen=True, slots=True)
class Answered:
    """A named request that was answered by these calls, in the order of its choices."""

    body: bytes
    calls: tuple[int, ...]


class Attempt:
    """A named request that is being answered."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self._batches: asyncio.Future[Sequence[Batch]] = asyncio.get_running_loop().create_future()

    async def batches(self) -> Sequence[Batch]:
        """Its batches once it runs; none if it was refused."""
        return await asyncio.shield(self._batches)

    def settle(self, batches: Sequence[Batch]) -> None:
        """Say what came of it."""
        if not self._batches.done():
            self._batches.set_result(batches)


class Attempts:
    """The named requests of one execution."""

    def __init__(self) -> None:
        self._known: dict[bytes, Attempt | Answered] = {}
        self._restored: dict[tuple[bytes, int], dict[int, int]] = {}

    def find(self, name: RequestName) -> Attempt | Answered | None:
        """What is known under a name. Error: it named another request."""
        found = self._known.get(name.key)
        if found is not None and found.body != name.body:
            raise ApiError(
                422,
                "invalid_request",
                f"this {HEADER} came with another request before; use a new key for every request, and the same "
                "key only to send the very same body again",
                param=HEADER,
            )
        return found

    def begin(self, name: RequestName) -> Attempt:
        """Take a name for a request that is about to run."""
        attempt = self._known[name.key] = Attempt(name.body)
        return attempt

    def refused(self, name: RequestName, attempt: Attempt) -> None:
        """The request did not come to run."""
        self._known.pop(name.key, None)
        attempt.settle(())

    def runs(self, name: RequestName, attempt: Attempt, batches: Sequence[Batch]) -> None:
        """The request runs; the name is kept if every call of it ends well."""
        attempt.settle(batches)
        left = {task for batch in batches for task in batch.tasks}

        def ended(task: asyncio.Task[None]) -> None:
            left.discard(task)
            if left:
                return
            if all(batch.answerable for batch in batches):
                calls = tuple(run.plan.index for batch in batches for run in batch.runs)
                self._known[name.key] = Answered(name.body, calls)
            else:
                self._known.pop(name.key, None)

        for task in tuple(left):
            task.add_done_callback(ended)

    def restore(self, call: int, note: RetryNote) -> None:
        """Put back what an earlier life of the proxy recorded of a call."""
        calls = self._restored.setdefault((note.key, note.first), {})
        calls[note.number] = call
        if len(calls) == note.choices:
            self._known[note.key] = Answered(note.body, tuple(calls[number] for number in range(note.choices)))
