"""Memory of ended versions is used again, and never while somebody still looks at it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from gyre_weights import open_version, publish_full
from gyre_weights.folder import new_folder
from gyre_weights.publish import finish_version, write_part
from gyre_weights.spares import FOLDER, Spares
from safetensors.torch import load_file
from weights_models import same, weights


def publish(root: Path, version: int, tensors: object = None) -> Path:
    found = publish_full(root, version, tensors or weights(version), kind="shm", keep=1)  # type: ignore[arg-type]
    return Path(found.location) / "model.safetensors"


def number(path: Path) -> int:
    return path.stat().st_ino


def test_the_version_after_next_lies_in_the_memory_of_this_one(tmp_path: Path) -> None:
    """And no byte of it is left."""
    first = number(publish(tmp_path, 0, weights(0) | {"longer": torch.ones(9999)}))
    publish(tmp_path, 1)
    assert [number(path) for path in (tmp_path / FOLDER).iterdir()] == [first]
    shard = publish(tmp_path, 2)
    assert number(shard) == first
    assert same(load_file(shard), weights(2))
    open_version(tmp_path / "v2").verify()


def opened(path: Path) -> object:
    handle = os.open(path, os.O_RDONLY)
    return lambda: os.pread(handle, 1 << 30, 0)


def mapped(path: Path) -> object:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return lambda: bytes(memory)


@pytest.mark.parametrize("way", [opened, mapped])
def test_who_has_a_version_open_keeps_it(tmp_path: Path, way: object) -> None:
    shard = publish(tmp_path, 0)
    first, wanted, read = number(shard), shard.read_bytes(), way(shard)  # type: ignore[operator]
    for version in range(1, 4):
        assert number(publish(tmp_path, version)) != first
        assert read() == wanted


def test_processes_that_write_one_version_take_a_shard_each(tmp_path: Path) -> None:
    tensors, spares = weights(), Spares(tmp_path)
    publish_full(tmp_path, 0, tensors, kind="shm", shard_bytes=1)
    there = {number(path) for path in (tmp_path / "v0").glob("*.safetensors")}
    spares.keep(tmp_path / "v0")
    with new_folder(tmp_path / "v1", durable=False) as draft:
        for part, name in enumerate(tensors):
            write_part(draft, part, {name: tensors[name]}, version=1, durable=False, spares=spares)
        finish_version(draft, len(tensors), version=1, kind="shm", durable=False)
    assert {number(path) for path in (tmp_path / "v1").glob("*.safetensors")} == there
    version = open_version(tmp_path / "v1")
    version.verify()
    assert same({name: version[name].torch() for name in version}, tensors)


def test_one_versions_shards_are_kept_and_no_more(tmp_path: Path) -> None:
    for version in range(3):
        publish_full(tmp_path, version, weights(version), kind="shm", keep=5)
    publish_full(tmp_path, 3, weights(3), kind="shm", keep=1)
    assert len(list((tmp_path / FOLDER).iterdir())) == 1
    Spares(tmp_path).clear()
    assert not list((tmp_path / FOLDER).iterdir())


def test_a_publication_that_fails_takes_nothing_of_the_version_before(tmp_path: Path) -> None:
    for version in range(2):
        publish(tmp_path, version)

    def breaks() -> object:
        yield from list(weights(9).items())[:2]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        publish(tmp_path, 2, breaks())
    assert same(load_file(tmp_path / "v1" / "model.safetensors"), weights(1))
    assert same(load_file(publish(tmp_path, 2)), weights(2))
