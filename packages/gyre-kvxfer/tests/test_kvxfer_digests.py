"""Digests kept since a block filled, and digests taken while a block is read: same answers, and damage is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer import HostPool, KVLayout, MigrationServer, MovePolicy, Region, TransportError, migrate, native, server
from gyre_kvxfer.blocks import block_digests, block_runs, rows
from gyre_kvxfer.engine import KeptDigests, Pinned
from gyre_kvxfer.transports import process_vm
from gyre_kvxfer.transports.process_vm import ProcessVmExporter, ProcessVmReader

KEY = b"digests"
LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, num_blocks=64, dtype="float32")
FAST = MovePolicy(digest="fast", give_up_s=60.0)


def filled(n: int, digest: str = "fast", steps: int = 1) -> HostPool:
    """A pool with session "s", grown in so many equal steps."""
    pool = HostPool(LAYOUT, 3, digest=digest)
    kv = np.random.default_rng(n).standard_normal((n, LAYOUT.token_nbytes // 4)).astype(np.float32)
    for part in np.split(np.arange(n, dtype=np.int32), steps):
        pool.append("s", part, np.ascontiguousarray(kv[part]).view(np.uint8).ravel())
    return pool


async def moved(source: HostPool, sink: HostPool, policy: MovePolicy = FAST, transport: str = "auto"):
    async with MigrationServer(source, key=KEY) as there:
        return await migrate("s", there.endpoint, sink, key=KEY, policy=policy, transport=transport)


@pytest.mark.parametrize("kind", ["fast", "strong"])
async def test_digests_of_blocks_that_filled_one_by_one_are_those_of_the_whole(kind):
    pool = filled(120, kind, steps=30)
    kept = (await pool.pin("s")).kept
    blocks = pool.sessions()["s"].blocks
    assert kept is not None
    assert (kept.kind, kept.values.shape) == (kind, (1, 7))
    assert (kept.values[0] == block_digests(kind, LAYOUT, pool.buffers, blocks, 0, 7, 120)).all()


async def test_a_source_that_kept_digests_sums_nothing_when_it_moves(monkeypatch):
    def never(*args):
        raise AssertionError("the source summed blocks again")

    monkeypatch.setattr(server, "source_digests", never)
    for freeze_below in (0, 1 << 30):
        report = await moved(filled(112), HostPool(LAYOUT, 3), replace(FAST, freeze_below=freeze_below))
        assert report.carried, report
    report = await moved(filled(112, digest=""), HostPool(LAYOUT, 3))
    assert "summed blocks again" in report.reason


@pytest.mark.parametrize("transport", ["process_vm", "tcp"])
@pytest.mark.parametrize("freeze_below", [0, 1 << 30])
async def test_bytes_that_changed_since_their_block_filled_do_not_move(transport, freeze_below):
    source, sink = filled(120), HostPool(LAYOUT, 3)
    rows(LAYOUT, source.buffers)[1][source.sessions()["s"].blocks[5]][9] ^= 4
    report = await moved(source, sink, replace(FAST, freeze_below=freeze_below), transport)
    assert report.code == "verification", report
    assert "[5]" in report.reason
    assert "s" in source.sessions()
    assert "s" not in sink.sessions()


async def test_kept_digests_of_another_kind_are_not_taken_and_the_last_block_is_summed_anew():
    source, sink = filled(120, "strong"), HostPool(LAYOUT, 3)
    report = await moved(source, sink)
    assert report.carried, report
    source, sink = filled(120), HostPool(LAYOUT, 3)
    rows(LAYOUT, source.buffers)[1][source.sessions()["s"].blocks[7]][9] ^= 4  # not full: no digest of it is kept yet
    report = await moved(source, sink)
    assert report.carried, report


async def test_a_session_that_came_by_a_move_keeps_digests_once_it_grows():
    source, between, sink = filled(120), HostPool(LAYOUT, 3, digest="fast"), HostPool(LAYOUT, 3)
    assert (await moved(source, between)).carried
    between.append("s", np.arange(20, dtype=np.int32), np.ones(20 * LAYOUT.token_nbytes, np.uint8))
    pinned = await between.pin("s")
    assert pinned.kept is not None
    assert pinned.kept.values.shape == (1, 8)
    assert (await moved(between, sink)).tokens == 140


@pytest.mark.parametrize("at_pin", [0, 3, 7])
@pytest.mark.parametrize("at_freeze", [0, 3, 7])
async def test_a_source_may_keep_more_or_fewer_digests_from_one_pin_to_the_next(at_pin, at_freeze):
    class Forgetful(HostPool):
        count = at_pin

        async def pin(self, session):
            p = await super().pin(session)
            kept = KeptDigests("fast", p.kept.values[:, : self.count]) if self.count else None
            return Pinned(p.version, p.token_ids, p.block_ids, p.generation, kept)

        async def freeze(self, session):
            self.count = at_freeze
            return await super().freeze(session)

    source, sink = filled(120), HostPool(LAYOUT, 3)
    source.__class__ = Forgetful
    report = await moved(source, sink, replace(FAST, freeze_below=0))
    assert report.carried, report


@pytest.mark.parametrize("shape", [(2, 7), (1, 8), (7,)])
async def test_kept_digests_that_cannot_be_are_refused(shape):
    class Wrong(HostPool):
        async def pin(self, session):
            p = await super().pin(session)
            return Pinned(p.version, p.token_ids, p.block_ids, p.generation, KeptDigests("fast", np.zeros(shape, "u8")))

    source, sink = filled(120), HostPool(LAYOUT, 3)
    source.__class__ = Wrong
    report = await moved(source, sink)
    assert not report.carried
    assert "kept digests" in report.reason
    assert not source.sessions()["s"].frozen


@pytest.mark.parametrize("change", [{}, {"axes": "KBTHD", "across": "L"}, {"block_pitch": 4096}])
async def test_runs_of_blocks_follow_the_rows_of_a_digest(change):
    layout = replace(LAYOUT, **change)
    buffers = [np.random.default_rng(i).integers(0, 256, layout.region_nbytes, np.uint8) for i in range(4)]
    blocks = np.array([9, 3, 60])
    runs = block_runs(layout, blocks)
    got = [buffers[r][o : o + n].tobytes() for r, o, n in zip(runs.region, runs.offset, runs.nbytes, strict=True)]
    assert got == [row[b].tobytes() for row in rows(layout, buffers[: layout.region_count]) for b in blocks]


@pytest.mark.skipif(native.load() is None, reason="no C compiler here: digests are taken beside the reads")
async def test_whole_blocks_are_digested_by_the_threads_that_read_them(monkeypatch):
    monkeypatch.setattr(process_vm, "SHARED_BYTES", 1)
    monkeypatch.setattr(process_vm, "CALL_BYTES", 5000)
    source, into = filled(1008), HostPool(LAYOUT, 3)
    exporter = ProcessVmExporter()
    reader = ProcessVmReader.probe(exporter.meta(), source.regions())
    blocks = source.sessions()["s"].blocks
    runs = [block_runs(LAYOUT, x) for x in (blocks, blocks[::-1])]
    parts = await reader.read_summed("", *runs, into.regions(), len(blocks))
    digests = parts.reshape(-1, len(blocks)).sum(axis=0, dtype=np.uint64)
    assert (digests == block_digests("fast", LAYOUT, source.buffers, blocks, 0, len(blocks), 1008)).all()
    assert (digests == block_digests("fast", LAYOUT, into.buffers, blocks[::-1], 0, len(blocks), 1008)).all()
    reader.stop()
    with pytest.raises(TransportError, match="stop"):
        await reader.read_summed("", *runs, into.regions(), len(blocks))
    lost = ProcessVmReader.probe(exporter.meta(), [Region(8, r.nbytes) for r in source.regions()])
    with pytest.raises(TransportError, match="EFAULT"):
        await lost.read_summed("", *runs, into.regions(), len(blocks))
    exporter.close()


async def test_without_a_compiler_digests_are_taken_beside_the_reads(monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    for transport in ("process_vm", "shm"):
        report = await moved(filled(1000), HostPool(LAYOUT, 3), transport=transport)
        assert report.carried, report
