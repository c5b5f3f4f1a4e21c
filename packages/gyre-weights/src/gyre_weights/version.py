"""A published version, opened: a mapping from Hugging Face names to tensors, without reading them first.

Invariants: opening finds every file there and of the size the manifest tells; a tensor's pages come when it is touched;
a delta is opened over its base, found by itself when none is given, and refused on any base but its own. Nothing is
ever written into a published folder. Not here: putting values into a model (`gyre_weights.apply`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gyre_weights.arrays import Bytes, HostTensor
from gyre_weights.delta_code import Patch, decode, patch
from gyre_weights.digest import CHUNK, Digest
from gyre_weights.errors import CorruptError, IncompleteError, MismatchError, VersionError
from gyre_weights.manifest import BaseRef, Manifest, StoredEntry, TensorEntry, identity, read_manifest
from gyre_weights.parallel import each
from gyre_weights.shards import MappedFile, read_headers

INDEX = "model.safetensors.index.json"
PART = "|"
"""Between a tensor's name and the part of its delta; no Hugging Face name has it."""


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication was. `location` and `version` are all a receiver needs."""

    version: int
    location: str
    kind: str
    """disk, shm or delta."""
    bytes: int
    """Written at `location`."""
    seconds: float
    digest: str
    """Of the contents: equal for the same weights, however published."""
    base_version: int | None = None
    changed: int | None = None
    """Delta: elements that differ from the base."""


class Version(Mapping[str, HostTensor]):
    """An opened version. Reading a tensor of a delta makes a patched copy; of a full version, a window of the file."""

    def __init__(self, folder: Path, manifest: Manifest, base: Version | None) -> None:
        self.folder, self.manifest, self.base = folder, manifest, base
        self._doing = f"opening policy version {manifest.version} at {folder}"
        self._maps: dict[str, MappedFile] = {}
        self._parts: dict[str, dict[str, StoredEntry]] = {}
        if manifest.base is not None:
            for stored, entry in manifest.stored.items():
                name, _, part = stored.rpartition(PART)
                self._parts.setdefault(name, {})[part] = entry

    @property
    def version(self) -> int:
        """Policy version; -1 for a folder that does not tell."""
        return self.manifest.version

    @property
    def digest(self) -> str:
        """Content digest; empty for a folder without a manifest."""
        return self.manifest.digest

    @property
    def is_delta(self) -> bool:
        """Whether only what changed is stored."""
        return self.manifest.base is not None

    @property
    def stored_bytes(self) -> int:
        """Bytes at rest of this version alone."""
        return sum(self.manifest.files.values())

    def __len__(self) -> int:
        return len(self.manifest.tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.tensors)

    def __getitem__(self, name: str) -> HostTensor:
        entry = self.manifest.tensors[name]
        if not self.is_delta:
            return self._window(self.manifest.stored[name])
        base = self.open_base()[name]
        if name not in self._parts:
            return base
        whole = HostTensor(entry.dtype, entry.shape, np.array(base.data, copy=True))
        patch(whole.words(), self.patch(name))
        return whole

    def patch(self, name: str) -> Patch:
        """Delta: what differs from the base in `name`."""
        entry = self.manifest.tensors[name]
        parts = {part: self._window(stored) for part, stored in self._parts.get(name, {}).items()}
        return decode(name, entry.dtype, _elements(entry), parts)

    @property
    def changed(self) -> frozenset[str]:
        """Delta: the tensors that differ from the base; all tensors of a full version."""
        return frozenset(self._parts) if self.is_delta else frozenset(self.manifest.tensors)

    def verify(self) -> None:
        """Compare everything stored with its digest; CorruptError names the first that differs. Reads all stored
        bytes. Nothing to compare in a folder without a manifest."""
        stored = list(self.manifest.stored.items())
        for _, entry in stored:
            self._mapped(entry)  # files are opened by one thread
        each(lambda named: self.verify_stored(*named), stored, lambda named: named[1].nbytes)

    def verify_all(self) -> None:
        """As `verify`, with every version that this one rests on."""
        self.verify()
        if self.is_delta:
            self.open_base().verify_all()

    def verify_stored(self, name: str, entry: StoredEntry) -> None:
        """Compare one stored entry with its digest."""
        if not entry.digest:
            return
        found = self.digest_stored(entry)
        if found != entry.digest:
            raise CorruptError(
                self._doing, got=f"{name} with digest {found} in {entry.file}", expected=entry.digest,
                fix="Publish the version again.",
            )  # fmt: skip

    def digest_stored(self, entry: StoredEntry) -> str:
        """The digest of a stored entry's bytes, read piece by piece into a buffer that stays in the cache."""
        mapped, digest, buffer = self._mapped(entry), Digest(), np.empty(min(CHUNK, entry.nbytes), np.uint8)
        for start in range(0, entry.nbytes, CHUNK):
            piece = buffer[: entry.nbytes - start]
            mapped.read_into(piece, entry.offset + start)
            digest.add(piece)
        return digest.hex()

    def verify_tensor(self, name: str, found: str) -> None:
        """CorruptError when `found` is not the digest that `name` must have in this version."""
        expected = self.manifest.tensors[name].digest
        if expected and found != expected:
            raise CorruptError(
                f"applying policy version {self.version}", got=f"{name} with digest {found}", expected=expected,
                fix="Load a full version.",
            )  # fmt: skip

    def open_base(self) -> Version:
        """The version that a delta is against; VersionError for a full version, which has none."""
        ref = self.manifest.base
        if ref is None:
            raise VersionError(self._doing, got="a wish for its base", expected="a delta", fix="It is a full version.")
        if self.base is None:
            found = open_version(self.folder.parent / ref.location)
            check_base(f"opening the base of {self.folder}", ref, found.version, found.digest)
            self.base = found
        return self.base

    def hold(self) -> None:
        """Open every file of it and of all that it rests on, so that nobody who drops one takes anything away from
        here. IncompleteError when one is gone already."""
        for file in self.manifest.files:
            self._open(file)
        if self.is_delta:
            self.open_base().hold()

    def read_into(self, name: str, memory: Bytes, start: int) -> None:
        """Full version: fill `memory` with the bytes of tensor `name` from `start` on."""
        entry = self.manifest.stored[name]
        self._mapped(entry).read_into(memory, entry.offset + start)

    def _window(self, entry: StoredEntry) -> HostTensor:
        return self._mapped(entry).tensor(entry)

    def _open(self, file: str) -> MappedFile:
        if file not in self._maps:
            self._maps[file] = MappedFile(self.folder / file, self._doing)
        return self._maps[file]

    def _mapped(self, entry: StoredEntry) -> MappedFile:
        mapped = self._open(entry.file)
        if mapped.data.nbytes < entry.offset + entry.nbytes:
            raise IncompleteError(
                self._doing, got=f"{entry.file} of {mapped.data.nbytes} bytes",
                expected=f"at least {entry.offset + entry.nbytes}", fix="The file was cut short.",
            )  # fmt: skip
        return mapped


