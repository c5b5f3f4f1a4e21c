"""What an engine shows of a session's KV so that somebody else can move it, or so that an engine of its own kind can
fetch it.

Invariant: block contents named by a `PinnedKV` belong to exactly its `token_ids` under its `version`; full
blocks do not change while pinned. Moving bytes, verifying and owning are the mover's business, not the
engine's; the shapes here equal those of gyre-kvxfer, which does not import core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from gyre_core.arrays import Array


@dataclass(frozen=True, slots=True)
class KVShape:
    """How an engine lays out paged KV.

    `order` names the axes of one region inside a block, slowest first, out of: "kv" (K then V), "token",
    "head", "dim"; a region of separate K or V has no "kv" axis. With `split_kv` there are two regions a layer (all K
    regions come first, then all V), else one.
    """

    layers: int
    kv_heads: int
    """On this rank."""
    head_size: int
    block_tokens: int
    dtype: str
    """numpy's name ("float32", "float16") or "bfloat16", "float8_e4m3"."""
    order: tuple[str, ...] = ("token", "head", "dim")
    split_kv: bool = True
    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 0
    """Over all ranks; 0 means kv_heads * tp_size."""
    model: str = ""
    """Fingerprint of architecture and rope settings; KV moves only between equal ones."""


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """One contiguous array of blocks in this process: block b starts at `addr + b * block_bytes`."""

    addr: int
    nbytes: int
    block_bytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class PinnedKV:
    """A session's KV, kept alive for a reader. `token_ids` int32 [n]: tokens whose KV is complete."""

    session: str
    version: int
    token_ids: Array
    block_ids: Array
    """int32 [ceil(n / block_tokens)], in token order; the last block may be partly filled."""
    generation: int
    """Names this pin; given back to `kv_release`."""
    digests: Array | None = None
    """uint64 [k]: of the first k blocks, all full, as `KVDigester.kv_keep_digests` was told to make them."""


DigestBlocks: TypeAlias = Callable[[Sequence[MemoryRegion], Array], Array]
"""Digests, uint64 [n], of the blocks of these numbers, int32 [n], all full, in an engine's `kv_regions`."""


@runtime_checkable
class KVDigester(Protocol):
    """Engines with `KV_MOVE` may have this; others need not.

    Invariant: a digest given with a pin is that of the bytes the block has, summed by whoever filled it.
    """

    async def kv_keep_digests(self, digest: DigestBlocks) -> None:
        """From now on make a digest of each block when it fills, and give those known with each pin."""


class KVHolder(Protocol):
    """Engine side of a KV move. Engines without `KV_MOVE` raise CapabilityError from all of these."""

    def kv_shape(self) -> KVShape:
        """The layout of `kv_regions`."""

    def kv_regions(self) -> Sequence[MemoryRegion]:
        """The pools themselves: 2 * layers regions with `split_kv`, else `layers`."""

    async def kv_pin(self, session: str) -> PinnedKV | None:
        """Keep the session's present KV alive while decoding goes on; None when it has none cached."""

    async def kv_freeze(self, session: str) -> PinnedKV | None:
        """End the session's running calls with ABORT at a token border, then pin; new calls of it wait for
        `kv_release` or `kv_unfreeze`."""

    async def kv_unfreeze(self, session: str) -> None:
        """Take the session back after a move that did not happen."""

    async def kv_release(self, session: str, generation: int, *, forget: bool) -> None:
        """Drop a pin; with `forget` the session has left: its calls that were held fail (InfrastructureError) and
        its KV may go. A call of it that comes later is the session coming back: it runs as any other."""

    async def kv_reserve(self, session: str, tokens: int, version: int) -> Array | None:
        """Blocks (int32 ids) for an incoming session; None when there is no room or the version differs."""

    async def kv_commit(self, session: str, version: int, token_ids: Array, block_ids: Array) -> None:
        """The reserved blocks now hold the KV of these tokens: they enter the prefix cache of `version`."""

    async def kv_cancel(self, session: str) -> None:
        """Give reserved blocks back."""


@dataclass(frozen=True, slots=True)
class ExportedKV:
    """A session's KV, held by its engine for another one of the same kind to fetch, for a limited time."""

    session: str
    version: int
    """Policy version that computed it."""
    token_ids: Array
    """int32 [n]: the session's context; the KV of its beginning is held, of how much the ticket says."""
    ticket: bytes
    """Where and how, in the words of this kind of engine: plain data, never code."""
    running: bool = False
    """A call of the session goes on: what it samples from now on is not held."""


@dataclass(frozen=True, slots=True)
class ImportedKV:
    """What an import brought. `tokens` of the context are in the cache now; `computed` of it had to be computed here
    (what was not held, or did not come)."""

    tokens: int
    computed: int
    nbytes: int
    """KV bytes that came; 0 when the engine cannot tell, or they come with the session's next call."""


@runtime_checkable
class KVHandover(Protocol):
    """Engines with `KV_HANDOVER` have these; others need not.

    Between two of them, under one version, `kv_import(await source.kv_export(session))` brings a session. Its next
    call, with a context that begins with `token_ids`, finds it in the prefix cache. Invariant: an import that does not
    fit (another version, other tokens than the ticket names, too old) raises InfrastructureError and leaves the engine
    as it was; KV is never taken for tokens that it is not of.
    """

    async def kv_export(self, session: str, *, stop: bool = False) -> ExportedKV | None:
        """Hold the session's present KV for another engine; None when there is none under the present version. Running
        calls go on; with `stop` they end with ABORT at a token border, and what is held is of all their tokens. An
        engine that cannot hold what it has just stopped stops them and returns None."""

    async def kv_import(self, exported: ExportedKV) -> ImportedKV:
        """Fetch what another engine's `kv_export` holds into the prefix cache, or let the session's next call do so."""
