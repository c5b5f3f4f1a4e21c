"""A cell whose engine keeps digests of its blocks: a move sums no full block at the source, and still finds a changed
one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gyre_core import DigestBlocks, KVShape, MemoryRegion, PinnedKV
from gyre_kvxfer import HostPool, MigrationServer, MovePolicy, migrate, server
from gyre_rl.cell.kv import EngineKV, layout_of

BLOCKS, SIZE, TOKENS = 16, 8, 20
SHAPE = KVShape(layers=1, kv_heads=2, head_size=32, block_tokens=SIZE, dtype="float32")
BLOCK_BYTES = SIZE * 2 * 32 * 4
KEY = b"key"


class Engine:
    """One session in blocks 5, 3 and 9, of which the last is partly filled."""

    version = 3

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.memory = [rng.integers(0, 100, BLOCKS * BLOCK_BYTES, np.uint8) for _ in range(2)]
        self.blocks = np.array([5, 3, 9], np.int32)
        self.digests: Any = None

    def kv_shape(self) -> KVShape:
        return SHAPE

    def kv_regions(self) -> list[MemoryRegion]:
        return [MemoryRegion(m.ctypes.data, m.nbytes, BLOCK_BYTES) for m in self.memory]

    async def kv_keep_digests(self, digest: DigestBlocks) -> None:
        self.digests = digest(self.kv_regions(), self.blocks[: TOKENS // SIZE])  # as if they filled just now

    async def kv_pin(self, session: str) -> PinnedKV:
        return PinnedKV(session, 3, np.arange(TOKENS, dtype=np.int32), self.blocks, 1, self.digests)

    kv_freeze = kv_pin

    async def kv_unfreeze(self, session: str) -> None:
        pass

    async def kv_release(self, session: str, generation: int, *, forget: bool) -> None:
        pass


class Unkept(Engine):
    kv_keep_digests = None  # type: ignore[assignment]


async def moved(engine: Any, monkeypatch: pytest.MonkeyPatch, change: Any = None) -> tuple[Any, list[int]]:
    """The report of a move, and the first block of each stretch that was summed for it at the source."""
    summed: list[int] = []
    true = server.source_digests

    def counting(kind: str, layout: Any, regions: Any, blocks: Any, first: int, tokens: int) -> Any:
        summed.append(first)
        return true(kind, layout, regions, blocks, first, tokens)

    monkeypatch.setattr(server, "source_digests", counting)
    source = EngineKV(engine, "fast")
    if engine.kv_keep_digests:
        await source.keep_digests()
    if change is not None:
        change()
    sink = HostPool(layout_of(SHAPE, BLOCKS), version=3)
    async with MigrationServer(source, key=KEY) as serving:
        report = await migrate(
            "s", serving.endpoint, sink, key=KEY, policy=MovePolicy(version=3, digest="fast"), transport="tcp"
        )
    return report, summed


async def test_no_full_block_is_summed_when_the_session_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    report, summed = await moved(Engine(), monkeypatch)
    assert (report.carried, report.tokens) == (True, TOKENS)
    assert summed == [TOKENS // SIZE], "only the last, partly filled one"


async def test_without_kept_digests_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    report, summed = await moved(Unkept(), monkeypatch)
    assert report.carried
    assert min(summed) == 0


async def test_a_block_that_changed_since_it_filled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()

    def damage() -> None:
        engine.memory[1][3 * BLOCK_BYTES + 17] ^= 1

    report, _ = await moved(engine, monkeypatch, damage)
    assert not report.carried
    assert "other bytes in blocks [1]" in report.reason
