"""The paged KV pool: storage, reference counts and the order in which idle blocks are given up.

Invariants: a block is in exactly one of three states: free; idle (no references, its content is named by the
prefix tree and may be evicted); held (references > 0). A held block is never given to anybody else.
Not here: what the content means (that is `kv.prefix`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import torch
from gyre_core import DigestBlocks, MemoryRegion

from gyre_local.kv.digests import BlockDigests
from gyre_local.model.architecture import Architecture


class BlockPool:
    """`data` is [2 (K, V), layers, blocks * block_tokens, kv_heads, head_size]: one region of blocks a K or V layer."""

    def __init__(
        self, arch: Architecture, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks, self.block_tokens = blocks, block_tokens
        shape = (2, arch.layers, blocks * block_tokens, arch.kv_heads, arch.head_size)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._refs = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._named: Callable[[int], bool] = lambda block: False
        self._evict: Callable[[int], bool] = lambda block: True
        self.digests: BlockDigests | None = None
        """Of full blocks, when somebody wants them."""

    def bind(self, named: Callable[[int], bool], evict: Callable[[int], bool]) -> None:
        """Tell the pool its tree: `named(block)` says whether the tree names it; `evict(block)` makes the tree forget
        it, False when blocks that hang below it are still named."""
        self._named, self._evict = named, evict

    def keep_digests(self, make: DigestBlocks) -> None:
        """Know the digests of blocks that fill from now on."""
        self.digests = BlockDigests(make, self.regions(), self.blocks)

    @property
    def available(self) -> int:
        """Blocks that `take` could give: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Blocks with references."""
        return self.blocks - self.available

    def references(self, block: int) -> int:
        """How many holders the block has."""
        return self._refs[block]

    def is_idle(self, block: int) -> bool:
        """Whether holding it would use up one of `available`."""
        return block in self._idle

    def take(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, evicting the longest idle ones; None when there are too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict_one()
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        if self.digests is not None:
            self.digests.drop(taken)
        return taken

    def _evict_one(self) -> None:
        """Leaves go first: holders release deepest blocks first, so the oldest idle block is a leaf; else look on."""
        for _ in range(len(self._idle)):
            block, _ = self._idle.popitem(last=False)
            if self._evict(block):
                self._free.append(block)
                return
            self._idle[block] = None
        raise AssertionError("the pool has idle blocks but none without children")

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference for each."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less for each, given in token order; the deepest becomes idle first."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._named(block):
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def forget_idle(self, blocks: Iterable[int]) -> None:
        """The tree no longer names these: the idle ones among them become free."""
        for block in blocks:
            if block in self._idle:
                del self._idle[block]
                self._free.append(block)

    def rows(self, blocks: Sequence[int], tokens: int) -> torch.Tensor:
        """Rows of `data`'s token axis, int64 [tokens], for the first tokens of these blocks."""
        offsets = torch.arange(self.block_tokens)
        table = torch.tensor(blocks, dtype=torch.int64)[:, None] * self.block_tokens + offsets
        return table.flatten()[:tokens].to(self.data.device)

    def copy_block(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a block: a writer needs a block of its own."""
        size = self.block_tokens
        self.data[:, :, target * size : target * size + tokens] = self.data[
            :, :, source * size : source * size + tokens
        ]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero the content: what a failed call left must not meet another call's masked positions."""
        if self.digests is not None:
            self.digests.drop(blocks)
        for block in blocks:
            self.data[:, :, block * self.block_tokens : (block + 1) * self.block_tokens] = 0

    def drop(self) -> None:
        """Let the storage go."""
        self.data = self.data.new_empty(0)

    def regions(self) -> list[MemoryRegion]:
        """All K regions, then all V regions; addresses hold until the engine sleeps or closes."""
        return [
            MemoryRegion(part.data_ptr(), part.nbytes, part.nbytes // self.blocks, str(part.device))
            for part in self.data.flatten(0, 1)
        ]
