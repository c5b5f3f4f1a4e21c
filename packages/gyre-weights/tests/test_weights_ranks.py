"""Several ranks publish one version in place: the same version as one process makes, in each way."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gyre_weights import CorruptError, IncompleteError, VersionError, open_version, publish_full, versions_in
from gyre_weights import ranks as ranks_module
from gyre_weights.rank_share import RankShare
from gyre_weights.ranks import RankVersions
from gyre_weights.shm import shm_root
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


@dataclass
class Cramped(Ranks):
    """Their files do not fit under `small`."""

    small: Path = Path()
    tried: list[Path] = field(default_factory=list)

    def make_files(self, folder: Path) -> list[str]:
        self.tried.append(folder)
        if not folder.is_relative_to(self.small):
            return super().make_files(folder)
        folder.joinpath("model.safetensors").write_bytes(b"as far as it went")
        raise OSError(28, "No space left on device", str(folder))


@pytest.mark.parametrize("kind", ["disk", "delta"])
async def test_what_is_loaded_is_what_was_looked_at(kind: str, order: Any, tmp_path: Path) -> None:
    """A folder that is another when it is compared is refused; one that is another when it is loaded is not seen."""
    ranks, versions = Ranks(weights()), RankVersions(kind)
    for version in range(2):
        made = await versions.publish(order(ranks, version), ranks)
        first, ranks.tensors = ranks.tensors, changed(ranks.tensors, 0.02, seed=version)
    source, taker = Source(1, made.location), Ranks({})

    def swap() -> None:
        publish_full(tmp_path / "w", 1, weights(9))
        shutil.rmtree(tmp_path / "w" / "v0", ignore_errors=True)

    class Late(Ranks):
        async def __call__(self, op: str, args: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
            if op == "load":
                swap()
            return await super().__call__(op, args)

    late = Late({})
    await versions.shapes(source)
    await versions.load(source, late)
    assert same(late.held, first)
    with pytest.raises(CorruptError, match=r"got opening policy version 1 .*: got contents"):
        await versions.load(source, taker)
    assert taker.asked == ["compare"]
    await versions.shapes(source)
    await versions.load(source, taker)
    assert same(taker.held, weights(9)), "looked at anew"
    versions.close()


async def test_whole_weights_that_do_not_fit_into_memory_are_compared_on_disk(
    order: Any, tmp_path: Path, memory: Path
) -> None:
    """And memory is not tried, and taken from others, each time anew."""
    ranks, versions = Cramped(weights(), small=memory), RankVersions("delta")
    for version in range(3):
        ranks.tensors = changed(ranks.tensors, 0.02, seed=version)
        made = await versions.publish(order(ranks, version), ranks)
        assert made.kind == ("delta" if version else "disk")
        assert same({n: t.torch() for n, t in open_version(made).items()}, ranks.tensors)
        assert not list(memory.rglob("*.safetensors"))
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [f"v{n}" for n in range(version + 1)]
    assert sum(path.is_relative_to(memory) for path in ranks.tried) == 1
    ranks.small = tmp_path
    with pytest.raises(OSError, match="No space"):
        await versions.publish(order(ranks, 3), ranks)
    assert sorted(versions_in(tmp_path / "w")) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["disk", "shm", "delta"])
async def test_what_a_killed_publication_left_goes_with_the_first_of_the_next(
    kind: str, order: Any, tmp_path: Path, memory: Path
) -> None:
    ranks, folder = Ranks(weights()), tmp_path / "w"
    root = shm_root(folder) if kind != "disk" else folder
    for left in (root / ".whole-7", root / ".v7.0123abcd", folder / ".v7.4567abcd", folder / ".v1.89ab.old"):
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
    (folder / ".v7.link.12").symlink_to(root / "v7")
    (folder / ".spare").mkdir()
    versions = RankVersions(kind)
    await versions.publish(order(ranks, 0), ranks)
    assert sorted(path.name for path in folder.iterdir()) == [".spare", "v0"]
    assert not [path for path in root.iterdir() if path.name.startswith((".whole", ".v"))]


@pytest.mark.parametrize("kind", ["disk", "shm", "delta"])
async def test_a_run_that_was_set_back_leaves_nothing_of_what_it_was_to_come(
    kind: str, order: Any, tmp_path: Path, memory: Path
) -> None:
    """The process is killed after version 4 and goes on from version 1: version 3 is its newest, not 4."""
    ranks = Ranks(weights())
    killed = RankVersions(kind)
    for version in range(5):
        await killed.publish(order(ranks, version), ranks)
    ranks.tensors, versions = weights(9), RankVersions(kind)
    for version in (2, 3):
        ranks.tensors = changed(ranks.tensors, 0.02, seed=version)
        await versions.publish(order(ranks, version, keep=2), ranks)
        assert max(versions_in(tmp_path / "w")) == version
    assert sorted(versions_in(tmp_path / "w")) == [2, 3]
    assert {number for root in memory.iterdir() for number in versions_in(root)} == ({2, 3} if kind == "shm" else set())
    versions.close()
    left = open_version(tmp_path / "w" / "v3")
    assert same({n: t.torch() for n, t in left.items()}, ranks.tensors)


async def test_memory_that_others_wrote_to_does_not_settle(order: Any, tmp_path: Path, memory: Path) -> None:
    """What is put on disk is what was published last, whatever numbers lie there."""
    ranks, versions = Ranks(weights()), RankVersions("shm")
    await versions.publish(order(ranks, 3), ranks)
    publish_full(shm_root(tmp_path / "w"), 4, weights(9), kind="shm")
    versions.close()
    assert sorted(versions_in(tmp_path / "w")) == [3]
    assert same({n: t.torch() for n, t in open_version(tmp_path / "w" / "v3").items()}, ranks.tensors)


async def test_a_version_that_is_dropped_while_it_is_loaded_stays_whole_for_who_loads(
    order: Any, tmp_path: Path, memory: Path
) -> None:
    """Also the versions it rests on; one that is gone before is refused before the first tensor."""
    ranks, versions = Ranks(weights()), RankVersions("delta")
    for version in range(3):
        made = await versions.publish(order(ranks, version), ranks)
        ranks.tensors, published = changed(ranks.tensors, 0.02, seed=version), ranks.tensors
    assert made.kind == "delta"
    opened = ranks.shares[0].open(made.location)
    for version in range(3):
        shutil.rmtree(tmp_path / "w" / f"v{version}")
    assert same({name: opened[name].clone() for name in opened}, published)
    for version in range(3, 5):
        made = await versions.publish(order(ranks, version), ranks)
    shutil.rmtree(tmp_path / "w" / "v3")
    with pytest.raises(IncompleteError, match="v3"):
        ranks.shares[0].open(made.location)


@pytest.mark.parametrize("kind", ["disk", "shm", "delta"])
async def test_nothing_slow_is_done_in_the_event_loop(
    kind: str, order: Any, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever waits for the disk or gives much memory back would let the whole cell stand still."""
    loops, done, here = [], set(), threading.current_thread()

    def watch(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def watched(*args: Any, **told: Any) -> Any:
            done.add(name)
            if threading.current_thread() is here:
                loops.append(name)
            return inner(*args, **told)

        monkeypatch.setattr(module, name, watched)

    for module, name in ((os, "fsync"), (shutil, "rmtree")):
        watch(module, name)
    for name in ("sweep", "drop_links", "link_version", "drop_old", "finish_version", "drop_drafts"):
        watch(ranks_module, name)
    ranks, versions = Ranks(weights()), RankVersions(kind, full_every=3)

    async def ask(op: str, args: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return await asyncio.to_thread(asyncio.run, ranks(op, args))  # ranks are other processes

    for version in range(5):
        await versions.publish(order(ranks, version, keep=2), ask)
        ranks.tensors = changed(ranks.tensors, 0.02, seed=version)
    assert done > {"rmtree", "drop_old", "finish_version", "drop_drafts"}
    assert ("sweep" in done) is (kind != "disk")
    assert loops == []
