"""A batch cut into a given number of shares of about equal size, for ranks that work at the same time; and the share of
one execution.

The invariant is `partition`'s: every loss entry is in exactly one share, so losses and gradients of the shares add up
to those of the batch. What stands above several shares is computed in each of them. Needs numpy alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gyre_loss._check import fail
from gyre_loss.batch import ENTRY_DTYPES, TreeBatch
from gyre_loss.partitioner import partition, prune


def shares(batch: TreeBatch, count: int, *, whole: bool = False) -> tuple[TreeBatch, ...]:
    """At most ``count`` batches that together are ``batch``; the largest is as small as a partition by a token budget
    makes it. Fewer when there are fewer leaves. ``whole``: one share, for objectives that look at whole executions.

    >>> nan = float("nan")
    >>> batch = TreeBatch.from_arrays(node_parent=[-1, 0, 0], node_start=[0, 1, 3, 5], token_ids=[5, 6, 7, 8, 9],
    ...     sampled=[False, True, True, True, True], logprobs=[nan, -1, -1, -1, -1], versions=[-1, 0, 0, 0, 0])
    >>> [share.tokens for share in shares(batch, 2)]
    [3, 3]
    """
    if count < 1:
        fail("sharing a batch", f"count = {count}", "1 or more")
    if count == 1 or whole or not batch.entries:
        return (batch,)
    low, high = 2, max(2, batch.tokens)
    while low < high:
        middle = (low + high) // 2
        if len(partition(batch, middle, oversize="alone").parts) <= count:
            high = middle
        else:
            low = middle + 1
    return partition(batch, high, oversize="alone").parts


def weightless(batch: TreeBatch) -> TreeBatch:
    """The same tokens with no weight in the loss: for a rank that has no share but must take part in collectives.

    >>> batch = TreeBatch.from_arrays(node_parent=[-1], node_start=[0, 2], token_ids=[5, 6], sampled=[False, True],
    ...     logprobs=[float("nan"), -1], versions=[-1, 0])
    >>> float(weightless(batch).entry_weight.sum()), weightless(batch).tokens
    (0.0, 2)
    """
    return replace(batch, entry_weight=np.zeros_like(batch.entry_weight))


def alone(batch: TreeBatch, execution: str) -> TreeBatch:
    """What of ``batch`` trains one execution: its loss entries and the tokens they depend on. ValueError for a name
    without entries here.

    >>> nan = float("nan")
    >>> batch = TreeBatch.from_arrays(node_parent=[-1], node_start=[0, 3], token_ids=[5, 6, 7],
    ...     sampled=[False, True, False], logprobs=[nan, -1, nan], versions=[-1, 0, -1], execution="e")
    >>> alone(batch, "e").token_ids.tolist()
    [5, 6]
    """
    chosen = np.array([name == execution for name in batch.execution_ids], np.bool_)[batch.entry_execution]
    if not chosen.any():
        fail("taking one execution out of a batch", f"{execution!r}", f"one of {', '.join(batch.execution_ids)}")
    entries = {name: getattr(batch, name)[chosen] for name in ("entry_token", *ENTRY_DTYPES)}
    return prune(replace(batch, **entries))
