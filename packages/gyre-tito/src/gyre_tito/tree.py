"""The trajectory tree: all calls of one execution merged on their token prefixes.

Invariants. The path of a call (root to its leaf) is, token for token, what the engine consumed and produced in that
call. A sampled token lies in exactly one node, with one logprob and one policy version; a node is wholly sampled or
wholly context. Sampled tokens are never merged: two calls that happened to sample the same ids own two nodes. Context
that several calls share is stored once. A node's end never moves: splitting gives the *head* a new id.

The tree knows tokens, not text; it performs no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gyre_tito.arrays import TreeArrays
from gyre_tito.growable import Growable
from gyre_tito.records import CallRecord

ROOT = -1


@dataclass(frozen=True, slots=True, eq=False)
class PathView:
    """One path as the model saw it, P tokens: ids int32[P], sampled bool[P], logprobs float32[P] (NaN where not
    sampled), versions int32[P] (-1 where not sampled)."""

    token_ids: NDArray[np.int32]
    sampled: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens: tokens start:end of the tree's own storage; `depth` counts path tokens before it.

    `call` sampled it, or is the first whose prompt contained it. `kept` is where its logprobs begin (sampled nodes).
    """

    parent: int
    start: int
    end: int
    depth: int
    sampled: bool
    call: int
    kept: int

    @property
    def path_end(self) -> int:
        """Path tokens up to and including this node."""
        return self.depth + self.end - self.start


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Where a call lies: the node that ends its prompt, the node that ends its path, and both lengths in tokens."""

    prompt_node: int
    leaf: int
    prompt_len: int
    path_len: int


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """Length of the longest common prefix of two id arrays."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


