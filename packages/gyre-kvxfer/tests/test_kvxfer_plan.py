"""Plans against a token-by-token oracle, over pairs of layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gyre_kvxfer.copy import convert, execute, stored_dtype
from gyre_kvxfer.errors import LayoutRefused
from gyre_kvxfer.layout import KVLayout, StateSpec
from gyre_kvxfer.plan import plan_transfer, sources_for
from hypothesis import given, settings
from hypothesis import strategies as st

FORMS = [
    ("BTHD", "LK"),
    ("BTHD", "KL"),
    ("BHTD", "LK"),
    ("BHTKD", "L"),
    ("KBTHD", "L"),
    ("KBHTD", "L"),
    ("BKTHD", "L"),
    ("KLBTHD", ""),
    ("KBLTHD", ""),
    ("BHTLKD", ""),
    ("LKBHDT", ""),
    ("BDTH", "LK"),
]
LATENT = [("BTD", "L"), ("BTHD", "L"), ("LBTD", ""), ("BLTD", "")]


def pool(layout: KVLayout, rng: np.random.Generator) -> list[np.ndarray]:
    """Regions filled with random finite elements."""
    out = []
    for _ in range(layout.region_count):
        n = layout.region_nbytes // layout.itemsize
        if layout.itemsize == 1:
            values = rng.integers(0, 256, n).astype(np.uint8)
        else:
            values = convert(rng.standard_normal(n).astype(np.float32), "float32", layout.dtype)
        out.append(values.view(np.uint8).copy())
    return out


def element(layout: KVLayout, regions, blocks, token: int, layer: int, kind: int, head: int, d: int):
    """The slow way: the index of one element, computed axis by axis."""
    at = {
        "L": layer,
        "K": kind,
        "B": int(blocks[token // layout.block_size]),
        "T": token % layout.block_size,
        "H": head - layout.heads.start,
        "D": d,
    }
    offset = sum(at[a] * layout.strides[a] for a in layout.axes)
    region = regions[layout.region_index(layer, kind)]
    return region[offset : offset + layout.itemsize].view(stored_dtype(layout.dtype))


def token_values(layout: KVLayout, regions, blocks, token: int, heads: range) -> np.ndarray:
    return np.array(
        [
            element(layout, regions, blocks, token, la, k, h, d)[0]
            for la in range(layout.layers)
            for k in range(layout.kinds)
            for h in heads
            for d in range(layout.head_dim)
        ]
    )


@st.composite
def layouts(draw, kind="mha", dtypes=("float32", "float16", "bfloat16")):
    heads = draw(st.sampled_from([1, 2, 4]))
    base = {"layers": draw(st.integers(1, 2)), "kv_heads": heads, "head_dim": draw(st.sampled_from([2, 4]))}
    out = []
    for _ in range(2):
        tp = draw(st.sampled_from([t for t in (1, 2, 4, 8) if heads % t == 0 or t % heads == 0]))
        axes, across = draw(st.sampled_from(FORMS if kind == "mha" else LATENT))
        layout = KVLayout(
            **(base if kind == "mha" else base | {"kv_heads": 1}),
            block_size=draw(st.sampled_from([1, 2, 3, 4])),
            num_blocks=16,
            dtype=draw(st.sampled_from(dtypes)),
            axes=axes,
            across=across,
            kind=kind,
            tp_size=tp,
            tp_rank=draw(st.integers(0, tp - 1)),
        )
        if draw(st.booleans()):
            inner = layout.strides["B"]
            layout = replace(layout, block_pitch=inner + 8 * layout.itemsize)
        out.append(layout)
    return tuple(out)


def check_pair(src: KVLayout, dst: KVLayout, start: int, stop: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    d_blocks = rng.permutation(16)[: dst.blocks_for(stop)].astype(np.int32)
    s_blocks = rng.permutation(16)[: src.blocks_for(stop)].astype(np.int32)
    got, want = pool(dst, rng), None
    want = [r.copy() for r in got]
    seen: set[int] = set()
    for rank in sources_for(src, dst):
        one = replace(src, tp_rank=rank)
        regions = pool(one, rng)
        plan = plan_transfer(one, dst, s_blocks, d_blocks, start=start, stop=stop)
        execute(plan, regions, got)
        if not plan.converts:
            a, b = plan.runs()
            assert a.total == b.total == plan.nbytes
            flat = [r.copy() for r in want]
            stream = b"".join(
                regions[r][o : o + n].tobytes() for r, o, n in zip(a.region, a.offset, a.nbytes, strict=True)
            )
            at = 0
            for r, o, n in zip(b.region, b.offset, b.nbytes, strict=True):
                flat[r][o : o + n] = np.frombuffer(stream[at : at + n], np.uint8)
                at += n
        heads = [h for h in one.heads if h in dst.heads and h not in seen]
        seen |= set(heads)
        for token in range(start, stop):
            for la in range(src.layers):
                for k in range(src.kinds):
                    for h in heads:
                        for d in range(src.head_dim):
                            value = element(one, regions, s_blocks, token, la, k, h, d)
                            element(dst, want, d_blocks, token, la, k, h, d)[...] = convert(value, src.dtype, dst.dtype)
        if not plan.converts:
            for x, y in zip(flat, want, strict=True):
                np.testing.assert_array_equal(x, y)
    assert seen == set(dst.heads)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


@settings(max_examples=150, deadline=None)
@given(layouts(), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**31))
def test_every_pair_equals_the_oracle(pair, a, b, seed):
    check_pair(*pair, min(a, b), max(a, b), seed)


@settings(max_examples=40, deadline=None)
@given(layouts(kind="mla"), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**31))
def test_latent_attention_equals_the_oracle(pair, a, b, seed):
    check_pair(*pair, min(a, b), max(a, b), seed)


BASE = KVLayout(layers=2, kv_heads=4, head_dim=8, block_size=4, num_blocks=8, dtype="float32")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"kv_heads": 8}, "kv_heads"),
        ({"head_dim": 16}, "head_dim"),
        ({"first_layer": 2}, "layers"),
        ({"dtype": "float8_e4m3", "scales": "a"}, "fp8"),
        ({"states": (StateSpec("ssm", 2, 64),)}, "recurrent"),
        ({"model": "other"}, "models"),
        ({"kind": "mla", "kv_heads": 1, "axes": "BTD", "across": "L"}, "kinds"),
    ],
)
def test_refuses_what_cannot_be_converted(change, word):
    blocks = np.arange(2)
    src = replace(BASE, model="one")
    with pytest.raises(LayoutRefused, match=word):
        plan_transfer(src, replace(src, **change), blocks, blocks, start=0, stop=8)


def test_refuses_other_scales_and_takes_equal_ones():
    a = replace(BASE, dtype="float8_e4m3", scales="x")
    blocks = np.arange(2)
    assert plan_transfer(a, a, blocks, blocks, stop=8).nbytes == a.token_nbytes * 8
    with pytest.raises(LayoutRefused, match="scale"):
        plan_transfer(a, replace(a, scales="y"), blocks, blocks, stop=8)


@pytest.mark.parametrize(
    "change",
    [
        {"axes": "BTH"},
        {"axes": "BTHDD"},
        {"across": "L"},
        {"across": "LKB", "axes": "THD"},
        {"layers": 0},
        {"dtype": "int8"},
        {"tp_rank": 1},
        {"tp_size": 3},
        {"block_pitch": 8},
        {"dtype": "float8_e4m3"},
        {"kind": "mla"},
    ],
)
def test_impossible_layouts_are_refused(change):
    with pytest.raises(LayoutRefused):
        replace(BASE, **change)


@pytest.mark.parametrize(("blocks", "stop"), [(np.array([0, 9]), 8), (np.array([-1, 0]), 8), (np.array([0]), 8)])
def test_tables_outside_the_pool_are_refused(blocks, stop):
    with pytest.raises(LayoutRefused):
        plan_transfer(BASE, BASE, blocks, np.arange(4), stop=stop)


def test_equal_block_forms_move_whole_blocks():
    plan = plan_transfer(BASE, replace(BASE, num_blocks=32), np.array([3, 5]), np.array([9, 20]), stop=8)
    src, dst = plan.runs()
    assert len(src) == len(dst) == BASE.region_count * 2
    assert set(src.nbytes.tolist()) == {4 * 4 * 8 * 4}


def test_adjacent_blocks_become_one_run():
    plan = plan_transfer(BASE, BASE, np.array([1, 2, 3]), np.array([4, 5, 6]), stop=12)
    assert len(plan.runs()[0]) == BASE.region_count


def test_layout_survives_json():
    x = replace(BASE, states=(StateSpec("ssm", 2, 64),))
    assert KVLayout.from_dict(x.to_dict()) == x
    with pytest.raises(LayoutRefused, match="fields"):
        KVLayout.from_dict(x.to_dict() | {"colour": 1})
    with pytest.raises(LayoutRefused):
        KVLayout.from_dict(x.to_dict() | {"layers": "2"})
