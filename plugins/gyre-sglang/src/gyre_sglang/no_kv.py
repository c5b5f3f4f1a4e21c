"""The part of `gyre_core.Engine` that SGLang cannot offer: KV of sessions in the reach of this process.

Invariant: every method says so with one CapabilityError. Not here: pages that servers share (`sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from gyre_core import Array, CapabilityError, KVShape, MemoryRegion, PinnedKV


class NoKV:
    """KV moves, not offered."""

    def _no_kv(self) -> NoReturn:
        raise CapabilityError(
            "moving a session's KV", got="SGLang, whose pool another process cannot read",
            expected="an engine with KV_MOVE", fix="Let the destination prefill the session's tokens.",
        )  # fmt: skip

    def kv_shape(self) -> KVShape:
        """Not offered."""
        self._no_kv()

    def kv_regions(self) -> Sequence[MemoryRegion]:
        """Not offered."""
        self._no_kv()

    async def kv_pin(self, session: str) -> PinnedKV | None:
        """Not offered."""
        self._no_kv()

    async def kv_freeze(self, session: str) -> PinnedKV | None:
        """Not offered."""
        self._no_kv()

    async def kv_unfreeze(self, session: str) -> None:
        """Not offered."""
        self._no_kv()

    async def kv_release(self, session: str, generation: int, *, forget: bool) -> None:
        """Not offered."""
        self._no_kv()

    async def kv_reserve(self, session: str, tokens: int, version: int) -> Array | None:
        """Not offered."""
        self._no_kv()

    async def kv_commit(self, session: str, version: int, token_ids: Array, block_ids: Array) -> None:
        """Not offered."""
        self._no_kv()

    async def kv_cancel(self, session: str) -> None:
        """Not offered."""
        self._no_kv()
