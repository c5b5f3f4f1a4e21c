"""Digests that the engine makes as its blocks fill: what is given with a pin is of the bytes that are there."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_core import GenerateRequest, MemoryRegion, SamplingParams, WeightSource
from gyre_local.kv.digests import CATCH_UP, BlockDigests

SIZE = 16


def bytes_of(regions: Sequence[MemoryRegion], block: int) -> bytes:
    return b"".join(ctypes.string_at(r.addr + block * r.block_bytes, r.block_bytes) for r in regions)


def sums(regions: Sequence[MemoryRegion], blocks: Any) -> npt.NDArray[np.uint64]:
    """A digest good enough to tell blocks apart."""
    return np.array([int.from_bytes(bytes_of(regions, int(b)), "little") % (2**61 - 1) for b in blocks], np.uint64)


class Counting:
    """`sums` that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, regions: Sequence[MemoryRegion], blocks: Any) -> npt.NDArray[np.uint64]:
        self.asked += [int(b) for b in blocks]
        return sums(regions, blocks)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 60, n)]


async def pinned(engine: Any, session: str = "s") -> Any:
    """A pin, compared with the bytes, and let go again."""
    found = await engine.kv_pin(session)
    full = len(found.token_ids) // SIZE
    assert np.array_equal(found.digests, sums(engine.kv_regions(), found.block_ids[: len(found.digests)]))
    await engine.kv_release(session, found.generation, forget=False)
    return found, full


async def test_each_block_is_summed_once_when_it_fills_and_none_at_a_pin(engines: Any, ask: Any) -> None:
    """The engine samples on beside the pins, so blocks that filled after a pin may be asked for by then, too."""
    engine, make = await engines(chunk_tokens=1, prefill_tokens=40), Counting()
    await engine.kv_keep_digests(make)
    stream = engine.generate(GenerateRequest("r", "s", prompt_of(100), SamplingParams(60, temperature=0.0)))
    seen, pins = 0, []
    async for chunk in stream:
        seen += len(chunk.token_ids)
        if seen in (1, 30):
            found, full = await pinned(engine)
            assert len(found.digests) == full
            assert make.asked[:full] == found.block_ids[:full].tolist()
            pins.append(full)
    assert len(pins) == 2, "each token came in a chunk of its own"
    found, full = await pinned(engine)
    assert (len(found.digests), full) == (9, 9)
    assert make.asked == found.block_ids[:9].tolist()
    again = await ask(engine, [*prompt_of(100), *prompt_of(40, 1)], 20, name="again", session="s")
    assert again.cached == 100
    found, full = await pinned(engine)
    assert len(found.digests) == full == 9
    assert make.asked[9:] == found.block_ids[6:9].tolist(), "the six blocks that are shared were known"


async def test_a_digest_dies_with_its_block(engines: Any, ask: Any) -> None:
    engine = await engines(kv_tokens=256, max_running=2)
    await engine.kv_keep_digests(sums)
    for seed in range(6):
        await ask(engine, prompt_of(150, seed), 20, name=f"r{seed}", session="s")
        found, full = await pinned(engine)
        assert len(found.digests) == full == 10
    taken = await engine.kv_reserve("coming", 200, 0)
    for region in engine.kv_regions():
        for block in taken:
            ctypes.memset(region.addr + int(block) * region.block_bytes, 7, region.block_bytes)
    context = np.array(prompt_of(200, 9), np.int32)
    await engine.kv_commit("coming", 0, context, taken)
    found, full = await pinned(engine, "coming")
    assert (len(found.digests), full) == (0, 12), "what others wrote is not what was summed"


async def test_all_die_when_the_weights_change(engines: Any, ask: Any, folder_of: Any) -> None:
    engine, make = await engines(), Counting()
    await engine.kv_keep_digests(make)
    await ask(engine, prompt_of(100), 4, name="a", session="s")
    before = len(make.asked)
    blocks = list(range(4096 // SIZE))
    known = [len(await engine._worker.do(lambda core, b=b: core.pool.digests.of([b]))) for b in make.asked]
    assert known == [1] * 6
    await engine.update_weights(WeightSource(1, str(folder_of("qwen3", 1))))
    known = [len(await engine._worker.do(lambda core, b=b: core.pool.digests.of([b]))) for b in blocks]
    assert not any(known)
    await ask(engine, prompt_of(100), 4, name="b", session="s")
    found, full = await pinned(engine)
    assert found.version == 1
    assert len(found.digests) == full == 6
    assert make.asked[before:] == found.block_ids[:6].tolist()


async def test_a_wake_begins_anew(engines: Any, ask: Any, folder_of: Any) -> None:
    engine = await engines()
    await engine.kv_keep_digests(sums)
    await ask(engine, prompt_of(100), 4, name="a", session="s")
    await engine.sleep()
    await engine.wake(WeightSource(1, str(folder_of("qwen3", 1))))
    await ask(engine, prompt_of(100, 1), 4, name="b", session="s")
    found, full = await pinned(engine)
    assert len(found.digests) == full == 6


async def test_without_a_wish_nothing_is_summed(engines: Any, ask: Any) -> None:
    engine = await engines()
    await ask(engine, prompt_of(40), 4, name="a", session="s")
    assert (await engine.kv_pin("s")).digests is None


def test_blocks_that_came_by_a_move_are_caught_up_with_a_few_at_a_time() -> None:
    digests = BlockDigests(lambda regions, blocks: np.asarray(blocks, np.uint64) + 100, (), 64)
    blocks = list(range(40, 10, -1))
    digests.fill(blocks[:21], 1)
    assert digests.of(blocks).tolist() == [100 + b for b in blocks[: CATCH_UP + 1]]
    digests.fill(blocks[:22], 1)
    digests.fill(blocks[:23], 1)
    assert len(digests.of(blocks)) == 23
    digests.drop([blocks[4]])
    assert len(digests.of(blocks)) == 4
    digests.drop_all()
    assert len(digests.of(blocks)) == 0
