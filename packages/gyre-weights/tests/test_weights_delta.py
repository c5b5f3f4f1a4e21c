"""Deltas: exact, small, only onto their own base, and one after another from wherever the holder stands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_weights import (
    CorruptError,
    Held,
    HostTensor,
    IncompleteError,
    MismatchError,
    Publisher,
    Shadow,
    Verify,
    VersionError,
    apply,
    catch_up,
    open_version,
    publish_delta,
    publish_full,
    versions_in,
)
from gyre_weights.delta_code import Patch, decode, difference, encode, patch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from weights_models import changed, empty_like, same, weights


def host(array: np.ndarray, dtype: str) -> HostTensor:
    return HostTensor(dtype, array.shape, np.ascontiguousarray(array).view(np.uint8).reshape(-1))


@settings(deadline=None)
@given(
    words=hnp.arrays(np.uint16, st.integers(0, 3000)),
    at=st.lists(st.tuples(st.integers(0, 2999), st.integers(0, 700), st.integers(1, 65535)), max_size=12),
)
def test_the_code_is_exact_for_any_bits(words: np.ndarray, at: list[tuple[int, int, int]]) -> None:
    """Runs of changes of any length at any place, NaN patterns and zeros included."""
    new = words.copy()
    for start, length, flip in at:
        new[start : start + length] ^= np.uint16(flip)
    old, fresh = host(words, "BF16"), host(new, "BF16")
    found, _ = difference(old, fresh)
    coded = encode(fresh, found)
    assert coded.nbytes <= fresh.nbytes
    change = decode("t", "BF16", len(words), coded.parts)
    target = words.copy()
    patch(target, change)
    assert np.array_equal(target, new)
    if not len(found.positions):
        assert not coded.parts


@pytest.mark.parametrize("width", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("part", [0.0001, 0.02, 0.3, 1.0])
def test_element_and_block_codes_and_the_whole(width: type, part: float) -> None:
    random = np.random.default_rng(0)
    dtype = {1: "U8", 2: "BF16", 4: "F32", 8: "F64"}[np.dtype(width).itemsize]
    old = random.integers(0, 255, 300_001).astype(width)
    for rows in (False, True):
        new = old.copy()
        mask = np.repeat(random.random(len(old) // 1000 + 1) < part, 1000)[: len(old)] if rows else None
        mask = random.random(len(old)) < part if mask is None else mask
        new[mask] += width(1)
        found, _ = difference(host(old, dtype), host(new, dtype))
        assert np.array_equal(found.positions, np.flatnonzero(mask))
        coded = encode(host(new, dtype), found)
        target = old.copy()
        patch(target, decode("t", dtype, len(old), coded.parts))
        assert np.array_equal(target, new)
        if rows and part in (0.02, 0.3) and dtype == "F32":
            assert "blocks" in coded.parts, "whole rows are coded as blocks"
        if not rows and part == 0.02 and dtype == "F32":
            assert set(coded.parts) == {"gaps", "values"}
            assert coded.nbytes < 0.04 * old.nbytes


def test_parts_that_contradict_are_refused() -> None:
    gaps, values = host(np.array([1, 2], np.uint8), "U8"), host(np.array([5, 6], np.uint16), "BF16")
    with pytest.raises(CorruptError, match="position 3"):
        decode("t", "BF16", 3, {"gaps": gaps, "values": values})
    with pytest.raises(CorruptError, match="1 values"):
        decode("t", "BF16", 9, {"gaps": gaps, "values": host(np.array([5], np.uint16), "BF16")})
    with pytest.raises(CorruptError, match="parts"):
        decode("t", "BF16", 9, {"gaps": gaps})
    with pytest.raises(CorruptError, match="values of 2 bytes"):
        decode("t", "F32", 9, {"gaps": gaps, "values": values})


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def line(request: pytest.FixtureRequest) -> list[dict[str, torch.Tensor]]:
    """Five versions, each with 2 % changed."""
    versions = [weights(dtype=request.param)]
    for seed in range(1, 5):
        versions.append(changed(versions[-1], 0.02, seed))
    return versions


def published(line: list[dict[str, torch.Tensor]], folder: Path, **options: int) -> list:
    publisher = Publisher("delta", folder, keep=9, **options)
    return [publisher.publish(v, lambda t=tensors: t) for v, tensors in enumerate(line)]


def test_deltas_in_place_give_each_version(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    made = published(line, tmp_path)
    assert [p.kind for p in made] == ["disk"] + ["delta"] * 4
    targets = empty_like(line[0])
    places = {name: t.data_ptr() for name, t in targets.items()}
    held = None
    for version, item in enumerate(made):
        held = apply(item, targets, held=held, verify=Verify.AFTER)
        assert same(targets, line[version])
        assert (held.version, held.digest) == (version, item.digest)
    assert places == {name: t.data_ptr() for name, t in targets.items()}
    opened = open_version(made[3])
    assert same({name: opened[name].torch() for name in opened}, line[3])
    assert opened.changed == {"model.embed_tokens.weight", "model.layers.0.mlp.weight"}


def test_a_delta_of_two_percent_is_small(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for dtype in (torch.float32, torch.bfloat16):
        old = {"w": torch.from_numpy(random.standard_normal((4000, 1000)).astype(np.float32)).to(dtype)}
        new = {"w": old["w"].clone()}
        new["w"].view(-1)[torch.from_numpy(np.flatnonzero(random.random(4_000_000) < 0.02))] += 1
        made = Publisher("delta", tmp_path / str(dtype))
        full = made.publish(0, lambda t=old: t)
        delta = made.publish(1, lambda t=new: t)
        assert delta.changed is not None
        assert 70_000 < delta.changed < 90_000
        assert delta.bytes < 0.15 * full.bytes


def test_another_base_is_refused_and_nothing_changes(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    made = published(line, tmp_path)
    targets = empty_like(line[0])
    held = apply(made[0], targets)
    for wrong in (held, Held(1, made[0].digest), Held(1, ""), Held(0, made[1].digest)):
        with pytest.raises(VersionError, match="against version 1"):
            apply(made[2], targets, held=wrong)
    with pytest.raises(VersionError, match="not known what the targets hold"):
        apply(made[1], targets)
    with pytest.raises(VersionError, match="against version 1"):
        open_version(made[2], base=open_version(made[0]))
    assert same(targets, line[0])


def test_the_wrong_values_under_the_right_name_are_found_afterwards(
    line: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    made = published(line, tmp_path)
    targets = empty_like(line[0])
    held = apply(made[0], targets)
    targets["model.layers.0.mlp.weight"].view(-1)[5] += 1.0
    with pytest.raises(CorruptError, match=r"mlp\.weight"):
        apply(made[1], targets, held=held, verify=Verify.AFTER)


def test_a_damaged_delta_changes_nothing(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    made = published(line, tmp_path)
    targets = empty_like(line[0])
    held = apply(made[0], targets)
    file = Path(made[1].location) / "delta.safetensors"
    with file.open("r+b") as handle:
        handle.seek(-100, os.SEEK_END)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 64]))
    for verify in (Verify.BEFORE, Verify.DURING, Verify.AFTER):
        with pytest.raises(CorruptError):
            apply(made[1], targets, held=held, verify=verify)
    os.truncate(file, file.stat().st_size - 50)
    with pytest.raises(IncompleteError, match="cut short"):
        apply(made[1], targets, held=held)
    assert same(targets, line[0])


def test_catching_up_takes_the_shortest_way(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    made = published(line, tmp_path)
    targets = empty_like(line[0])
    held = catch_up(made[2], targets)
    assert same(targets, line[2])
    targets["model.norm.weight"].fill_(9.0)  # no delta writes it: a full version would
    held = catch_up(made[4], targets, held=held)
    assert float(targets["model.norm.weight"][0]) == 9.0
    assert held == Held(4, made[4].digest)
    assert catch_up(made[4], targets, held=held) == held
    held = catch_up(made[3], targets, held=Held(17, "other"), verify=Verify.AFTER)
    assert same(targets, line[3])
    back = catch_up(made[1], targets, held=held)
    assert back.version == 1
    assert same(targets, line[1])


def test_a_full_version_comes_when_it_is_due(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    assert [p.kind for p in published(line, tmp_path / "a", full_every=2)] == ["disk", "delta"] * 2 + ["disk"]
    publisher = Publisher("delta", tmp_path / "b", worth=0.3)
    kinds = [publisher.publish(v, lambda s=v: weights(s)).kind for v in range(3)]
    assert kinds == ["disk", "delta", "disk"], "everything changed: a delta is not worth it"
    more = weights(2) | {"lm_head.weight": torch.zeros(4)}
    assert publisher.publish(3, lambda: more).kind == "disk"


def test_what_a_kept_delta_rests_on_is_kept(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    publisher = Publisher("delta", tmp_path, keep=1, full_every=3)
    for version in range(5):
        publisher.publish(version, lambda v=version: line[v])
        newest = open_version(tmp_path / f"v{version}")
        assert same({name: newest[name].torch() for name in newest}, line[version])
    assert sorted(versions_in(tmp_path)) == [3, 4]


def test_a_lost_base_is_followed_by_a_full_version(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    publisher = Publisher("delta", tmp_path)
    first = publisher.publish(0, lambda: line[0])
    Path(first.location).rename(tmp_path / "gone")
    assert publisher.publish(1, lambda: line[1]).kind == "disk"


def test_a_publication_that_fails_leaves_the_shadow(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    full = publish_full(tmp_path, 0, line[0])
    shadow = Shadow(0, full.digest, line[0])

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(line[1].items())[:2]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        publish_delta(tmp_path, 1, breaks(), shadow)
    fewer = dict(list(line[1].items())[:2])
    with pytest.raises(MismatchError, match="every tensor of version 0"):
        publish_delta(tmp_path, 1, fewer, shadow)
    wrong = line[1] | {"model.norm.weight": torch.zeros(12, dtype=line[1]["model.norm.weight"].dtype)}
    with pytest.raises(MismatchError, match=r"model\.norm\.weight"):
        publish_delta(tmp_path, 1, wrong, shadow)
    assert sorted(versions_in(tmp_path)) == [0]
    publish_delta(tmp_path, 1, line[1], shadow)
    assert same({name: shadow[name].torch() for name in shadow}, line[1])
    assert shadow.version == 1


def test_a_delta_can_be_cast(line: list[dict[str, torch.Tensor]], tmp_path: Path) -> None:
    made = published(line, tmp_path)
    wide = {name: t.to(torch.float64) for name, t in empty_like(line[0]).items()}
    held = apply(made[0], wide, cast=True)
    apply(made[1], wide, held=held, cast=True)
    assert same(wide, {name: t.to(torch.float64) for name, t in line[1].items()})
    apply(made[0], wide, cast=True)
    strided = wide | {"model.embed_tokens.weight": wide["model.embed_tokens.weight"].t().contiguous().t()}
    with pytest.raises(MismatchError, match="not contiguous"):
        apply(made[1], strided, held=held, cast=True)


def test_signed_zeros_and_nans_travel(tmp_path: Path) -> None:
    old = {"w": torch.zeros(1000)}
    new = {"w": torch.zeros(1000)}
    new["w"][3], new["w"][900] = -0.0, torch.nan
    publisher = Publisher("delta", tmp_path)
    publisher.publish(0, lambda: old)
    made = publisher.publish(1, lambda: new)
    assert made.changed == 2
    targets = {"w": torch.ones(1000)}
    catch_up(made, targets)
    assert same(targets, new)


def test_patches_hold_values_for_engines_with_another_layout() -> None:
    change = Patch("BF16", 10, np.array([2, 5]), torch.tensor([1.5, -2.0]).bfloat16().view(torch.uint16).numpy())
    assert change.values().torch().tolist() == [1.5, -2.0]
