"""Between an engine's KV interface (gyre-core) and the mover's (gyre-kvxfer).

Invariant: nothing is copied or decided here; both sides mean the same blocks by the same numbers. An engine that can
keep digests of its blocks is told how (`keep_digests`), so that a move sums none of its full blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gyre_core import Array, Engine, KVDigester, KVShape, MemoryRegion, PinnedKV
from gyre_kvxfer import KVLayout, MoveRefused, Pinned, Region
from gyre_kvxfer.blocks import block_digests
from gyre_kvxfer.engine import Int32, KeptDigests
from gyre_kvxfer.memory import host_buffer

_AXES = {"token": "T", "head": "H", "dim": "D", "kv": "K"}


def layout_of(shape: KVShape, num_blocks: int) -> KVLayout:
    """The mover's layout of an engine's pool of `num_blocks` blocks."""
    axes = "B" + "".join(_AXES[name] for name in shape.order)
    return KVLayout(
        layers=shape.layers,
        kv_heads=shape.total_kv_heads or shape.kv_heads * shape.tp_size,
        head_dim=shape.head_size,
        block_size=shape.block_tokens,
        num_blocks=num_blocks,
        dtype=shape.dtype,
        axes=axes,
        across="KL" if shape.split_kv else "L",
        tp_size=shape.tp_size,
        tp_rank=shape.tp_rank,
        model=shape.model,
    )


class EngineKV:
    """An engine as source and sink of session moves. `digest`: the kind that it keeps of its full blocks, if any."""

    def __init__(self, engine: Engine, digest: str = "") -> None:
        self._engine, self._digest = engine, digest
        self._seen: tuple[Sequence[MemoryRegion], KVLayout, list[npt.NDArray[np.uint8]]] | None = None

    async def keep_digests(self) -> None:
        """Let the engine make digests as its blocks fill, if it can."""
        if self._digest and isinstance(self._engine, KVDigester):
            await self._engine.kv_keep_digests(self._sum)

    def _sum(self, regions: Sequence[MemoryRegion], blocks: Array) -> Array:
        if self._seen is None or self._seen[0] is not regions:
            memory = [host_buffer(Region(r.addr, r.nbytes)) for r in regions]
            self._seen = (
                regions,
                layout_of(self._engine.kv_shape(), regions[0].nbytes // regions[0].block_bytes),
                memory,
            )
        _, layout, memory = self._seen
        ids = np.asarray(blocks, np.int32)
        return block_digests(self._digest, layout, memory, ids, 0, len(ids), len(ids) * layout.block_size)

    def layout(self) -> KVLayout:
        """Layout of the engine's pool."""
        region = self._engine.kv_regions()[0]
        return layout_of(self._engine.kv_shape(), region.nbytes // region.block_bytes)

    def regions(self) -> Sequence[Region]:
        """The pool's memory."""
        return [Region(r.addr, r.nbytes, r.device) for r in self._engine.kv_regions()]

    async def pin(self, session: str) -> Pinned:
        """Keep the session's blocks alive while it goes on."""
        return self._pinned(session, await self._engine.kv_pin(session))

    async def freeze(self, session: str) -> Pinned:
        """Stop it at a token border."""
        return self._pinned(session, await self._engine.kv_freeze(session))

    async def release(self, session: str, generation: int, *, forget: bool = False) -> None:
        """Drop a pin; with `forget` the session has left."""
        await self._engine.kv_release(session, generation, forget=forget)

    async def unfreeze(self, session: str) -> None:
        """The session stays."""
        await self._engine.kv_unfreeze(session)

    async def reserve(self, session: str, n_tokens: int, version: int) -> Int32:
        """Room for it; refused when there is none or the engine has other weights."""
        blocks = await self._engine.kv_reserve(session, n_tokens, version)
        if blocks is None:
            code = "no_room" if self._engine.version == version else "version"
            raise MoveRefused(
                code,
                f"reserving {n_tokens} tokens of version {version} for {session}: no room, or the engine holds "
                f"another version ({self._engine.version})",
            )
        return np.asarray(blocks, np.int32)

    async def commit(self, session: str, version: int, token_ids: Int32, block_ids: Int32) -> None:
        """It is ours now."""
        await self._engine.kv_commit(session, version, token_ids, block_ids)

    async def cancel(self, session: str) -> None:
        """It did not come."""
        await self._engine.kv_cancel(session)

    def _pinned(self, session: str, pinned: PinnedKV | None) -> Pinned:
        if pinned is None:
            raise MoveRefused("unknown_session", f"the engine holds no KV of {session}")
        values = None if pinned.digests is None else np.asarray(pinned.digests, np.uint64)[None, :]
        return Pinned(
            version=pinned.version,
            token_ids=np.asarray(pinned.token_ids, np.int32),
            block_ids=np.asarray(pinned.block_ids, np.int32),
            generation=pinned.generation,
            kept=KeptDigests(self._digest, values) if self._digest and values is not None else None,
        )