def _elements(entry: TensorEntry) -> int:
    return int(np.prod(entry.shape, dtype=np.int64))


def open_version(
    source: Published | str | Path,
    *,
    version: int | None = None,
    digest: str | None = None,
    base: Version | None = None,
) -> Version:
    """Open what was published at `source`, or any Hugging Face folder of safetensors.

    `version` and `digest` are checked when given. A delta finds its base beside it, unless `base` is given. Raises
    IncompleteError (missing or cut), CorruptError (manifest), VersionError (another version, digest or base).
    """
    if isinstance(source, Published):
        version = source.version if version is None else version
        digest = source.digest if digest is None else digest
        source = source.location
    folder = Path(source)
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = _plain(folder, -1 if version is None else version)
    doing = f"opening policy version {manifest.version} at {folder}"
    if version is not None and manifest.version != version:
        raise VersionError(doing, got=f"version {manifest.version}", expected=f"version {version}")
    if digest and manifest.digest and manifest.digest != digest:
        raise VersionError(doing, got=f"contents {manifest.digest}", expected=f"contents {digest}")
    _check_files(folder, manifest, doing)
    if base is not None and manifest.base is not None:
        check_base(doing, manifest.base, base.version, base.digest)
    return Version(folder, manifest, base)


def check_base(doing: str, ref: BaseRef, version: int, digest: str) -> None:
    """VersionError when a delta against `ref` does not fit a holder of `version` with contents `digest`."""
    if (version, digest) != (ref.version, ref.digest):
        raise VersionError(
            doing, got=f"a delta against version {ref.version} ({ref.digest})",
            expected=f"one against version {version} ({digest or 'of unknown contents'}), which is held",
            fix="Load a full version first, or the deltas between.",
        )  # fmt: skip


def _check_files(folder: Path, manifest: Manifest, doing: str) -> None:
    for file, size in manifest.files.items():
        path = folder / file
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise IncompleteError(
                doing, got=f"no file {file}" if found is None else f"{file} of {found} bytes", expected=f"{size} bytes",
                fix="The version is cut short or was dropped; publish it again or take another.",
            )  # fmt: skip
    missing = [name for name in manifest.tensors if manifest.base is None and name not in manifest.stored]
    if missing:
        raise MismatchError(doing, got=f"a manifest without a place for {missing[:3]}", expected="one for each tensor")


def _plain(folder: Path, version: int) -> Manifest:
    """A manifest for a Hugging Face folder that has none: the index's shards, model.safetensors, or all there are."""
    doing = f"opening the model folder {folder}"
    index = folder / INDEX
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CorruptError(doing, got=f"a damaged {INDEX} ({error})", expected="a weight_map") from error
    elif (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise IncompleteError(
            doing, got="no safetensors file", expected="model.safetensors or shards with an index",
            fix="Check the location.",
        )  # fmt: skip
    stored, sizes = read_headers(folder, files, doing)
    tensors = {name: TensorEntry(entry.dtype, entry.shape, "") for name, entry in stored.items()}
    return Manifest(version, "disk", tensors, stored, sizes, None, identity(tensors))
