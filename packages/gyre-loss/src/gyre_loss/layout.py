"""Where every token of a forest stands: positions, predecessors, subtree ends, segments.

Everything that the methods of computing need to know of a tree's shape, derived from ``node_parent`` and
``node_start`` alone, O(N). Because nodes are in preorder, token indices serve as ``tin``: token k is visible to token
q if and only if ``k <= q < subtree_end[k]``. Needs numpy alone; knows nothing of losses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_loss.batch import TreeBatch


@dataclass(frozen=True, slots=True)
class Layout:
    """The derived arrays of a forest of M nodes and N tokens.

    ``token_node`` int32[N]; ``position`` int64[N], along the path, 0 at a root's first token; ``previous`` int64[N],
    the token before it on its path (-1 at a root's first); ``subtree_end`` int64[N], one past the last token of the
    subtree of its node; ``node_end`` int64[M], the same per node.
    """

    token_node: NDArray[np.int32]
    position: NDArray[np.int64]
    previous: NDArray[np.int64]
    subtree_end: NDArray[np.int64]
    node_end: NDArray[np.int64]

    @classmethod
    def of(cls, batch: TreeBatch) -> Layout:
        """The Layout of a batch's forest, O(N)."""
        parent, start = batch.node_parent.astype(np.int64), batch.node_start
        nodes, tokens = parent.shape[0], batch.tokens
        length = np.diff(start)
        depth = np.zeros(nodes, np.int64)
        end = start[1:].copy()
        parents = parent.tolist()
        for node, above in enumerate(parents):
            if above >= 0:
                depth[node] = depth[above] + length[above]
        for node in range(nodes - 1, -1, -1):
            above = parents[node]
            if above >= 0:
                end[above] = max(end[above], end[node])
        token_node = np.repeat(np.arange(nodes, dtype=np.int32), length)
        index = np.arange(tokens, dtype=np.int64)
        position = index - start[:-1][token_node] + depth[token_node]
        previous = index - 1
        has_parent = parent >= 0
        previous[start[:-1]] = np.where(has_parent, start[1:][np.where(has_parent, parent, 0)] - 1, -1)
        return cls(token_node, position, previous, end[token_node], end)

    @property
    def longest_path(self) -> int:
        """Tokens on the longest path from a root."""
        return int(self.position.max()) + 1 if self.position.shape[0] else 0


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens ``start:stop`` without a branch in it; its subtree is ``start:end``.

    A chain of only children is one segment, so segments are as few as the branching allows. ``parent`` is the index
    of the segment above (-1 for none), ``depth`` the position of its first token.
    """

    start: int
    stop: int
    end: int
    parent: int
    depth: int


def segments(batch: TreeBatch) -> tuple[Segment, ...]:
    """The batch's forest as segments in preorder: chains of only children are merged."""
    parent, start = batch.node_parent.tolist(), batch.node_start.tolist()
    nodes = len(parent)
    children = np.bincount(batch.node_parent[batch.node_parent >= 0], minlength=nodes).tolist()
    node_end = Layout.of(batch).node_end.tolist()
    found: list[list[int]] = []
    owner = [0] * nodes
    for node, above in enumerate(parent):
        if above >= 0 and children[above] == 1:
            owner[node] = owner[above]
            found[owner[node]][1] = start[node + 1]
            continue
        owner[node] = len(found)
        depth = 0
        if above >= 0:
            up = found[owner[above]]
            depth = up[4] + up[1] - up[0]
        found.append([start[node], start[node + 1], node_end[node], owner[above] if above >= 0 else -1, depth])
    return tuple(Segment(*numbers) for numbers in found)


def paths(batch: TreeBatch) -> tuple[NDArray[np.int64], ...]:
    """Token indices of every root-to-leaf path, one array per leaf, leaves in preorder."""
    parent, start = batch.node_parent.tolist(), batch.node_start.tolist()
    inner = set(parent)
    found: list[NDArray[np.int64]] = []
    for leaf in range(len(parent)):
        if leaf in inner:
            continue
        pieces = []
        node = leaf
        while node >= 0:
            pieces.append(np.arange(start[node], start[node + 1], dtype=np.int64))
            node = parent[node]
        found.append(np.concatenate(pieces[::-1]))
    return tuple(found)
