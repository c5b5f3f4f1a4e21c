"""Cut a batch into micro-batches that fit a token budget.

A part is a set of leaves with all that is above them. What stands above leaves of several parts is computed again in
each of them (repeated), but its loss entries go to the first part alone. The invariants: every entry is in exactly
one part, every part's paths are whole from the root, every part fits the budget. Runs of leaves in preorder are
chosen by dynamic programming so that the repeated tokens are the fewest possible for runs in that order; the runs are
then packed into bins, largest first. Choosing the best sets of leaves in any order would be bin packing, which is not
attempted. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail
from gyre_loss.batch import TreeBatch
from gyre_loss.layout import Layout

_DOING = "partitioning a batch"


@dataclass(frozen=True, slots=True)
class Partition:
    """``parts``, and what they cost.

    ``tree_tokens``: tokens that need computing once; ``pruned_tokens``: tokens left out since no loss depends on
    them; ``computed_tokens``: the sum over parts; ``repeated_tokens``: computed - tree; ``over_budget``: parts of one
    path longer than the budget (only with ``oversize="alone"``).
    """

    parts: tuple[TreeBatch, ...]
    tree_tokens: int
    pruned_tokens: int
    computed_tokens: int
    repeated_tokens: int
    over_budget: int


def prune(batch: TreeBatch) -> TreeBatch:
    """The batch without tokens that no loss entry depends on (tails after the last entry, branches without any)."""
    nodes = batch.node_parent.shape[0]
    keep = np.zeros(nodes, np.int64)
    node = np.searchsorted(batch.node_start, batch.entry_token, side="right") - 1
    np.maximum.at(keep, node, batch.entry_token - batch.node_start[node] + 1)
    length = np.diff(batch.node_start)
    for index in range(nodes - 1, -1, -1):
        parent = int(batch.node_parent[index])
        if keep[index] and parent >= 0:
            keep[parent] = length[parent]
    return _cut(batch, keep, np.ones(batch.entries, np.bool_))


def partition(batch: TreeBatch, max_tokens: int, *, oversize: str = "error") -> Partition:
    """Micro-batches of at most ``max_tokens`` tokens that together hold every entry of ``batch`` once.

    ``oversize``: what to do with a path longer than the budget, ``"error"`` (ValueError) or ``"alone"`` (a part of
    its own above the budget, for the ``dfs`` method).
    """
    if max_tokens < 2:
        fail(_DOING, f"max_tokens = {max_tokens}", "room for two tokens or more")
    if oversize not in ("error", "alone"):
        fail(_DOING, f"oversize = {oversize!r}", "'error' or 'alone'")
    lean = prune(batch)
    if not lean.entries:
        return Partition((), 0, batch.tokens, 0, 0, 0)
    leaves, path_tokens, shared = _leaves(lean)
    longest = int(path_tokens.max())
    if longest > max_tokens and oversize == "error":
        fail(
            _DOING,
            f"a path of {longest} tokens",
            f"paths within max_tokens = {max_tokens}",
            'Raise max_tokens, or pass oversize="alone" and compute that part with method="dfs".',
        )
    runs = _best_runs(path_tokens.tolist(), shared.tolist(), max_tokens)
    sizes = [_run_tokens(path_tokens, shared, first, last) for first, last in runs]
    bins = _pack(sizes, max_tokens)
    owner = _first_run(lean, leaves, runs)
    parts = tuple(_part(lean, leaves, [runs[run] for run in chosen], owner, chosen) for chosen in bins)
    computed = sum(part.tokens for part in parts)
    return Partition(
        parts=parts,
        tree_tokens=lean.tokens,
        pruned_tokens=batch.tokens - lean.tokens,
        computed_tokens=computed,
        repeated_tokens=computed - lean.tokens,
        over_budget=sum(part.tokens > max_tokens for part in parts),
    )


def _leaves(batch: TreeBatch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Leaf nodes in preorder, tokens on each one's path, tokens it shares with the path of the leaf before."""
    place = Layout.of(batch)
    inner = np.zeros(batch.node_parent.shape[0], np.bool_)
    inner[batch.node_parent[batch.node_parent >= 0]] = True
    leaves = np.flatnonzero(~inner).astype(np.int64)
    path_tokens = place.position[batch.node_start[1:][leaves] - 1] + 1
    shared = np.zeros(leaves.shape[0], np.int64)
    meeting = batch.node_parent[leaves[:-1] + 1].astype(np.int64)
    has = meeting >= 0
    shared[1:][has] = place.position[batch.node_start[1:][meeting[has]] - 1] + 1
    return leaves, path_tokens, shared


