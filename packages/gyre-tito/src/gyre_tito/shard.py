"""Which worker process serves which execution.

Invariant: an execution lives in one worker, chosen by its name alone, so that its tree has one writer. Workers share
the store file (SQLite orders their commits) and nothing else. Pure data.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass


def worker_of(execution: str, workers: int) -> int:
    """The worker (0 to workers-1) that serves `execution`."""
    return zlib.crc32(execution.encode()) % workers


@dataclass(frozen=True, slots=True)
class Shard:
    """One worker's view: its number and the base URLs of all workers, in order."""

    index: int
    urls: Sequence[str]

    def owns(self, execution: str) -> bool:
        """Whether `execution` is served here."""
        return worker_of(execution, len(self.urls)) == self.index

    def url_of(self, execution: str) -> str:
        """Base URL of the worker that serves `execution`."""
        return self.urls[worker_of(execution, len(self.urls))]
