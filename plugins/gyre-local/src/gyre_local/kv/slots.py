"""Decode slots: each running call's KV once more, contiguous, so that a batch attends without gathering.

The pool stays the truth: every new token's KV is written to both. A slot is loaded from the pool when a call starts
(only what it does not hold already) and costs nothing per step afterwards.
Invariants: a running call owns one slot; positions below its length hold exactly its KV; everything else is finite
(zero or stale), since masked positions still enter products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gyre_local.kv.pool import BlockPool
from gyre_local.kv.prefix import Tokens
from gyre_local.model.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Resident:
    """What a slot holds after its call ended."""

    session: str
    tokens: Tokens


class SlotCache:
    """`data` is [layers, 2, slots, kv_heads, capacity, head_size]; slots and capacity grow as needed."""

    def __init__(self, arch: Architecture, max_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.arch, self.max_slots = arch, max_slots
        self.data = torch.zeros((arch.layers, 2, 0, arch.kv_heads, 0, arch.head_size), dtype=dtype, device=device)
        self._used: set[int] = set()
        self._resident: dict[int, Resident] = {}

    @property
    def slots(self) -> int:
        """Slots that have memory."""
        return self.data.shape[2]

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot at present."""
        return self.data.shape[4]

    @property
    def free(self) -> int:
        """Slots that no call owns."""
        return self.max_slots - len(self._used)

    def claim(self, session: str) -> int:
        """A free slot: the one the session left, if it is still there, else an empty one, else the lowest."""
        free = [slot for slot in range(self.max_slots) if slot not in self._used]
        mine = next((slot for slot in free if slot in self._resident and self._resident[slot].session == session), None)
        slot = mine if mine is not None else next((s for s in free if s not in self._resident), free[0])
        self._used.add(slot)
        return slot

    def release(self, slot: int, resident: Resident | None) -> None:
        """The call has ended; `resident` says what the slot still holds, None that it must not be used."""
        self._used.discard(slot)
        self._resident.pop(slot, None)
        if resident is not None:
            self._resident[slot] = resident

    def forget_residents(self) -> None:
        """What free slots hold is of an old version now."""
        self._resident.clear()

    def clear(self, slot: int) -> None:
        """Zero a slot whose call failed."""
        self.data[:, :, slot] = 0

    def drop(self) -> None:
        """Let the storage go."""
        self.data = self.data.new_empty(0)

    def load(self, slot: int, pool: BlockPool, blocks: Sequence[int], tokens: Tokens) -> None:
        """Make the slot hold the KV of `tokens` that lie in `blocks`; reuses what the slot holds already."""
        self.reserve(slot, len(tokens) + 1)
        resident = self._resident.pop(slot, None)
        start = 0 if resident is None else common_prefix(resident.tokens, tokens)
        if start >= len(tokens):
            return
        rows = pool.rows(blocks, len(tokens))[start:]
        found = pool.data.index_select(2, rows)
        self.data[:, :, slot, :, start : len(tokens)] = found.permute(1, 0, 3, 2, 4)

    def reserve(self, slot: int, tokens: int) -> None:
        """Room for `tokens` tokens in `slot`; grows by half at a time, so that growing stays rare."""
        layers, parts, slots, heads, capacity, size = self.data.shape
        if slot < slots and tokens <= capacity:
            return
        more_slots = slots if slot < slots else min(self.max_slots, max(slot + 1, slots + slots // 2, 4))
        room = capacity if tokens <= capacity else max(tokens + tokens // 2, 128)
        grown = torch.zeros(
            (layers, parts, more_slots, heads, room, size), dtype=self.data.dtype, device=self.data.device
        )
        grown[:, :, :slots, :, :capacity] = self.data
        self.data = grown


def common_prefix(left: Tokens, right: Tokens) -> int:
    """Leading tokens in which both agree."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size