class TrajectoryTree:
    """A tree over flat token storage. Calls are inserted in any order in which parents come before children."""

    def __init__(self) -> None:
        self._ids: Growable[np.int32] = Growable(np.int32)
        self._logprobs: Growable[np.float32] = Growable(np.float32)
        self._versions: Growable[np.int32] = Growable(np.int32)
        self._nodes: list[Node] = []
        self._children: dict[int, list[int]] = {ROOT: []}
        self._calls: dict[int, CallPlace] = {}
        self._routed: dict[int, tuple[int, NDArray[np.int16]]] = {}

    @classmethod
    def from_records(cls, records: Iterable[CallRecord]) -> TrajectoryTree:
        """Build the tree of these calls."""
        tree = cls()
        for record in records:
            tree.insert(record)
        return tree

    # -- writing -------------------------------------------------------------------------------------------------

    def insert(self, call: CallRecord) -> CallPlace:
        """Add one call. Work is proportional to its new tokens. Errors: unknown parent, prefix longer than its path."""
        if call.index in self._calls:
            raise ValueError(f"inserting call {call.index}: the tree already has a call with that index")
        sizes = {len(call.sampled_ids), len(call.logprobs), len(call.versions)}
        if len(sizes) != 1:
            raise ValueError(
                f"inserting call {call.index}: {len(call.sampled_ids)} sampled ids came with {len(call.logprobs)} "
                f"logprobs and {len(call.versions)} versions; every sampled token needs one of each"
            )
        at = self._node_ending_at(call.parent, call.prefix_len)
        at, matched = self._descend(at, np.asarray(call.context_ids, dtype=np.int32))
        if matched < len(call.context_ids):
            at = self._add(at, call.context_ids[matched:], sampled=False, call=call.index)
        prompt_node = at
        if len(call.sampled_ids):
            at = self._add(at, call.sampled_ids, sampled=True, call=call.index)
            self._logprobs.extend(call.logprobs)
            self._versions.extend(call.versions)
        place = CallPlace(prompt_node, at, call.prompt_len, call.path_len)
        self._calls[call.index] = place
        if call.routed_experts is not None:
            self._routed[call.index] = (call.routed_from, np.asarray(call.routed_experts, dtype=np.int16))
        return place

    def _add(self, parent: int, ids: NDArray[np.int32], *, sampled: bool, call: int) -> int:
        start = len(self._ids)
        self._ids.extend(ids)
        depth = 0 if parent == ROOT else self._nodes[parent].path_end
        kept = len(self._logprobs) if sampled else -1
        self._nodes.append(Node(parent, start, len(self._ids), depth, sampled, call, kept))
        node = len(self._nodes) - 1
        self._children[parent].append(node)
        self._children[node] = []
        return node

    def _split(self, node: int, offset: int) -> int:
        """Cut `node` after `offset` of its tokens; the head gets a new id, the tail keeps the old one."""
        old = self._nodes[node]
        head = len(self._nodes)
        cut = old.start + offset
        self._nodes.append(Node(old.parent, old.start, cut, old.depth, old.sampled, old.call, old.kept))
        kept = old.kept + offset if old.sampled else -1
        self._nodes[node] = Node(head, cut, old.end, old.depth + offset, old.sampled, old.call, kept)
        siblings = self._children[old.parent]
        siblings[siblings.index(node)] = head
        self._children[head] = [node]
        return head

    def _node_ending_at(self, call: int, length: int) -> int:
        """The node that ends after `length` tokens of `call`'s path (split if needed); ROOT for length 0."""
        if length == 0:
            return ROOT
        if call not in self._calls:
            raise ValueError(f"looking for the first {length} tokens of call {call}: the tree has no such call")
        place = self._calls[call]
        if length > place.path_len:
            raise ValueError(
                f"looking for the first {length} tokens of call {call}: its path has only {place.path_len}"
            )
        node = place.leaf
        while self._nodes[node].depth >= length:
            node = self._nodes[node].parent
        inside = self._nodes[node]
        if inside.path_end == length:
            return node
        return self._split(node, length - inside.depth)

    def _descend(self, at: int, ids: NDArray[np.int32]) -> tuple[int, int]:
        """Follow children of `at` as far as they equal `ids`, splitting the last node if need be."""
        node, used, matched = self._walk(at, ids)
        if matched and used < self._nodes[node].end - self._nodes[node].start:
            node = self._split(node, used)
        return node, matched

    def _walk(self, at: int, ids: NDArray[np.int32]) -> tuple[int, int, int]:
        """The farthest that `ids` can be followed below `at`: (node, tokens used of it, tokens matched in all).

        Twins (calls that sampled the same ids) are all tried, because only one of them may go on as `ids` does.
        """
        best = (at, 0, 0)
        stack = [(at, 0)]
        while stack:
            parent, matched = stack.pop()
            if matched == len(ids):
                continue
            for child in reversed(self._children[parent]):
                node = self._nodes[child]
                if int(self._ids[node.start]) != int(ids[matched]):
                    continue
                used = common_prefix(self._ids.view(node.start, node.end), ids[matched:])
                if matched + used >= best[2]:
                    best = (child, used, matched + used)
                if used == node.end - node.start:
                    stack.append((child, matched + used))
        return best

    # -- reading -------------------------------------------------------------------------------------------------

    def longest_prefix(self, ids: NDArray[np.int32]) -> tuple[int, int]:
        """How much of `ids` some recorded path begins with: (a call whose path does, number of tokens).

        (-1, 0) when not even the first token is known. Work is proportional to the tokens that match.
        """
        node, _, matched = self._walk(ROOT, ids)
        return (ROOT, 0) if matched == 0 else (self._nodes[node].call, matched)

    def path_ids(self, call: int, length: int | None = None) -> NDArray[np.int32]:
        """Token ids int32 of the first `length` tokens (default: all) of `call`'s path, a copy."""
        place = self.place(call)
        size = place.path_len if length is None else length
        out = np.empty(size, dtype=np.int32)
        for node in self._up(place.leaf):
            if node.depth < size:
                out[node.depth : min(node.path_end, size)] = self._ids.view(node.start, node.end)[: size - node.depth]
        return out

    def tail_ids(self, call: int, count: int) -> NDArray[np.int32]:
        """The last `count` ids (or all, if fewer) of `call`'s path; work is proportional to `count`."""
        parts: list[NDArray[np.int32]] = []
        missing = count
        for node in self._up(self.place(call).leaf):
            if missing <= 0:
                break
            parts.append(self._ids.view(max(node.start, node.end - missing), node.end))
            missing -= node.end - node.start
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)

    def path(self, call: int) -> PathView:
        """`call`'s whole path with everything training needs."""
        place = self.place(call)
        sampled = np.zeros(place.path_len, dtype=np.bool_)
        logprobs = np.full(place.path_len, np.nan, dtype=np.float32)
        versions = np.full(place.path_len, -1, dtype=np.int32)
        for node in self._up(place.leaf):
            if node.sampled:
                span = slice(node.depth, node.path_end)
                size = node.end - node.start
                sampled[span] = True
                logprobs[span] = self._logprobs.view(node.kept, node.kept + size)
                versions[span] = self._versions.view(node.kept, node.kept + size)
        return PathView(self.path_ids(call), sampled, logprobs, versions)

    def _up(self, node: int) -> Iterator[Node]:
        while node != ROOT:
            yield self._nodes[node]
            node = self._nodes[node].parent

    def place(self, call: int) -> CallPlace:
        """Where `call` lies. Error: no such call."""
        try:
            return self._calls[call]
        except KeyError:
            raise ValueError(f"the tree has no call {call}; it has {len(self._calls)} calls") from None

    @property
    def calls(self) -> tuple[int, ...]:
        """Indices of the calls in the order they came in."""
        return tuple(self._calls)

    @property
    def node_count(self) -> int:
        """Nodes in the tree."""
        return len(self._nodes)

    @property
    def token_count(self) -> int:
        """Tokens in the tree; a shared prefix counts once."""
        return len(self._ids)

    @property
    def sampled_count(self) -> int:
        """Sampled tokens in the tree, each of which is owned once."""
        return len(self._logprobs)

    @property
    def nbytes(self) -> int:
        """Bytes reserved for token data."""
        return self._ids.nbytes + self._logprobs.nbytes + self._versions.nbytes

    def node(self, index: int) -> Node:
        """Node by id."""
        return self._nodes[index]

    def node_ids(self, index: int) -> NDArray[np.int32]:
        """The ids of one node, a read-only view."""
        node = self._nodes[index]
        return self._ids.view(node.start, node.end)

    def children(self, index: int = ROOT) -> tuple[int, ...]:
        """Children of a node, oldest first; of the roots' common parent by default."""
        return tuple(self._children[index])

    def branch_points(self) -> tuple[int, ...]:
        """Nodes with more than one child (ROOT included when there are several roots)."""
        return tuple(node for node, children in self._children.items() if len(children) > 1)

    def leaves(self) -> tuple[int, ...]:
        """Nodes without children."""
        return tuple(node for node, children in self._children.items() if not children and node != ROOT)

    def leaf_calls(self) -> tuple[int, ...]:
        """One call for every leaf: together their paths hold every token."""
        by_leaf: dict[int, int] = {}
        for call, place in self._calls.items():
            by_leaf.setdefault(place.leaf, call)
        return tuple(by_leaf[leaf] for leaf in self.leaves() if leaf in by_leaf)

    def preorder(self) -> list[int]:
        """Node ids, parents first, every subtree contiguous, children oldest first."""
        order: list[int] = []
        stack = list(reversed(self._children[ROOT]))
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(reversed(self._children[node]))
        return order

    def to_arrays(self) -> TreeArrays:
        """The tree as tree arrays v1 (see `gyre_tito.arrays`)."""
        order = self.preorder()
        nodes = [self._nodes[node] for node in order]
        rank = {node: position for position, node in enumerate(order)}
        rank[ROOT] = ROOT
        sizes = np.array([node.end - node.start for node in nodes], dtype=np.int64)
        starts = np.zeros(len(nodes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=starts[1:])
        total = int(starts[-1])
        ids = np.empty(total, dtype=np.int32)
        sampled = np.zeros(total, dtype=np.bool_)
        logprobs = np.full(total, np.nan, dtype=np.float32)
        versions = np.full(total, -1, dtype=np.int32)
        call_id = np.empty(total, dtype=np.int32)
        for node, begin, end in zip(nodes, starts[:-1], starts[1:], strict=True):
            ids[begin:end] = self._ids.view(node.start, node.end)
            call_id[begin:end] = node.call
            if node.sampled:
                sampled[begin:end] = True
                logprobs[begin:end] = self._logprobs.view(node.kept, node.kept + int(end - begin))
                versions[begin:end] = self._versions.view(node.kept, node.kept + int(end - begin))
        return TreeArrays(
            node_parent=np.array([rank[node.parent] for node in nodes], dtype=np.int32),
            node_start=starts,
            token_ids=ids,
            sampled=sampled,
            logprobs=logprobs,
            versions=versions,
            call_id=call_id,
            routed_experts=self._routed_rows(order, starts),
        )

    def _routed_rows(self, order: list[int], starts: NDArray[np.int64]) -> NDArray[np.int16] | None:
        """Expert choices aligned with preorder tokens, -1 where unknown. A token takes its owning call's row; without
        one, that of the first call below that read it (a call never reads the last token that it samples)."""
        if not self._routed:
            return None
        shape = next(iter(self._routed.values()))[1].shape[1:]
        out = np.full((int(starts[-1]), *shape), -1, dtype=np.int16)
        begins = dict(zip(order, starts.tolist(), strict=False))
        for call, (first, rows) in self._routed.items():  # an owner before all others that have its token
            index = self._calls[call].leaf
            while index != ROOT and (node := self._nodes[index]).path_end > first:
                low, high = max(node.depth, first), min(node.path_end, first + len(rows))
                if low < high:
                    begin = begins[index] + low - node.depth
                    here = out[begin : begin + high - low]
                    np.copyto(here, rows[low - first : high - first], where=here < 0)
                index = node.parent
        return out