def _best_runs(path_tokens: Sequence[int], shared: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Cut leaves 0..L-1 into runs within the budget: fewest tokens, then fewest runs. O(L x leaves per run)."""
    count = len(path_tokens)
    best: list[tuple[int, int, int]] = [(0, 0, 0)]
    for last in range(count):
        choice: tuple[int, int, int] | None = None
        below = 0
        for first in range(last, -1, -1):
            size = path_tokens[first] + below
            if size > budget and first < last:
                break
            option = (best[first][0] + size, best[first][1] + 1, first)
            if choice is None or option < choice:
                choice = option
            below += path_tokens[first] - shared[first]
        assert choice is not None
        best.append(choice)
    runs: list[tuple[int, int]] = []
    last = count
    while last > 0:
        begin = best[last][2]
        runs.append((begin, last - 1))
        last = begin
    return runs[::-1]


def _run_tokens(path_tokens: NDArray[np.int64], shared: NDArray[np.int64], first: int, last: int) -> int:
    return int(path_tokens[first : last + 1].sum() - shared[first + 1 : last + 1].sum())


def _pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Runs into bins, first fit decreasing; runs and bins come out in order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for run in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        for index, free in enumerate(room):
            if sizes[run] <= free:
                bins[index].append(run)
                room[index] -= sizes[run]
                break
        else:
            bins.append([run])
            room.append(budget - sizes[run])
    return sorted(sorted(chosen) for chosen in bins)


def _first_run(batch: TreeBatch, leaves: NDArray[np.int64], runs: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """int64[M]: the first run that computes each node; it owns the node's entries."""
    owner = np.full(batch.node_parent.shape[0], -1, np.int64)
    for index, (begin, last) in enumerate(runs):
        owner[leaves[begin : last + 1]] = index
    for node in range(owner.shape[0] - 1, -1, -1):
        parent = int(batch.node_parent[node])
        if parent >= 0 and (owner[parent] < 0 or owner[node] < owner[parent]):
            owner[parent] = owner[node]
    return owner


def _part(
    batch: TreeBatch,
    leaves: NDArray[np.int64],
    runs: Sequence[tuple[int, int]],
    owner: NDArray[np.int64],
    chosen: Sequence[int],
) -> TreeBatch:
    inside = np.zeros(batch.node_parent.shape[0], np.bool_)
    for begin, last in runs:
        inside[leaves[begin : last + 1]] = True
    for node in range(inside.shape[0] - 1, -1, -1):
        parent = int(batch.node_parent[node])
        if inside[node] and parent >= 0:
            inside[parent] = True
    entry_node = np.searchsorted(batch.node_start, batch.entry_token, side="right") - 1
    owned = np.isin(owner, np.array(chosen))[entry_node]
    return _cut(batch, np.where(inside, np.diff(batch.node_start), 0), owned)


def _cut(batch: TreeBatch, keep: NDArray[np.int64], owned: NDArray[np.bool_]) -> TreeBatch:
    """The batch with the first ``keep[i]`` tokens of each node (0: without it) and the owned entries.

    ``keep`` must be closed upwards: a kept node's parent is kept whole.
    """
    kept = np.flatnonzero(keep > 0)
    renumber = np.full(keep.shape[0] + 1, -1, np.int64)
    renumber[kept] = np.arange(kept.shape[0])
    start = np.concatenate([[0], np.cumsum(keep[kept])]).astype(np.int64)
    within = np.arange(start[-1]) - np.repeat(start[:-1], keep[kept])
    source = within + np.repeat(batch.node_start[:-1][kept], keep[kept])
    target = np.full(batch.tokens, -1, np.int64)
    target[source] = np.arange(source.shape[0])
    experts = batch.routed_experts
    return TreeBatch(
        node_parent=renumber[batch.node_parent[kept]].astype(np.int32),
        node_start=start,
        token_ids=batch.token_ids[source],
        entry_token=target[batch.entry_token[owned]],
        entry_execution=batch.entry_execution[owned],
        entry_weight=batch.entry_weight[owned],
        entry_advantage=batch.entry_advantage[owned],
        entry_logprob=batch.entry_logprob[owned],
        entry_version=batch.entry_version[owned],
        entry_proximal=batch.entry_proximal[owned],
        entry_reference=batch.entry_reference[owned],
        execution_ids=batch.execution_ids,
        execution_tokens=batch.execution_tokens,
        routed_experts=None if experts is None else experts[source],
    )
