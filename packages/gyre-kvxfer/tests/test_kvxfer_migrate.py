"""Moves between two real processes, over every transport and between unlike layouts."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer import (
    HostPool,
    KVError,
    KVLayout,
    MigrationServer,
    MovePolicy,
    Region,
    Transport,
    TransportError,
    migrate,
)
from gyre_kvxfer.copy import convert, stored_dtype
from gyre_kvxfer.memory import host_buffer
from gyre_kvxfer.transports import nixl

BASE = KVLayout(layers=3, kv_heads=4, head_dim=16, block_size=16, num_blocks=64, dtype="float32", across="KL")
TRANSPORTS = ("process_vm", "shm", "tcp")
"""That every machine has; NIXL is in `test_kvxfer_nixl.py`."""


def check_arrived(peer, pool: HostPool, session: str, n: int, src: KVLayout) -> None:
    tokens, kv = pool.read(session)
    np.testing.assert_array_equal(tokens, peer.tokens_of(session, n))
    assert len(tokens) == n
    want = peer.kv_of(src, session, 0, n)
    if src.dtype == pool.layout().dtype:
        np.testing.assert_array_equal(kv, want)
    else:
        np.testing.assert_array_equal(
            kv.view(stored_dtype(pool.layout().dtype)),
            convert(want.view(stored_dtype(src.dtype)), src.dtype, pool.layout().dtype),
        )


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_session_moves_whole_over_every_transport(source, peer, transport):
    names = {"": "a", "fast": "b", "strong": "c"}
    there = source(BASE, dict.fromkeys(names.values(), 300) | {"o": 50}, transports=TRANSPORTS)
    for digest, session in names.items():
        pool = HostPool(replace(BASE, num_blocks=40), version=3)
        policy = MovePolicy(digest=digest, finite=True)
        report = await migrate(session, there.endpoint, pool, key=peer.KEY, transport=transport, policy=policy)
        assert report.carried, report
        assert (report.transport, report.tokens, report.version) == (transport, 300, 3)
        assert report.bytes == 300 * BASE.token_nbytes
        check_arrived(peer, pool, session, 300, BASE)
        assert pool.free_blocks == 40 - 19
    after = there.ask("state")
    assert after["sessions"] == {"o": [50, False, 0]}
    assert after["free"] == 64 - 4


UNLIKE = [
    {"axes": "BHTKD", "across": "L"},
    {"axes": "KBTHD", "across": "L", "block_size": 5},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "axes": "BHTD", "block_size": 32},
    {"block_size": 8, "num_blocks": 200},
    {"block_pitch": 8192},
]


async def test_unlike_pools(source, peer):
    cases = [(t, c, d) for t in ("process_vm", "shm", "tcp") for c in UNLIKE for d in ("", "fast")]
    there = source(replace(BASE, num_blocks=1024), {f"s{i:02}": 203 for i in range(len(cases))})
    for i, (transport, change, digest) in enumerate(cases):
        pool = HostPool(replace(BASE, **change), version=3)
        policy = MovePolicy(digest=digest)
        report = await migrate(f"s{i:02}", there.endpoint, pool, key=peer.KEY, transport=transport, policy=policy)
        assert report.carried, (report, transport, change, digest)
        check_arrived(peer, pool, f"s{i:02}", 203, BASE)


async def test_auto_takes_the_direct_way_and_says_why(source, peer):
    there = source(BASE, {"s": 20})
    report = await migrate("s", there.endpoint, HostPool(BASE, 3), key=peer.KEY)
    assert report.carried
    assert report.transports[report.transport] == "taken"


async def test_pre_copy_then_freeze(source, peer):
    there = source(BASE, {"s": 500})
    pool = HostPool(BASE, version=3)
    report = await migrate("s", there.endpoint, pool, key=peer.KEY, policy=MovePolicy(freeze_below=0, digest="fast"))
    assert report.carried
    assert report.rounds == 2
    assert report.pause_seconds < report.seconds
    check_arrived(peer, pool, "s", 500, BASE)


async def test_tokens_added_between_the_rounds_come_too(source, peer):
    there = source(BASE, {"s": 500})

    class Slow(HostPool):
        async def reserve(self, session, n_tokens, version):
            if not self._reserved:
                there.ask("append s 77")
            return await super().reserve(session, n_tokens, version)

    pool = Slow(BASE, version=3)
    report = await migrate("s", there.endpoint, pool, key=peer.KEY, policy=MovePolicy(freeze_below=0, digest="fast"))
    assert report.carried
    assert report.tokens == 577
    check_arrived(peer, pool, "s", 577, BASE)


async def test_unix_sockets(source, peer, tmp_path):
    there = source(BASE, {"s": 20}, listen=f"unix://{tmp_path}/kv.sock")
    for transport in ("tcp", "shm"):
        pool = HostPool(BASE, 3)
        report = await migrate("s", there.endpoint, pool, key=peer.KEY, transport=transport)
        assert report.carried or transport == "shm"


@pytest.mark.parametrize(
    ("pool", "session", "code"),
    [
        (HostPool(BASE, version=4), "s", "version"),
        (HostPool(replace(BASE, num_blocks=3), version=3), "s", "no_room"),
        (HostPool(replace(BASE, kv_heads=8), version=3), "s", "layout"),
        (HostPool(BASE, version=3), "nobody", "unknown_session"),
    ],
)
async def test_refusals_leave_the_session_where_it_was(source, peer, pool, session, code):
    there = source(BASE, {"s": 200})
    free = pool.free_blocks
    report = await migrate(session, there.endpoint, pool, key=peer.KEY)
    assert not report.carried
    assert report.code == code, report
    assert pool.free_blocks == free
    async with asyncio.timeout(60):  # it hears of the refusal when it comes to it
        while there.ask("state")["sessions"]["s"] != [200, False, 0]:
            await asyncio.sleep(0.01)


async def test_a_wrong_key_is_turned_away(source, peer):
    there = source(BASE, {"s": 20})
    report = await migrate("s", there.endpoint, HostPool(BASE, 3), key=b"something else")
    assert not report.carried
    assert "key" in report.reason or "end of the stream" in report.reason
    assert there.ask("state")["moves"] == []
    with pytest.raises(KVError):
        await migrate("s", there.endpoint, HostPool(BASE, 3), key=b"")


async def test_nobody_there():
    report = await migrate("s", "tcp://127.0.0.1:1", HostPool(BASE, 3), key=b"k")
    assert not report.carried
    assert report.code == "silent"


async def test_shared_memory_leaves_no_file(source, peer):
    there = source(BASE, {"s": 300})
    before = {n for n in os.listdir("/dev/shm") if n.startswith("gyre-kv-")}
    report = await migrate("s", there.endpoint, HostPool(BASE, 3), key=peer.KEY, transport="shm")
    assert report.carried
    assert {n for n in os.listdir("/dev/shm") if n.startswith("gyre-kv-")} <= before


class Loop:
    """A transport of somebody else's: memory of the same process."""

    name = "loop"

    def __init__(self, regions):
        self.regions = regions
        self.reads = 0

    def meta(self):
        return "here"

    async def read(self, move, remote, local, into):
        self.reads += 1
        got = [host_buffer(r) for r in self.regions]
        stream = np.concatenate(
            [got[r][o : o + n] for r, o, n in zip(remote.region, remote.offset, remote.nbytes, strict=True)]
        )
        at = 0
        for r, o, n in zip(local.region, local.offset, local.nbytes, strict=True):
            host_buffer(into[r])[o : o + n] = stream[at : at + n]
            at += n

    def stop(self):
        pass

    def close(self):
        pass


