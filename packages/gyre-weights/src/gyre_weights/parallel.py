"""A few threads for work over memory: digests and copies, which leave Python's lock alone while they run.

Invariant: no more threads than processors that this process may use, and on one processor none at all; errors are those
that doing one after the other would raise. Not here: anything that holds the lock, for which threads are of no use.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
THREADS = 4
"""As many saturate a socket's memory, nearly."""
SMALL = 1 << 20
"""Bytes below which a thread costs more than it saves."""


def processors() -> int:
    """How many this process may use, up to THREADS."""
    return min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def each(work: Callable[[T], object], items: Sequence[T], size: Callable[[T], int]) -> None:
    """`work` on every item, the largest first. The error of the first item that has one, after all have ended."""
    threads = min(processors(), len(items))
    if threads < 2 or sum(map(size, items)) < SMALL:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(threads, "gyre-weights") as pool:
        order = sorted(range(len(items)), key=lambda index: -size(items[index]))
        running = {index: pool.submit(work, items[index]) for index in order}
    for index in range(len(items)):
        running[index].result()
