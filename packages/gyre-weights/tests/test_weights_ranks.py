"""Several ranks publish one version in place: the same version as one process makes, in each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_weights import CorruptError, VersionError, open_version, publish_full
from gyre_weights.rank_share import RankShare
from gyre_weights.ranks import RankVersions
from safetensors.torch import load_file, save_file
from weights_models import changed, same, weights

Tensors = dict[str, torch.Tensor]


@dataclass
class Ranks:
    """Rank processes of which the first fills everything; they load into `held`."""

    tensors: Tensors
    count: int = 3
    asked: list[str] = field(default_factory=list)
    held: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shares = [RankShare(rank, self.count) for rank in range(self.count)]

    async def __call__(self, op: str, args: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        self.asked.append(op)
        if op == "publish":
            for file in args["files"]:
                save_file({name: self.tensors[name].contiguous() for name in load_file(file)}, file)
            return [{}] * self.count
        if op == "load":
            opened = self.shares[0].open(args["folder"])
            self.held = {name: opened[name].clone() for name in opened}
            return [{}] * self.count
        return [share.commands()[op](args) for share in self.shares]

    def make_files(self, folder: Path) -> list[str]:
        """Two, with an index, none of them filled."""
        empty = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        folder.mkdir(exist_ok=True)
        made = publish_full(folder / "x", 0, empty, shard_bytes=5000)
        files = sorted(Path(made.location).glob("model*"))
        for file in files:
            file.rename(folder / file.name)
        (folder / "x" / "v0" / "gyre-manifest.json").unlink()
        (folder / "x" / "v0").rmdir()
        (folder / "x").rmdir()
        return [str(folder / file.name) for file in files if file.suffix == ".safetensors"]


@dataclass(frozen=True)
class Order:
    version: int
    folder: Path
    make_files: Callable[[Path], list[str]]
    extras: Mapping[str, bytes]
    keep: int
    spare: Path


@dataclass(frozen=True)
class Source:
    version: int
    location: str


@pytest.fixture
def order(tmp_path: Path) -> Callable[..., Order]:
    """`order(ranks, version)`."""
    return lambda ranks, version, keep=3: Order(
        version, tmp_path / "w", ranks.make_files, {"config.json": b"{}"}, keep, tmp_path / "none"
    )


@pytest.mark.parametrize("kind", ["disk", "shm", "delta"])
async def test_it_is_the_version_one_process_would_make(kind: str, order: Any, tmp_path: Path, memory: Path) -> None:
    ranks, versions, taker = Ranks(weights()), RankVersions(kind), Ranks({})
    for version in range(3):
        made = await versions.publish(order(ranks, version), ranks)
        alone = publish_full(tmp_path / "alone", version, ranks.tensors)
        assert made.digest == alone.digest
        assert made.location == str(tmp_path / "w" / f"v{version}")
        assert (Path(made.location) / "config.json").read_bytes() == b"{}"
        opened = open_version(made)
        opened.verify_all()
        assert made.bytes == opened.stored_bytes
        assert made.kind == opened.manifest.kind == ("disk" if kind == "delta" and not version else kind)
        assert await versions.shapes(Source(version, made.location)) == {
            name: tuple(tensor.shape) for name, tensor in ranks.tensors.items()
        }
        await versions.load(Source(version, made.location), taker)
        assert same(taker.held, ranks.tensors)
        ranks.tensors = changed(ranks.tensors, 0.02, seed=version)
    versions.close()
    assert list(memory.iterdir()) == []
    assert open_version(tmp_path / "w" / "v2").digest == made.digest
    assert not (tmp_path / "w" / "v2").is_symlink()


async def test_every_tensor_is_in_one_share(tmp_path: Path) -> None:
    tensors = weights()
    folder = publish_full(tmp_path, 0, tensors).location
    found = [share.digest({"folder": folder})["digests"] for share in Ranks(tensors, 3).shares]
    assert sorted(name for each in found for name in each) == sorted(tensors)
    assert all(found)


async def test_a_delta_is_of_what_changed_and_rests_on_a_whole_one_now_and_then(order: Any, memory: Path) -> None:
    ranks, versions = Ranks(weights()), RankVersions("delta", full_every=3)
    kinds, bases = [], []
    for version in range(7):
        made = await versions.publish(order(ranks, version), ranks)
        kinds.append(made.kind)
        bases.append(made.base_version)
        ranks.tensors = changed(ranks.tensors, 0.02, seed=version)
    assert kinds == ["disk", "delta", "delta", "disk", "delta", "delta", "disk"]
    assert bases == [None, 0, 1, None, 3, 4, None]
    assert made.changed is None
    assert not list(memory.rglob(".whole-*"))


async def test_a_delta_that_was_not_worth_it_is_followed_by_a_whole_one(order: Any, memory: Path) -> None:
    ranks, versions = Ranks(weights()), RankVersions("delta")
    for version, part in enumerate((0.0, 1.0, 0.01)):
        ranks.tensors = changed(ranks.tensors, part, seed=version)
        kind = (await versions.publish(order(ranks, version), ranks)).kind
        assert kind == ("delta" if version == 1 else "disk")


async def test_a_core_that_was_set_back_gives_no_delta_on_another_version(order: Any, memory: Path) -> None:
    """Its ranks still hold version 1 of before, and a folder of that number lies there with other contents."""
    ranks, versions = Ranks(weights()), RankVersions("delta")
    for version in range(2):
        ranks.tensors = changed(ranks.tensors, 0.02, seed=version)
        await versions.publish(order(ranks, version), ranks)
    publish_full(order(ranks, 1).folder, 1, weights(5))
    made = await versions.publish(order(ranks, 2), ranks)
    assert made.kind == "disk"
    ranks.shares[1] = RankShare(1, 3)  # one that was started anew
    assert (await versions.publish(order(ranks, 3), ranks)).kind == "disk"
    open_version(made).verify_all()


async def test_what_is_damaged_or_of_another_version_reaches_no_rank(order: Any, tmp_path: Path, memory: Path) -> None:
    ranks, versions, taker = Ranks(weights()), RankVersions("delta"), Ranks({})
    for version in range(2):
        made = await versions.publish(order(ranks, version), ranks)
        ranks.tensors = changed(ranks.tensors, 0.02)
    with pytest.raises(VersionError, match="version 1"):
        await versions.shapes(Source(7, made.location))
    for shard in [*Path(made.location).glob("*.safetensors"), *(tmp_path / "w" / "v0").glob("*.safetensors")]:
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
        with pytest.raises(CorruptError, match="digest"):
            await versions.load(Source(1, made.location), taker)
        assert "load" not in taker.asked
        shard.write_bytes(content)
    await versions.load(Source(1, made.location), taker)


async def test_a_publication_that_fails_leaves_nothing(order: Any, tmp_path: Path, memory: Path) -> None:
    ranks, versions = Ranks(weights()), RankVersions("delta")
    first = await versions.publish(order(ranks, 0), ranks)

    async def dies(op: str, args: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        if op in ("differ", "digest"):
            raise RuntimeError("rank 1 ended with signal 9")
        return await ranks(op, args)

    for kind in ("delta", "disk", "shm"):
        each = versions if kind == "delta" else RankVersions(kind)
        with pytest.raises(RuntimeError, match="signal 9"):
            await each.publish(order(ranks, 1), dies)
        assert [path.name for path in (tmp_path / "w").iterdir()] == ["v0"]
        assert not list(memory.rglob("*.safetensors"))
    assert open_version(first).digest == first.digest
    ranks.tensors = changed(ranks.tensors, 0.02)
    made = await versions.publish(order(ranks, 1), ranks)
    assert same({n: t.torch() for n, t in open_version(made).items()}, ranks.tensors)
