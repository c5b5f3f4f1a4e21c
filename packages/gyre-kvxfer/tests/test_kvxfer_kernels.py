"""kv.cu: compiles for every architecture, and on the host does what numpy does, bit by bit."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from gyre_kvxfer.blocks import block_digests
from gyre_kvxfer.copy import convert, execute
from gyre_kvxfer.errors import KVError, LayoutRefused
from gyre_kvxfer.kernels.calls import plan_calls
from gyre_kvxfer.kernels.compile import ARCHITECTURES, compile_cubin, load_nvrtc
from gyre_kvxfer.kernels.host import HostKernels
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.plan import plan_transfer, sources_for

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


def has_nvrtc() -> bool:
    try:
        load_nvrtc()
    except KVError:
        return False
    return True


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return HostKernels(tmp_path_factory.mktemp("kernels"), grid=3)


@pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_for_the_device(arch):
    cubin = compile_cubin(arch)
    assert cubin[:4] == b"\x7fELF"
    for entry in (b"kv_copy_16", b"kv_convert_float32_bfloat16", b"kv_lane_sums", b"kv_finish_digests"):
        assert entry in cubin


def pools(src: KVLayout, dst: KVLayout, seed: int):
    rng = np.random.default_rng(seed)

    def filled(x):
        n = x.region_nbytes // x.itemsize
        data = convert((rng.standard_normal(n) * 10.0 ** rng.integers(-8, 6, n)).astype(np.float32), "float32", x.dtype)
        return data.view(np.uint8).copy()

    return [[filled(x) for _ in range(x.region_count)] for x in (src, dst)]


BASE = KVLayout(layers=2, kv_heads=4, head_dim=6, block_size=4, num_blocks=12, dtype="float32")
PAIRS = [
    (BASE, BASE),
    (BASE, replace(BASE, axes="BHTKD", across="L")),
    (replace(BASE, axes="KBTHD", across="L"), replace(BASE, axes="BHTLKD", across="", block_size=3)),
    (BASE, replace(BASE, tp_size=2, tp_rank=1)),
    (replace(BASE, tp_size=4, tp_rank=2), replace(BASE, axes="BHTD", tp_size=2, tp_rank=1)),
    (BASE, replace(BASE, axes="BDTH")),
    (replace(BASE, dtype="float16", head_dim=5), replace(BASE, dtype="float16", head_dim=5, block_size=7)),
    *[
        (replace(BASE, dtype=a), replace(BASE, dtype=b, axes="BHTD", block_size=5))
        for a in ("float32", "float16", "bfloat16")
        for b in ("float32", "float16", "bfloat16")
        if a != b
    ],
]


@needs_compiler
@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_moves_like_numpy(kernels, pair):
    src, dst = PAIRS[pair]
    assert src.tp_rank in sources_for(src, dst)
    stop = 17
    rng = np.random.default_rng(pair)
    s_blocks, d_blocks = rng.permutation(12)[: src.blocks_for(stop)], rng.permutation(12)[: dst.blocks_for(stop)]
    plan = plan_transfer(src, dst, s_blocks, d_blocks, start=2, stop=stop)
    source, want = pools(src, dst, pair)
    got = [r.copy() for r in want]
    execute(plan, source, want)
    kernels.execute(plan, [r.ctypes.data for r in source], [r.ctypes.data for r in got])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@needs_compiler
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("float16", "float32"),
        ("bfloat16", "float16"),
        ("float16", "bfloat16"),
        ("bfloat16", "float32"),
    ],
)
def test_every_16_bit_pattern_and_the_hard_floats_convert_like_numpy(kernels, a, b):
    if a == "float32":
        halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
        words = np.concatenate([halves.view(np.uint32), np.arange(65536, dtype=np.uint32) << 16])
        data = np.concatenate([words, words + 0x0FFF, words + 0x1000, words + 0x1001, words + 0x8000]).view(np.float32)
    else:
        data = np.arange(65536, dtype=np.uint16)
        data = data.view(np.float16) if a == "float16" else data
    one = {
        "layers": 1,
        "kv_heads": 1,
        "num_blocks": len(data) // 2,
        "block_size": 1,
        "head_dim": 1,
        "across": "L",
        "axes": "KBTHD",
    }
    src, dst = KVLayout(dtype=a, **one), KVLayout(dtype=b, **one)
    n = src.num_blocks
    plan = plan_transfer(src, dst, np.arange(n), np.arange(n), stop=n)
    source = data.view(np.uint8).copy()
    got = np.zeros(dst.region_nbytes, np.uint8)
    kernels.execute(plan, [source.ctypes.data], [got.ctypes.data])
    with np.errstate(invalid="ignore"):
        want = convert(data, a, b)
    kind = {"float32": np.float32, "float16": np.float16}.get(b)
    x = got.view(kind or np.uint16)
    if kind is None:
        nan = (want & 0x7FFF) > 0x7F80
        np.testing.assert_array_equal((x & 0x7FFF) > 0x7F80, nan)
    else:
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(x), nan)
    np.testing.assert_array_equal(
        x.view(np.uint8).reshape(len(x), -1)[~nan], want.view(np.uint8).reshape(len(x), -1)[~nan]
    )


@needs_compiler
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(
    "layout",
    [
        replace(BASE, head_dim=8),
        replace(BASE, head_dim=64, axes="KBTHD", across="L"),
        replace(BASE, head_dim=64, block_size=16, block_pitch=32768),
    ],
)
def test_digests_equal_numpy(kernels, layout, slices):
    regions, _ = pools(layout, layout, 5)
    blocks = np.array([3, 0, 11, 7])
    want = block_digests("fast", layout, regions, blocks, 0, 4, 4 * layout.block_size)
    np.testing.assert_array_equal(kernels.digests(layout, [r.ctypes.data for r in regions], blocks, slices), want)


def test_units_fit_every_address():
    plan = plan_transfer(BASE, BASE, np.arange(2), np.arange(2), stop=8)
    aligned = plan_calls(plan, [4096] * 4, [8192] * 4)
    assert {c.kernel for c in aligned} == {"kv_copy_16"}
    odd = plan_calls(plan, [4096 + 2] * 4, [8192] * 4)
    assert {c.kernel for c in odd} == {"kv_copy_2"}


def test_pieces_that_are_no_words_are_refused(tmp_path):
    from gyre_kvxfer.kernels.calls import digest_rows

    with pytest.raises(LayoutRefused):
        digest_rows(replace(BASE, head_dim=1, kv_heads=1, block_size=1), [0] * 4)


class FakeStream:
    """A stream of a stand-in for CuPy; work asked for without one goes to the current."""

    current: ClassVar[list[FakeStream]] = []

    def __enter__(self) -> None:
        self.current.append(self)

    def __exit__(self, *_: object) -> None:
        self.current.pop()


@pytest.mark.parametrize("given", [True, False])
def test_a_calls_tables_are_uploaded_on_the_stream_that_reads_them(given, monkeypatch):
    """On another they may come late, and their memory be another's before they were read."""
    from gyre_kvxfer.kernels.device import DeviceKernels

    uploads, launches, outer, inner = [], [], FakeStream(), FakeStream()

    def asarray(x):
        uploads.append(FakeStream.current[-1])
        return SimpleNamespace(data=SimpleNamespace(ptr=x.ctypes.data))

    def function(kernel):
        return lambda grid, block, args, stream=None: launches.append(stream or FakeStream.current[-1])

    device = SimpleNamespace(attributes={"MultiProcessorCount": 1})
    fake = SimpleNamespace(
        RawModule=lambda **_: SimpleNamespace(get_function=function),
        cuda=SimpleNamespace(Device=lambda: device), asarray=asarray,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", fake)
    plan = plan_transfer(BASE, BASE, np.arange(2), np.arange(2), stop=8)
    with outer:
        DeviceKernels().execute(plan, [4096] * 4, [8192] * 4, *([inner] if given else []))
    want = inner if given else outer
    assert set(map(id, uploads)) == set(map(id, launches)) == {id(want)}


@pytest.mark.gpu
@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_moves_like_numpy_on_a_gpu(pair):
    cp = pytest.importorskip("cupy")
    from gyre_kvxfer.kernels.device import DeviceKernels

    src, dst = PAIRS[pair]
    stop = 17
    rng = np.random.default_rng(pair)
    s_blocks, d_blocks = rng.permutation(12)[: src.blocks_for(stop)], rng.permutation(12)[: dst.blocks_for(stop)]
    plan = plan_transfer(src, dst, s_blocks, d_blocks, start=2, stop=stop)
    source, want = pools(src, dst, pair)
    there, here = [cp.asarray(r) for r in source], [cp.asarray(r) for r in want]
    execute(plan, source, want)
    DeviceKernels().execute(plan, [r.data.ptr for r in there], [r.data.ptr for r in here])
    for x, y in zip(here, want, strict=True):
        np.testing.assert_array_equal(cp.asnumpy(x), y)


@pytest.mark.gpu
def test_digests_equal_numpy_on_a_gpu():
    cp = pytest.importorskip("cupy")
    from gyre_kvxfer.kernels.device import DeviceKernels

    layout = replace(BASE, head_dim=64, block_size=16)
    regions, _ = pools(layout, layout, 5)
    blocks = np.array([3, 0, 11, 7])
    there = [cp.asarray(r) for r in regions]
    want = block_digests("fast", layout, regions, blocks, 0, 4, 4 * layout.block_size)
    for slices in (1, 4):
        got = DeviceKernels().digests(layout, [r.data.ptr for r in there], blocks, slices)
        np.testing.assert_array_equal(cp.asnumpy(got), want)
