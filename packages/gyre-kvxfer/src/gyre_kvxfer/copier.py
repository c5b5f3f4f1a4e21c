"""The destination's copying: plans into reads, staging and checks.

Two ways, chosen per pair of ranks. *Direct*: bytes land in the pool where they belong. *Staged*: whole source blocks
are read into a compact pool of the source's form and converted from there; taken when dtypes differ, when runs would
be tiny, or when digests are wanted and the forms differ (a digest is over the source's form).

Whole blocks that land directly are digested by the reading thread itself where the reader can (`SummingReader`): a
byte is then fetched from memory once.

Invariant: reads stay inside the pinned blocks of the offer, writes inside the reserved blocks; checks run on the
bytes that were kept, in a thread beside the next read or in the one that read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeGuard

import numpy as np

from gyre_kvxfer.blocks import all_finite, block_digests, block_runs, compact_pool
from gyre_kvxfer.copy import Bytes, execute
from gyre_kvxfer.digest import U64
from gyre_kvxfer.engine import Pinned, Region
from gyre_kvxfer.errors import LayoutRefused, VerificationFailed, explain
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.memory import host_buffer
from gyre_kvxfer.native import whole
from gyre_kvxfer.plan import Ints, TransferPlan, check_table, plan_transfer, sources_for
from gyre_kvxfer.transports.base import Access, Reader, SummingReader

WINDOW_BYTES = 16 << 20
"""Bytes read before the check of what came begins; also the bound of staging memory."""

DIRECT_RUN = 512
"""Bytes of the shortest run worth a piece of its own; shorter ones are read as whole blocks and converted here."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """One rank's layout and its regions; `first` is the rank's first region in the whole list."""

    layout: KVLayout
    regions: tuple[Region, ...]
    first: int


def rank_pools(layout: KVLayout, regions: Sequence[Region]) -> list[RankPool]:
    """Split a region list over ranks: either one rank's regions (that of `layout`) or all ranks' in order."""
    per = layout.region_count
    ranks = [layout.tp_rank] if len(regions) == per else list(range(layout.tp_size))
    if len(regions) != per * len(ranks):
        came = f"{len(regions)} regions"
        want = f"{per} (one rank) or {per * layout.tp_size} (all {layout.tp_size})"
        raise LayoutRefused(explain("matching regions to the layout", came, want, "Offer the pools in layout order."))
    out = []
    for i, rank in enumerate(ranks):
        part = tuple(regions[i * per : (i + 1) * per])
        one = replace(layout, tp_rank=rank)
        if any(r.nbytes < one.region_nbytes for r in part):
            came = f"regions of {sorted({r.nbytes for r in part})} bytes"
            raise LayoutRefused(
                explain("matching regions to the layout", came, f"at least {one.region_nbytes}", "Correct num_blocks.")
            )
        out.append(RankPool(one, part, i * per))
    return out


@dataclass(frozen=True, slots=True)
class Pair:
    """A source rank read by a destination rank."""

    src: RankPool
    dst: RankPool
    buffers: tuple[Bytes, ...]
    direct: bool


class Copier:
    """Copies and checks one session; `nbytes` counts what was read."""

    def __init__(
        self, access: Access, layout: KVLayout, regions: Sequence[Region], digest: str = "", finite: bool = False
    ) -> None:
        if access.layout.states or layout.states:
            names = sorted({x.name for x in (*access.layout.states, *layout.states)})
            raise LayoutRefused(
                explain("moving a session", f"recurrent state {names}", "attention KV only", "Prefill it instead.")
            )
        self.nbytes = 0
        self._staging: list[Bytes] = []
        """The newest: stays as long as this copier does, however its read ended."""
        self._access, self._digest, self._finite = access, digest, finite
        self._sources = rank_pools(access.layout, access.regions)
        self._own = tuple(regions)
        self._pairs = [self._pair(s, d) for d in rank_pools(layout, regions) for s in self._readable(d)]
        self._seen: dict[int, U64] = {}

    def _readable(self, dst: RankPool) -> list[RankPool]:
        by_rank = {s.layout.tp_rank: s for s in self._sources}
        wanted = sources_for(self._access.layout, dst.layout)
        if any(r not in by_rank for r in wanted):
            raise LayoutRefused(
                explain("finding source ranks", sorted(by_rank), f"ranks {wanted}", "Offer all ranks' regions.")
            )
        return [by_rank[r] for r in wanted]

    def _pair(self, src: RankPool, dst: RankPool) -> Pair:
        one = np.zeros(1, np.int64)
        n = min(src.layout.block_size, dst.layout.block_size)
        probe = plan_transfer(src.layout, dst.layout, one, one, stop=n)
        same = src.layout.block_form() == dst.layout.block_form()
        on_host = all(r.device == "cpu" for r in (*src.regions, *dst.regions))
        whole_runs = not probe.converts and (probe.shortest_run >= DIRECT_RUN or not on_host)
        direct = same or (whole_runs and not self._digest)
        if not on_host and (not direct or self._digest or self._finite):
            came = "device memory with a conversion or a check on the host"
            raise LayoutRefused(
                explain("planning a copy", came, "equal dtypes, no digest", "Convert with gyre_kvxfer.kernels there.")
            )
        buffers = tuple(host_buffer(r) for r in dst.regions) if on_host else ()
        return Pair(src, dst, buffers, direct)

    async def copy(self, reader: Reader, move: str, start: int, stop: int, src_blocks: Ints, dst_blocks: Ints) -> None:
        """Copy tokens [start, stop); `start` at a border of a source block. Raises `TransportError`,
        `LayoutRefused`.
        """
        for index, pair in enumerate(self._pairs):
            begin = start
            if self._digest == "fast" and not self._finite and sums_while_reading(reader, pair):
                size = pair.src.layout.block_size
                first, full = start // size, stop // size
                if first < full:
                    blocks = (src_blocks[first:full], dst_blocks[first:full])
                    self._note(index, first, await self._read_summed(reader, move, pair, *blocks))
                begin = max(start, full * size)
            await self._copy_windows(reader, move, index, begin, stop, src_blocks, dst_blocks)

    async def _read_summed(self, reader: SummingReader, move: str, pair: Pair, src: Ints, dst: Ints) -> U64:
        """Read whole blocks of one form piece by piece; their digests, uint64[n]."""
        layout = pair.src.layout
        check_table(layout, src, 0, len(src) * layout.block_size, "source")
        remote, local = block_runs(layout, src), block_runs(pair.dst.layout, dst)
        remote = replace(remote, region=remote.region + pair.src.first)
        parts = await reader.read_summed(move, remote, local, pair.dst.regions, len(src))
        self.nbytes += remote.total
        digests: U64 = parts.reshape(-1, len(src)).sum(axis=0, dtype=np.uint64)
        return digests

    async def _copy_windows(
        self, reader: Reader, move: str, index: int, start: int, stop: int, src_blocks: Ints, dst_blocks: Ints
    ) -> None:
        """Copy by windows; each is checked and converted in a thread beside the next one's read."""
        pair = self._pairs[index]
        layout = pair.src.layout
        checked = not pair.direct or self._digest or self._finite
        step = max(1, WINDOW_BYTES // layout.block_nbytes) * layout.block_size if checked else max(1, stop - start)
        check: asyncio.Future[None] | None = None
        for at in range(start, stop, step):
            end = min(at + step, stop)
            if pair.direct:
                await self._direct(reader, move, pair, at, end, (src_blocks, dst_blocks))
                job = partial(self._check_direct, index, pair, at, end, dst_blocks)
            else:
                staged = await self._read_staged(reader, move, pair, at, end, src_blocks)
                job = partial(self._finish_staged, index, pair, at, end, dst_blocks, staged)
            if check is not None:
                await check
            if checked:
                check = asyncio.ensure_future(asyncio.to_thread(job))
        if check is not None:
            await check

    async def _direct(
        self, reader: Reader, move: str, pair: Pair, at: int, end: int, blocks: tuple[Ints, Ints]
    ) -> None:
        plan = plan_transfer(pair.src.layout, pair.dst.layout, *blocks, start=at, stop=end)
        await self._fetch(reader, move, pair.src, plan, pair.dst.regions)

    async def _fetch(
        self, reader: Reader, move: str, src: RankPool, plan: TransferPlan, into: Sequence[Region]
    ) -> None:
        remote, local = plan.runs()
        if len(remote):
            await reader.read(move, replace(remote, region=remote.region + src.first), local, into)
            self.nbytes += remote.total

    def _check_direct(self, index: int, pair: Pair, at: int, end: int, dst_blocks: Ints) -> None:
        layout = pair.dst.layout
        if self._digest:
            first, last = at // layout.block_size, layout.blocks_for(end)
            self._note(index, first, block_digests(self._digest, layout, pair.buffers, dst_blocks, first, last, end))
        self._check_finite(layout, pair.buffers, dst_blocks, at, end)

    async def _read_staged(
        self, reader: Reader, move: str, pair: Pair, at: int, end: int, src_blocks: Ints
    ) -> tuple[KVLayout, list[Bytes], Ints]:
        """Read a window's source blocks into a compact pool: its layout, buffers and block table (from block 0
        on).
        """
        layout = pair.src.layout
        first, last = at // layout.block_size, layout.blocks_for(end)
        shape = layout if self._digest else _narrow(layout, pair.dst.layout)
        small, held, regions = compact_pool(shape, last - first)
        self._staging = held
        table = np.zeros(last, np.int64)
        table[first:] = np.arange(last - first)
        plan = plan_transfer(layout, small, src_blocks, table, start=at, stop=end)
        await self._fetch(reader, move, pair.src, plan, regions)
        return small, held, table

    def _finish_staged(
        self, index: int, pair: Pair, at: int, end: int, dst_blocks: Ints, staged: tuple[KVLayout, list[Bytes], Ints]
    ) -> None:
        """Check and convert a staged window into the pool."""
        small, held, table = staged
        if self._digest:
            first, last = at // small.block_size, small.blocks_for(end)
            self._note(index, first, block_digests(self._digest, small, held, table, first, last, end))
        self._check_finite(small, held, table, at, end)
        execute(plan_transfer(small, pair.dst.layout, table, dst_blocks, start=at, stop=end), held, pair.buffers)

    def _note(self, index: int, first: int, digests: U64) -> None:
        old = self._seen.get(index, np.zeros(0, np.uint64))
        grown = np.zeros(max(len(old), first + len(digests)), np.uint64)
        grown[: len(old)] = old
        grown[first : first + len(digests)] = digests
        self._seen[index] = grown

    def _check_finite(self, layout: KVLayout, buffers: Sequence[Bytes], blocks: Ints, at: int, end: int) -> None:
        if self._finite and not all_finite(layout, buffers, blocks, at, end):
            raise VerificationFailed(
                explain(f"checking tokens [{at},{end})", "NaN or infinity", "finite KV", "Prefill the session instead.")
            )

    def verify(self, digests: U64, n_tokens: int) -> None:
        """Hold what was read against the manifest's digests, uint64[ranks * blocks]. Raises `VerificationFailed`."""
        if not self._digest:
            return
        blocks = self._access.layout.blocks_for(n_tokens)
        if not blocks and not len(digests):
            return
        if len(digests) != blocks * len(self._sources):
            came = f"{len(digests)} digests"
            raise VerificationFailed(
                explain("checking blocks", came, f"{blocks} a rank", "Prefill the session instead.")
            )
        order = [s.first for s in self._sources]
        for index, pair in enumerate(self._pairs):
            said = digests.reshape(-1, blocks)[order.index(pair.src.first)]
            bad = np.flatnonzero(self._seen.get(index, np.zeros(0, np.uint64))[:blocks] != said)
            if len(bad):
                rank = pair.src.layout.tp_rank
                came = f"other bytes in blocks {bad[:8].tolist()} of rank {rank}"
                raise VerificationFailed(
                    explain("checking blocks", came, "the bytes of the manifest", "Prefill the session instead.")
                )


def sums_while_reading(reader: Reader, pair: Pair) -> TypeGuard[SummingReader]:
    """Whether this reader can digest the blocks of this pair as it reads them: equal forms, pieces of whole rows."""
    if not pair.direct or not isinstance(reader, SummingReader) or not reader.can_sum:
        return False
    one = [block_runs(side.layout, np.zeros(1, np.int64)) for side in (pair.src, pair.dst)]
    places = [*(x.offset for x in one), [pair.dst.layout.strides["B"]], [r.addr for r in pair.dst.regions]]
    return whole(int(one[0].nbytes[0])) and not any((np.asarray(x) % 8).any() for x in places)


def source_digests(
    kind: str, layout: KVLayout, regions: Sequence[Region], blocks: Ints, first: int, n_tokens: int
) -> U64:
    """uint64[ranks, blocks]: what a source states of blocks from `first` on, of which `n_tokens` tokens are there."""
    last = layout.blocks_for(n_tokens)
    out = np.zeros((0, max(0, last - first)), np.uint64)
    for pool in rank_pools(layout, regions):
        buffers = [host_buffer(r) for r in pool.regions]
        out = np.vstack([out, block_digests(kind, pool.layout, buffers, blocks, first, last, n_tokens)])
    return out


def kept_digests(pinned: Pinned, kind: str, layout: KVLayout, regions: Sequence[Region]) -> U64:
    """uint64[ranks, k]: the digests of this kind that the engine kept of its full blocks; k is 0 if there are none.

    Raises `LayoutRefused` for digests of other ranks or of more blocks than are full.
    """
    ranks = len(regions) // layout.region_count
    if pinned.kept is None or pinned.kept.kind != kind:
        return np.zeros((ranks, 0), np.uint64)
    got, full = np.asarray(pinned.kept.values, np.uint64), len(pinned.token_ids) // layout.block_size
    if got.ndim != 2 or got.shape[0] != ranks or got.shape[1] > full:
        want = f"[{ranks} ranks, up to {full} full blocks]"
        raise LayoutRefused(explain("taking kept digests", f"shape {got.shape}", want, "Keep them a block and rank."))
    return got


def _narrow(src: KVLayout, dst: KVLayout) -> KVLayout:
    """The source's form, cut to the destination rank's heads where that rank holds fewer."""
    inside = src.heads.start <= dst.heads.start and dst.heads.stop <= src.heads.stop
    return replace(src, tp_size=dst.tp_size, tp_rank=dst.tp_rank) if inside and src.kind == "mha" else src
