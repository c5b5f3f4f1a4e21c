"""Tensor-parallel pools: several ranks' regions on one side or both; and SGLang's numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer import HostPool, KVLayout, LayoutRefused, MigrationServer, MovePolicy, migrate, sglang
from gyre_kvxfer.copier import rank_pools

KEY = b"ranks"
WHOLE = KVLayout(layers=2, kv_heads=4, head_dim=16, block_size=16, num_blocks=32, dtype="float32", across="KL")


class Ranks(HostPool):
    """All ranks of an engine in one process: the first keeps the books, the others only memory."""

    def __init__(self, layout: KVLayout, version: int) -> None:
        super().__init__(layout, version)
        others = [replace(layout, tp_rank=r) for r in range(1, layout.tp_size)]
        self.others = [HostPool(x, version) for x in others]

    def regions(self):
        return [*super().regions(), *(r for o in self.others for r in o.regions())]

    def fill(self, session: str, whole: HostPool) -> None:
        """Each rank's heads of the session in `whole`."""
        for pool in (self, *self.others):
            tokens, kv = heads_of(whole, session, pool.layout().heads)
            pool.append(session, tokens, kv)

    def check(self, session: str, whole: HostPool) -> None:
        for pool in self.others:
            pool._sessions = self._sessions
        for pool in (self, *self.others):
            np.testing.assert_array_equal(pool.read(session)[1], heads_of(whole, session, pool.layout().heads)[1])


def heads_of(whole: HostPool, session: str, heads: range) -> tuple[np.ndarray, np.ndarray]:
    tokens, kv = whole.read(session)
    x = whole.layout()
    shaped = kv.reshape(x.layers, x.kinds, len(tokens), x.kv_heads, x.head_dim * x.itemsize)
    return tokens, np.ascontiguousarray(shaped[:, :, :, heads.start : heads.stop]).ravel()


@pytest.mark.parametrize("digest", ["", "fast"])
@pytest.mark.parametrize("change", [{}, {"axes": "BHTKD", "across": "L"}, {"block_size": 8, "num_blocks": 64}])
@pytest.mark.parametrize(("a", "b"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 2), (2, 8), (8, 1)])
async def test_sessions_move_between_tensor_parallel_sizes(a, b, change, digest):
    whole = HostPool(WHOLE, 3)
    kv = np.random.default_rng(a).integers(0, 255, 100 * WHOLE.token_nbytes).astype(np.uint8)
    whole.append("s", np.arange(100, dtype=np.int32), kv)
    source = Ranks(replace(WHOLE, tp_size=a), 3)
    source.fill("s", whole)
    sink = Ranks(replace(WHOLE, tp_size=b, **change), 3)
    for transport in ("process_vm", "tcp"):
        async with MigrationServer(source, key=KEY) as server:
            policy = MovePolicy(digest=digest)
            report = await migrate("s", server.endpoint, sink, key=KEY, policy=policy, transport=transport)
        assert report.carried, report
        sink.check("s", whole)
        if transport == "process_vm":
            for pool in (source, *source.others):
                pool._sessions.pop("s", None)
            source.fill("s", whole)


def test_regions_that_fit_no_rank_count_are_refused():
    pool = Ranks(replace(WHOLE, tp_size=4), 3)
    assert len(rank_pools(pool.layout(), pool.regions())) == 4
    with pytest.raises(LayoutRefused, match="regions"):
        rank_pools(pool.layout(), pool.regions()[:9])
    short = [replace(r, nbytes=8) for r in pool.regions()]
    with pytest.raises(LayoutRefused, match="bytes"):
        rank_pools(pool.layout(), short)


async def test_missing_ranks_are_refused():
    source, sink = HostPool(replace(WHOLE, tp_size=2, tp_rank=0), 3), HostPool(WHOLE, 3)
    source.append("s", np.arange(5, dtype=np.int32), np.zeros(5 * source.layout().token_nbytes, np.uint8))
    async with MigrationServer(source, key=KEY) as server:
        report = await migrate("s", server.endpoint, sink, key=KEY)
        assert report.code == "layout"
        assert "ranks" in report.reason


def test_sglang_pools_slots_and_keys():
    page = 16 * 4 * 8 * 2
    numbers = {"layers": 3, "kv_heads": 4, "head_dim": 8, "page_size": 16, "dtype": "float16"}
    layout, regions = sglang.from_buffers(range(6), [page * 11] * 6, [page] * 6, **numbers)
    assert (layout.num_blocks, layout.across, layout.region_nbytes) == (11, "KL", page * 11)
    assert len(regions) == 6
    latent = numbers | {"head_dim": 32}
    assert sglang.from_buffers(range(3), [page * 11] * 3, [page] * 3, **latent)[0].kind == "mla"
    with pytest.raises(LayoutRefused):
        sglang.from_buffers(range(6), [page * 11] * 6, [page] * 6, **(numbers | {"head_dim": 9}))
    with pytest.raises(LayoutRefused):
        sglang.from_buffers(range(5), [page * 11] * 5, [page] * 5, **numbers)
    table = np.array([3, 9, 1])
    found = sglang.slots(table, 16, 37)
    assert (len(found), found[0], found[36]) == (37, 48, 20)
    np.testing.assert_array_equal(sglang.pages(found, 16), table)
    for bad in (found + 1, found[::-1], sglang.slots(np.array([0]), 16, 5)):
        with pytest.raises(LayoutRefused):
            sglang.pages(bad, 16)
    assert sglang.extra_key(1) != sglang.extra_key(2)
