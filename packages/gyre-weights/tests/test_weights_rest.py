"""Versions on disk and in shared memory: whole or absent, exact, and refused with a reason when they are not right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gyre_weights import (
    CorruptError,
    IncompleteError,
    MismatchError,
    Publisher,
    Verify,
    VersionError,
    WeightsError,
    apply,
    finish_version,
    new_folder,
    open_version,
    publish_full,
    versions_in,
    write_part,
)
from gyre_weights.manifest import MANIFEST
from gyre_weights.shm import join, shm_root, sweep
from safetensors.torch import load_file
from weights_models import bits, changed, empty_like, same, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_bytes", [1, 5000, 1 << 30])
def test_what_is_published_is_what_is_read(tmp_path: Path, dtype: torch.dtype, shard_bytes: int) -> None:
    tensors = weights(dtype=dtype)
    published = publish_full(tmp_path, 3, tensors, shard_bytes=shard_bytes)
    assert published.version == 3
    assert published.location == str(tmp_path / "v3")
    assert published.bytes == sum(p.stat().st_size for p in (tmp_path / "v3").glob("*.safetensors"))
    version = open_version(published)
    version.verify()
    assert same({name: version[name].torch() for name in version}, tensors)
    targets = empty_like(tensors)
    held = apply(published, targets, verify=Verify.AFTER)
    assert same(targets, tensors)
    assert (held.version, held.digest) == (3, published.digest)


@pytest.mark.parametrize("shard_bytes", [5000, 1 << 30])
def test_any_reader_of_safetensors_can_read_it(tmp_path: Path, shard_bytes: int) -> None:
    tensors = weights(dtype=torch.bfloat16)
    folder = Path(publish_full(tmp_path, 0, tensors, shard_bytes=shard_bytes).location)
    files = sorted(folder.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert same(found, tensors)
    if len(files) > 1:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {file.name for file in files}
        assert index["weight_map"].keys() == tensors.keys()
    else:
        assert files[0].name == "model.safetensors"


def test_transformers_loads_a_published_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    extras = {"config.json": config.to_json_string().encode()}
    published = publish_full(tmp_path, 1, model.state_dict(), extras=extras, shard_bytes=2000)
    again = transformers.AutoModelForCausalLM.from_pretrained(published.location)
    assert same(dict(again.state_dict()), dict(model.state_dict()))


def test_a_stream_is_never_held_whole(tmp_path: Path) -> None:
    """At most the tensor being written and the one being made are alive."""
    alive: list[int] = []

    class Watched(np.ndarray):
        def __del__(self) -> None:
            if self.base is None:
                alive.remove(id(self))

    most = 0

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal most
        for i in range(8):
            array = np.full(1000, i, np.float32).copy().view(Watched)
            owner = Watched(1000, np.float32)
            owner[:] = array
            alive.append(id(owner))
            most = max(most, len(alive))
            yield f"t{i}", owner
            del owner, array

    publish_full(tmp_path, 0, stream())
    assert most <= 2


def test_a_publication_that_fails_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    tensors = weights()
    publish_full(tmp_path, 1, tensors)

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(tensors.items())[:2]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        publish_full(tmp_path, 1, breaks())
    with pytest.raises(OSError, match="no space"):
        publish_full(tmp_path, 2, breaks())
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    assert same(dict(torch_of(tmp_path / "v1")), tensors)


def torch_of(folder: Path) -> dict[str, torch.Tensor]:
    version = open_version(folder)
    return {name: version[name].torch() for name in version}


def test_publishing_a_version_again_replaces_it(tmp_path: Path) -> None:
    publish_full(tmp_path, 1, weights(0))
    publish_full(tmp_path, 1, weights(5))
    assert same(torch_of(tmp_path / "v1"), weights(5))


def test_the_newest_are_kept_and_a_reader_keeps_what_it_opened(tmp_path: Path) -> None:
    publish_full(tmp_path, 0, weights(0), keep=2)
    reader = open_version(tmp_path / "v0")
    values = {name: reader[name].torch() for name in reader}
    for version in range(1, 5):
        publish_full(tmp_path, version, weights(version), keep=2, spare=[tmp_path / "v1"])
    assert sorted(versions_in(tmp_path)) == [1, 3, 4]
    assert same(values, weights(0))
    with pytest.raises(IncompleteError, match="no such folder"):
        open_version(tmp_path / "v0")


def test_several_processes_write_one_version(tmp_path: Path) -> None:
    tensors = weights()
    names = list(tensors)
    with new_folder(tmp_path / "v7") as draft:
        for part in range(2):
            write_part(draft, part, {n: tensors[n] for n in names[part::2]}, version=7)
        manifest = finish_version(draft, 2, version=7, kind="disk")
    assert same(torch_of(tmp_path / "v7"), tensors)
    assert manifest.digest == publish_full(tmp_path / "other", 7, tensors).digest
    with pytest.raises(IncompleteError, match="no receipt of part 1"):
        together(tmp_path / "v8", [tensors])
    with pytest.raises(MismatchError, match="from two processes"):
        together(tmp_path / "v8", [tensors, tensors])
    assert not (tmp_path / "v8").exists()


def together(target: Path, parts: list[dict[str, torch.Tensor]]) -> None:
    with new_folder(target) as draft:
        for part, tensors in enumerate(parts):
            write_part(draft, part, tensors, version=8)
        finish_version(draft, 2, version=8, kind="disk")


# What is wrong is told


def published(tmp_path: Path) -> Path:
    return Path(publish_full(tmp_path, 4, weights(), shard_bytes=5000).location)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    file = min(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(IncompleteError, match="cut short"):
        open_version(folder)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    sorted(folder.glob("*.safetensors"))[1].unlink()
    with pytest.raises(IncompleteError, match="no file"):
        open_version(folder)


@pytest.mark.parametrize("verify", [Verify.BEFORE, Verify.DURING, Verify.AFTER])
def test_a_damaged_byte_is_found(tmp_path: Path, verify: Verify) -> None:
    folder = published(tmp_path)
    entry = open_version(folder).manifest.stored["model.layers.0.mlp.weight"]
    with (folder / entry.file).open("r+b") as handle:
        handle.seek(entry.offset + entry.nbytes - 3)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))
    targets = empty_like(weights())
    with pytest.raises(CorruptError, match=r"mlp\.weight"):
        apply(folder, targets, verify=verify)
    if verify is not Verify.DURING:
        assert same(targets, empty_like(weights()))
    apply(folder, targets, verify=Verify.NONE)


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])
    with pytest.raises(CorruptError, match="damaged manifest"):
        open_version(folder)
    (folder / MANIFEST).write_text(text.replace('"F32",[11]', '"F32",[12]'))
    with pytest.raises(CorruptError, match="does not agree"):
        open_version(folder)
    (folder / MANIFEST).write_text(text.replace('"format":1', '"format":2'))
    with pytest.raises(VersionError, match="format 2"):
        open_version(folder)


def test_another_version_is_refused(tmp_path: Path) -> None:
    folder = published(tmp_path)
    with pytest.raises(VersionError, match="expected version 5"):
        open_version(folder, version=5)
    with pytest.raises(VersionError, match="expected contents"):
        open_version(folder, digest="00")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = published(tmp_path)
    more = empty_like(weights()) | {"lm_head.weight": torch.zeros(3)}
    with pytest.raises(MismatchError, match=r"no lm_head\.weight"):
        apply(folder, more)
    apply(folder, more, optional=["lm_head.weight"])
    fewer = empty_like(weights())
    del fewer["model.norm.weight"]
    with pytest.raises(MismatchError, match=r"model\.norm\.weight that no target has"):
        apply(folder, fewer)
    apply(folder, fewer, optional=["model.norm.weight"])
    other = empty_like(weights()) | {"model.norm.weight": torch.zeros(12)}
    with pytest.raises(MismatchError, match=r"shape \[11\], expected \[12\]"):
        apply(folder, other)
    narrow = {name: t.to(torch.bfloat16) for name, t in empty_like(weights()).items()}
    with pytest.raises(MismatchError, match="F32, expected BF16"):
        apply(folder, narrow)
    assert float(narrow["model.norm.weight"][0]) == 7.0
    apply(folder, narrow, cast=True)
    assert same(narrow, {name: t.to(torch.bfloat16) for name, t in weights().items()})


def test_a_plain_folder_of_safetensors_can_be_opened(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = weights()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file({"exp_avg": torch.zeros(2)}, tmp_path / "optimizer.safetensors")
    version = open_version(tmp_path, version=0)
    assert same({name: version[name].torch() for name in version}, tensors)
    version.verify()
    assert version.digest == ""
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(IncompleteError):
        open_version(tmp_path)
    with pytest.raises(IncompleteError, match="no safetensors file"):
        open_version(empty(tmp_path / "nothing"))


def empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_targets_may_be_numpy_or_strided(tmp_path: Path) -> None:
    folder = published(tmp_path)
    arrays = {name: np.zeros(t.shape, np.float32) for name, t in weights().items()}
    apply(folder, arrays)
    assert all(bits(torch.from_numpy(arrays[name])) == bits(t) for name, t in weights().items())
    strided = empty_like(weights())
    strided["model.embed_tokens.weight"] = torch.zeros(11, 37).t()
    apply(folder, strided, verify=Verify.DURING)
    assert same(strided, weights())


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="twice"):
        publish_full(tmp_path, 0, [("a", np.zeros(2)), ("a", np.zeros(2))])
    assert not list(tmp_path.iterdir())


def test_extra_files_lie_beside(tmp_path: Path) -> None:
    (tmp_path / "vocab").write_text("x")
    extras = {"config.json": b"{}", "vocab.txt": tmp_path / "vocab"}
    folder = Path(publish_full(tmp_path / "w", 0, weights(), extras=extras).location)
    assert (folder / "config.json").read_bytes() == b"{}"
    assert (folder / "vocab.txt").read_text() == "x"
    with pytest.raises(ValueError, match="plain file name"):
        publish_full(tmp_path / "w", 1, weights(), extras={"../x": b""})
    assert list(versions_in(tmp_path / "w")) == [0]


# Shared memory


def test_shared_memory_is_a_link_in_the_run_folder_until_it_settles(tmp_path: Path, memory: Path) -> None:
    folder = tmp_path / "run" / "weights"
    publisher = Publisher("shm", folder, keep=2)
    for version in range(4):
        published = publisher.publish(version, lambda v=version: weights(v), {"config.json": b"{}"})
    assert Path(published.location).is_relative_to(memory)
    assert published.kind == "shm"
    assert (folder / "v3").is_symlink()
    assert sorted(versions_in(folder)) == [2, 3]
    assert sorted(path.name for path in folder.iterdir()) == ["v2", "v3"]
    assert same(torch_of(folder / "v3"), weights(3))
    reader = open_version(published)
    values = {name: reader[name].torch() for name in reader}
    assert publisher.close() == folder / "v3"
    assert not (folder / "v3").is_symlink()
    assert [path.name for path in folder.iterdir()] == ["v3"]
    assert same(torch_of(folder / "v3"), weights(3))
    assert same(values, weights(3)), "a mapping outlives the version"
    assert not list(memory.iterdir())


def test_a_crashed_owner_leaves_its_versions_to_the_next_and_an_hour_later_nothing(
    tmp_path: Path, memory: Path
) -> None:
    folder = tmp_path / "weights"
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[3]); from pathlib import Path;"
        "from gyre_weights.shm import shm_root; from gyre_weights import publish_full; "
        "from weights_models import weights; "
        "root = shm_root(sys.argv[1], base=Path(sys.argv[2])); publish_full(root, 5, weights(), kind='shm');"
        "os.kill(os.getpid(), 9)"
    )
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(memory), str(Path(__file__).parent)], check=False
    )
    assert run.returncode == -9
    (root,) = memory.iterdir()
    assert sweep() == []
    assert same(torch_of(root / "v5"), weights())
    assert shm_root(folder) == root
    assert sweep(base=memory, abandoned_s=-1.0) == [], "the owner is this process now"
    publisher = Publisher("shm", folder)
    publisher.publish(6, weights)
    assert sorted(versions_in(root)) == [5, 6]


@pytest.mark.parametrize("kind", ["disk", "shm", "delta"])
def test_a_publisher_that_was_set_back_keeps_what_it_published_since(kind: str, tmp_path: Path, memory: Path) -> None:
    """And nothing that a killed publication left, nor, on disk, what a run of another kind did."""
    folder = tmp_path / "weights"
    killed = Publisher(kind, folder)
    for version in range(5):
        killed.publish(version, lambda: weights(0))
    publish_full(folder, 7, weights(1))
    (folder / ".v5.0123abcd").mkdir()
    for root in memory.iterdir():
        (root / ".v5.0123abcd").mkdir()
    publisher = Publisher(kind, folder, keep=2)
    for version in (2, 3):
        publisher.publish(version, lambda: weights(9))
    assert sorted(path.name for path in folder.iterdir()) == ["v2", "v3"]
    assert not [path for root in memory.iterdir() for path in root.glob(".v*")]
    if kind == "shm":
        publish_full(next(memory.iterdir()), 8, weights(1), kind="shm")
    publisher.close()
    assert sorted(versions_in(folder)) == ([3] if kind == "shm" else [2, 3])
    assert same(torch_of(folder / "v3"), weights(9))


def test_roots_of_the_dead_are_swept(tmp_path: Path, memory: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    root = shm_root(folder)
    publish_full(root, 1, weights(), kind="shm")
    owner = json.loads((root / "owner.json").read_text())
    (root / "owner.json").write_text(json.dumps(owner | {"started": "1"}))
    assert sweep() == []
    assert sweep(base=memory, abandoned_s=-1.0) == [root]
    assert not root.exists()
    root = shm_root(folder)
    (root / "owner.json").write_text(json.dumps(owner | {"started": "1"}))
    folder.rmdir()
    assert sweep() == [root]


def test_a_root_that_lives_on_in_others_is_not_swept(tmp_path: Path, memory: Path) -> None:
    """The process that made it may end long before those who joined it; when they are gone, too, it goes."""
    root = shm_root(tmp_path)
    first, second = join(root), join(root)
    publish_full(root, 1, weights(), kind="shm")
    owner = json.loads((root / "owner.json").read_text())
    (root / "owner.json").write_text(json.dumps(owner | {"started": "1"}))
    for handle in (first, second):
        assert sweep(base=memory, abandoned_s=-1.0) == []
        assert same(torch_of(root / "v1"), weights())
        os.close(handle)  # killed, as far as the kernel is concerned
    assert sweep(base=memory, abandoned_s=-1.0) == [root]
    assert not root.exists()


def test_no_shared_memory_is_said(tmp_path: Path) -> None:
    with pytest.raises(IncompleteError, match="Publish to disk"):
        shm_root(tmp_path, base=tmp_path / "none")


def test_kinds_of_one_content_share_a_digest(tmp_path: Path, memory: Path) -> None:
    first, second = weights(0), changed(weights(0), 0.02)
    delta = Publisher("delta", tmp_path / "a")
    delta.publish(0, lambda: first)
    by_delta = delta.publish(1, lambda: second)
    by_disk = publish_full(tmp_path / "b", 1, second, shard_bytes=1)
    by_shm = Publisher("shm", tmp_path / "c").publish(1, lambda: second)
    assert by_delta.kind == "delta"
    assert by_delta.digest == by_disk.digest == by_shm.digest


def test_all_errors_are_one_family() -> None:
    for error in (CorruptError, IncompleteError, MismatchError, VersionError):
        assert issubclass(error, WeightsError)
