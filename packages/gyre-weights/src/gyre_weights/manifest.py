"""The manifest: what a published version holds, where, and what it must read as.

Invariants: the manifest is written last, so a folder that has one is whole; a version's `digest` depends on names,
dtypes, shapes and contents alone, so that disk, shared memory and delta publications of the same weights share it.
Format: JSON in `gyre-manifest.json`, `format` 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_weights.arrays import DTYPE_BYTES
from gyre_weights.digest import content_digest
from gyre_weights.errors import CorruptError, IncompleteError, VersionError

MANIFEST = "gyre-manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a version. `digest` is of its bytes in this version, also when only a delta is stored."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    """Empty when unknown (a folder without a manifest)."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """Bytes at rest: `nbytes` at `offset` of `file`, a safetensors shard of the version's folder."""

    file: str
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class BaseRef:
    """What a delta is against."""

    version: int
    digest: str
    location: str
    """Folder of the base, relative to the delta's folder's parent."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one version holds."""

    version: int
    kind: str
    tensors: Mapping[str, TensorEntry]
    stored: Mapping[str, StoredEntry]
    """By stored name: for a full version the tensor's name, for a delta "<name>|<part>"."""
    files: Mapping[str, int] = field(default_factory=dict)
    """Shards and their sizes in bytes."""
    base: BaseRef | None = None
    digest: str = ""

    @property
    def full_bytes(self) -> int:
        """Bytes of all tensors whole."""
        return sum(entry.nbytes for entry in self.tensors.values())


def identity(tensors: Mapping[str, TensorEntry]) -> str:
    """The version's content digest; empty when a tensor's is unknown."""
    if not all(entry.digest for entry in tensors.values()):
        return ""
    return content_digest((name, e.dtype, e.shape, e.digest) for name, e in tensors.items())


def to_json(manifest: Manifest) -> str:
    """The manifest's text."""
    base = manifest.base
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": manifest.version,
        "kind": manifest.kind,
        "digest": manifest.digest,
        "base": None if base is None else {"version": base.version, "digest": base.digest, "location": base.location},
        "files": dict(manifest.files),
        "tensors": {name: [e.dtype, list(e.shape), e.digest] for name, e in manifest.tensors.items()},
        "stored": {
            name: [e.file, e.offset, e.nbytes, e.dtype, list(e.shape), e.digest] for name, e in manifest.stored.items()
        },
    }
    return json.dumps(data, indent=None, separators=(",", ":"))


def from_json(text: str, doing: str) -> Manifest:
    """The manifest; CorruptError when it is damaged, VersionError when its format is another."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise VersionError(
                doing, got=f"manifest format {data['format']}", expected=f"format {FORMAT}",
                fix="Use the gyre-weights release that wrote it, or a newer one.",
            )  # fmt: skip
        base = data["base"]
        found = Manifest(
            version=int(data["version"]),
            kind=str(data["kind"]),
            tensors={n: TensorEntry(d, tuple(s), g) for n, (d, s, g) in data["tensors"].items()},
            stored={
                n: StoredEntry(f, int(o), int(b), d, tuple(s), g) for n, (f, o, b, d, s, g) in data["stored"].items()
            },
            files={name: int(size) for name, size in data["files"].items()},
            base=None if base is None else BaseRef(int(base["version"]), base["digest"], base["location"]),
            digest=str(data["digest"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            doing, got=f"a damaged manifest ({type(error).__name__}: {error})", expected="valid JSON of format 1"
        ) from error
    if identity(found.tensors) != found.digest:
        raise CorruptError(doing, got="a manifest that does not agree with its own digest", expected="agreement")
    return found


def read_manifest(folder: str | Path) -> Manifest | None:
    """The folder's manifest; None when the folder exists without one. IncompleteError when there is no folder."""
    root = Path(folder)
    doing = f"reading the manifest of {root}"
    try:
        return from_json((root / MANIFEST).read_text(encoding="utf-8"), doing)
    except FileNotFoundError as error:
        if root.is_dir():
            return None
        raise IncompleteError(
            doing, got="no such folder", expected="a published version",
            fix="It may have been dropped as too old; take the newest one.",
        ) from error  # fmt: skip
    except (OSError, UnicodeDecodeError) as error:
        raise IncompleteError(doing, got=f"{type(error).__name__}: {error}", expected="a readable file") from error
