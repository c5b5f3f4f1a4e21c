"""The prefix tree of one policy version: which blocks hold the KV of which token prefixes.

A node is a block; its path from the root is the exact token prefix its KV belongs to (compared as bytes, so there
are no hash collisions). Full blocks chain; a partly filled block is a leaf. A prefix match may end inside any
block: the first k tokens of a block are valid KV whatever follows them.
Invariants: every named block was computed wholly under `version`; changing the version forgets every name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gyre_local.kv.pool import BlockPool

Tokens = NDArray[np.int32]
_WIDTH = 4
"""Bytes of an int32."""


@dataclass(slots=True, eq=False)
class _Node:
    key: bytes
    block: int
    parent: _Node | None
    children: dict[bytes, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: `blocks` full ones, then the first `tail_tokens` tokens of `tail`."""

    tokens: int
    blocks: tuple[int, ...] = ()
    tail: int | None = None
    tail_tokens: int = 0

    def without_tail(self) -> Match:
        """The match as far as its full blocks go."""
        return Match(self.tokens - self.tail_tokens, self.blocks)


class PrefixTree:
    """Names blocks of a `BlockPool` by version and token prefix."""

    def __init__(self, pool: BlockPool, version: int) -> None:
        self.pool, self.version = pool, version
        self._root = _Node(b"", -1, None)
        self._nodes: dict[int, _Node] = {}
        self._bytes = pool.block_tokens * _WIDTH
        pool.bind(self._nodes.__contains__, self._evict)

    def __len__(self) -> int:
        return len(self._nodes)

    def names(self, block: int) -> bool:
        """Whether the block is part of a cached prefix."""
        return block in self._nodes

    def match(self, tokens: Tokens, limit: int) -> Match:
        """The longest cached prefix of `tokens`, at most `limit` tokens."""
        data, node, blocks, at = tokens[:limit].tobytes(), self._root, list[int](), 0
        while at + self._bytes <= len(data):
            child = node.children.get(data[at : at + self._bytes])
            if child is None:
                break
            node, at = child, at + self._bytes
            blocks.append(child.block)
        tail, extra = self._best_tail(node, data[at : at + self._bytes])
        return Match(at // _WIDTH + extra, tuple(blocks), tail if extra else None, extra)

    @staticmethod
    def _best_tail(node: _Node, wanted: bytes) -> tuple[int, int]:
        """The child that agrees with `wanted` for longest, and for how many tokens."""
        best, length = -1, 0
        if len(wanted) < _WIDTH:
            return best, length
        first = wanted[:_WIDTH]
        for key, child in node.children.items():
            if key[:_WIDTH] == first:
                common = _common_tokens(key, wanted)
                if common > length:
                    best, length = child.block, common
        return best, length

    def insert(self, tokens: Tokens, blocks: list[int], *, partial: bool) -> None:
        """Name the blocks that hold `tokens`, in token order; a prefix that is named already keeps its block.

        `partial` also names a last block that is not full; only for blocks nobody writes any more.
        """
        data, node = tokens.tobytes(), self._root
        full = len(data) // self._bytes
        for index in range(full):
            key = data[index * self._bytes : (index + 1) * self._bytes]
            child = node.children.get(key)
            if child is None:
                if blocks[index] in self._nodes:
                    return
                child = self._add(node, key, blocks[index])
            node = child
        rest = data[full * self._bytes :]
        if partial and rest and blocks[full] not in self._nodes and not any(k.startswith(rest) for k in node.children):
            self._add(node, rest, blocks[full])

    def _add(self, parent: _Node, key: bytes, block: int) -> _Node:
        child = _Node(key, block, parent)
        for shorter in [k for k in parent.children if len(k) < len(key) and key.startswith(k)]:
            old = parent.children[shorter]
            if self.pool.is_idle(old.block):
                self._evict(old.block)
                self.pool.forget_idle([old.block])
        parent.children[key] = child
        self._nodes[block] = child
        return child

    def _evict(self, block: int) -> bool:
        """The pool takes an idle block back; False while longer prefixes hang below it."""
        node = self._nodes[block]
        if node.children:
            return False
        assert node.parent is not None
        del node.parent.children[node.key]
        del self._nodes[block]
        return True

    def forget_all(self, version: int) -> None:
        """Forget every name; blocks in use stay with their users, without a name. `version` is that of what comes."""
        blocks = list(self._nodes)
        self._nodes.clear()
        self._root = _Node(b"", -1, None)
        self.version = version
        self.pool.forget_idle(blocks)


def _common_tokens(left: bytes, right: bytes) -> int:
    """Leading tokens (4 bytes each) in which both agree."""
    size = min(len(left), len(right)) // _WIDTH
    for index in range(size):
        at = index * _WIDTH
        if left[at : at + _WIDTH] != right[at : at + _WIDTH]:
            return index
    return size
