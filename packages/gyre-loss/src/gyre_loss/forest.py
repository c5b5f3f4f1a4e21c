"""Merge the trees of several executions into one forest, prefix by prefix.

The n executions of a group start from the same prompt, and forked searches share much more. Merging them computes a
shared prefix once. The invariant: every path of every execution is a path of the forest, token by token, and every
sampled token of every execution keeps an entry of its own (its behaviour log-probability, its version), also where
two executions happened to sample the same token after the same context. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail, vector
from gyre_loss.arrays import TreeArrays
from gyre_loss.batch import NO_LOGPROB, TreeBatch

_DOING = "merging executions into a forest"


@dataclass(frozen=True, slots=True)
class TrainedTree:
    """One execution's tree with what its tokens weigh.

    ``trains`` bool[N]: the sampled tokens that carry loss; ``weight`` per trained token (1/(K_tau |T_k|));
    ``advantage`` of the execution; ``routed_experts`` int16[N, layers, k] or None.
    """

    execution: str
    tree: TreeArrays
    trains: NDArray[np.bool_]
    weight: float
    advantage: float
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        """Check that only sampled tokens train; raises ValueError."""
        trains = vector(self.trains, "trains", np.bool_, _DOING, self.tree.tokens)
        object.__setattr__(self, "trains", trains)
        wrong = np.flatnonzero(trains & ~self.tree.sampled)
        if wrong.shape[0]:
            fail(_DOING, f"trains[{wrong[0]}] of {self.execution!r} is a context token", "sampled tokens only")


@dataclass(slots=True)
class _Claim:
    """Tokens ``source:source+length`` of execution ``owner`` stand at ``offset`` of a node."""

    owner: int
    source: int
    offset: int
    length: int


@dataclass(slots=True)
class _Node:
    tokens: NDArray[np.int32]
    claims: list[_Claim]
    children: dict[int, _Node] = field(default_factory=dict)
    rest: _Node | None = None

    def split(self, at: int) -> None:
        """Keep ``tokens[:at]`` here; the rest, its claims and the children go to a node below."""
        below = _Node(self.tokens[at:], [], self.children, self.rest)
        mine: list[_Claim] = []
        for claim in self.claims:
            upper = min(max(at - claim.offset, 0), claim.length)
            if upper:
                mine.append(_Claim(claim.owner, claim.source, claim.offset, upper))
            if upper < claim.length:
                offset = max(claim.offset - at, 0)
                below.claims.append(_Claim(claim.owner, claim.source + upper, offset, claim.length - upper))
        self.tokens, self.claims, self.rest = self.tokens[:at], mine, below
        self.children = {int(below.tokens[0]): below}


def merge(trees: Sequence[TrainedTree]) -> TreeBatch:
    """One TreeBatch over all the given executions; O(total tokens).

    Raises ValueError for no executions, for a repeated execution name, and where some but not all executions bring
    routed experts.

    >>> nan = float("nan")
    >>> def tree(last): return TreeArrays([-1], [0, 3], [1, 2, last], [0, 0, 1], [nan, nan, -1.0], [-1, -1, 0])
    >>> mask = np.array([False, False, True])
    >>> batch = merge([TrainedTree("a", tree(3), mask, 0.5, 1.0), TrainedTree("b", tree(4), mask, 0.5, -1.0)])
    >>> batch.token_ids.tolist(), batch.node_parent.tolist(), batch.entry_token.tolist()
    ([1, 2, 3, 4], [-1, 0, 0], [2, 3])
    """
    names = [tree.execution for tree in trees]
    if not names or len(set(names)) != len(names):
        fail(_DOING, f"execution names {names}", "at least one, all different")
    with_experts = [tree.routed_experts is not None for tree in trees]
    if any(with_experts) != all(with_experts):
        lacking = names[with_experts.index(False)]
        fail(_DOING, f"execution {lacking!r} has no routed experts, others have", "all or none of them")
    top = _Node(np.zeros(0, np.int32), [])
    for owner, item in enumerate(trees):
        _insert(top, owner, item.tree)
    return _flatten(top, trees)


def pad(batch: TreeBatch, multiple: int, token_id: int = 0) -> TreeBatch:
    """The batch with tokens added until their number is a multiple of ``multiple``, as a tree of its own.

    Sequence-parallel and 8-bit trainers want lengths that divide. The added tokens see nothing but each other, train
    nothing and are seen by nothing, so neither loss nor gradient changes. Raises ValueError for multiples below 1.

    >>> nan = float("nan")
    >>> batch = TreeBatch.from_arrays(node_parent=[-1], node_start=[0, 3], token_ids=[5, 6, 7],
    ...     sampled=[False, True, True], logprobs=[nan, -0.5, -1.0], versions=[-1, 0, 0])
    >>> pad(batch, 4).token_ids.tolist(), pad(batch, 4).node_parent.tolist()
    ([5, 6, 7, 0], [-1, -1])
    """
    if multiple < 1:
        fail("padding a batch", f"multiple = {multiple}", "1 or more")
    extra = -batch.tokens % multiple
    if not extra:
        return batch
    experts = batch.routed_experts
    if experts is not None:
        experts = np.concatenate([experts, np.full((extra, *experts.shape[1:]), -1, np.int16)])
    return replace(
        batch,
        node_parent=np.append(batch.node_parent, np.int32(-1)),
        node_start=np.append(batch.node_start, batch.node_start[-1] + extra),
        token_ids=np.concatenate([batch.token_ids, np.full(extra, token_id, np.int32)]),
        routed_experts=experts,
    )


def _insert(top: _Node, owner: int, tree: TreeArrays) -> None:
    ends: list[tuple[_Node, int]] = []
    for node, parent in enumerate(tree.node_parent.tolist()):
        at, offset = (top, 0) if parent < 0 else ends[parent]
        source, stop = int(tree.node_start[node]), int(tree.node_start[node + 1])
        ends.append(_append(at, offset, owner, source, tree.token_ids[source:stop]))


def _append(at: _Node, offset: int, owner: int, source: int, tokens: NDArray[np.int32]) -> tuple[_Node, int]:
    """Walk ``tokens`` down from a place in the trie, adding what is new; returns where they end."""
    done = 0
    while done < tokens.shape[0]:
        while offset > at.tokens.shape[0]:
            offset -= at.tokens.shape[0]
            assert at.rest is not None
            at = at.rest
        if offset == at.tokens.shape[0]:
            child = at.children.get(int(tokens[done]))
            if child is None:
                fresh = _Node(tokens[done:], [_Claim(owner, source + done, 0, tokens.shape[0] - done)])
                at.children[int(tokens[done])] = fresh
                return fresh, tokens.shape[0] - done
            at, offset = child, 0
        ahead = min(at.tokens.shape[0] - offset, tokens.shape[0] - done)
        differs = np.flatnonzero(at.tokens[offset : offset + ahead] != tokens[done : done + ahead])
        same = int(differs[0]) if differs.shape[0] else ahead
        if same:
            at.claims.append(_Claim(owner, source + done, offset, same))
        offset, done = offset + same, done + same
        if same < ahead:
            at.split(offset)
    return at, offset


def _flatten(top: _Node, trees: Sequence[TrainedTree]) -> TreeBatch:
    parents: list[int] = []
    pieces: list[NDArray[np.int32]] = []
    starts = [0]
    places: list[NDArray[np.int64]] = [np.full(item.tree.tokens, -1, np.int64) for item in trees]
    stack: list[tuple[_Node, int]] = [(child, -1) for child in reversed(top.children.values())]
    while stack:
        node, parent = stack.pop()
        index, begin = len(parents), starts[-1]
        parents.append(parent)
        pieces.append(node.tokens)
        starts.append(begin + node.tokens.shape[0])
        for claim in node.claims:
            span = np.arange(claim.length, dtype=np.int64) + begin + claim.offset
            places[claim.owner][claim.source : claim.source + claim.length] = span
        stack.extend((child, index) for child in reversed(node.children.values()))
    chosen = [np.flatnonzero(item.trains) for item in trees]
    counts = np.array([mine.shape[0] for mine in chosen], np.int64)
    owner = np.repeat(np.arange(len(trees)), counts)
    token = np.concatenate([place[mine] for place, mine in zip(places, chosen, strict=True)])
    order = np.argsort(token, kind="stable")
    logprob = np.concatenate([item.tree.logprobs[mine] for item, mine in zip(trees, chosen, strict=True)])
    version = np.concatenate([item.tree.versions[mine] for item, mine in zip(trees, chosen, strict=True)])
    unknown = np.full(token.shape[0], NO_LOGPROB, np.float32)
    return TreeBatch(
        node_parent=np.array(parents, np.int32),
        node_start=np.array(starts, np.int64),
        token_ids=np.concatenate(pieces),
        entry_token=token[order],
        entry_execution=owner[order].astype(np.int32),
        entry_weight=np.array([item.weight for item in trees], np.float64)[owner[order]],
        entry_advantage=np.array([item.advantage for item in trees], np.float32)[owner[order]],
        entry_logprob=logprob[order],
        entry_version=version[order],
        entry_proximal=unknown,
        entry_reference=unknown.copy(),
        execution_ids=tuple(item.execution for item in trees),
        execution_tokens=counts,
        routed_experts=_merge_experts(trees, places, starts[-1]),
    )


def _merge_experts(
    trees: Sequence[TrainedTree], places: Sequence[NDArray[np.int64]], tokens: int
) -> NDArray[np.int16] | None:
    """Experts by forest token; where executions share a token, the first one's record stands."""
    known = [item.routed_experts for item in trees]
    if known[0] is None:
        return None
    merged = np.zeros((tokens, *known[0].shape[1:]), np.int16)
    for item, experts, place in reversed(list(zip(trees, known, places, strict=True))):
        if experts is None or experts.shape != (item.tree.tokens, *merged.shape[1:]):
            found = None if experts is None else experts.shape
            expected = f"({item.tree.tokens}, {merged.shape[1]}, {merged.shape[2]})"
            fail(_DOING, f"routed_experts of {item.execution!r} has shape {found}", expected)
        merged[place] = experts
    return merged