class LoopReader(Loop):
    async def close(self):
        pass


async def test_a_transport_from_outside_is_tried_first_and_may_decline(peer):
    pool = HostPool(BASE, 3)
    for session in ("a", "b"):
        peer.fill(pool, session, 100)
    readers = []

    def open_reader(meta, regions, into):
        if readers:
            raise TransportError("only once")
        readers.append(LoopReader(regions))
        return readers[0]

    extra = (Transport("loop", Loop, open_reader),)
    async with MigrationServer(pool, key=peer.KEY, extra=extra) as server:
        for session, name in (("a", "loop"), ("b", "shm")):
            sink = HostPool(replace(BASE, axes="BHTD"), 3)
            report = await migrate(session, server.endpoint, sink, key=peer.KEY, extra=extra)
            assert report.carried, report
            assert report.transport == name or name != "loop"
            check_arrived(peer, sink, session, 100, BASE)
        assert report.transports["loop"] == "only once"


@pytest.mark.gpu
@pytest.mark.skipif(not nixl.flavour(), reason="no NIXL")
async def test_device_memory_moves_through_nixl(peer):
    cp = pytest.importorskip("cupy")
    host, there, here = HostPool(BASE, 3), HostPool(BASE, 3), HostPool(BASE, 3)
    peer.fill(host, "s", 100)
    peer.fill(there, "s", 100)
    pools = []
    for pool in (there, here):
        held = [cp.asarray(b) for b in pool.buffers]
        pools.append(held)
        pool.regions = lambda held=held: [Region(b.data.ptr, b.nbytes, "cuda:0") for b in held]
    async with MigrationServer(there, key=peer.KEY) as server:
        report = await migrate("s", server.endpoint, here, key=peer.KEY)
    assert report.carried, report
    assert report.transport == "nixl"
    for buffer, got in zip(here.buffers, pools[1], strict=True):
        buffer[:] = cp.asnumpy(got)
    check_arrived(peer, here, "s", 100, BASE)
