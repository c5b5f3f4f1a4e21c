"""Model folders: what is checked before a running server is told to load one.

Invariant: a folder passes only if its safetensors headers are whole and name the same tensors with the same shapes as
the model the server runs; then loading changes weights and nothing else. Only headers are read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from gyre_core import InfrastructureError

_LONGEST_HEADER = 1 << 28


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`tensors`: shape by name. `vocab` and `positions` are 0 when config.json does not say."""

    tensors: dict[str, tuple[int, ...]]
    vocab: int
    positions: int
    experts: bool
    nbytes: int


def read_folder(location: str, doing: str) -> ModelFolder:
    """The folder's headers and sizes; InfrastructureError when anything of it cannot be read."""
    root = Path(location)
    files = sorted(root.glob("*.safetensors"))
    try:
        config = msgspec.json.decode((root / "config.json").read_bytes())
        if not files:
            raise ValueError("no *.safetensors in it")
        tensors: dict[str, tuple[int, ...]] = {}
        for file in files:
            tensors |= _header(file)
        nbytes = sum(file.stat().st_size for file in files)
    except (OSError, ValueError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise InfrastructureError(
            doing, got=f"{location}: {error}", expected="a folder with config.json and whole safetensors files"
        ) from error
    text = config.get("text_config") or config
    return ModelFolder(
        tensors,
        int(text.get("vocab_size") or 0),
        int(text.get("max_position_embeddings") or 0),
        bool(text.get("num_experts") or text.get("n_routed_experts") or text.get("num_local_experts")),
        nbytes,
    )


def require_same(new: ModelFolder, old: ModelFolder, location: str, doing: str) -> None:
    """InfrastructureError when `new` has other tensors or shapes than `old`."""
    if new.tensors == old.tensors:
        return
    names = sorted(new.tensors.keys() ^ old.tensors.keys())
    shapes = sorted(name for name in new.tensors.keys() & old.tensors.keys() if new.tensors[name] != old.tensors[name])
    raise InfrastructureError(
        doing,
        got=f"{location}: other tensors {names[:3]}, other shapes {shapes[:3]}",
        expected="the tensors of the model that runs",
        fix="All versions of a run must share one architecture.",
    )


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    size = file.stat().st_size
    with file.open("rb") as source:
        (length,) = struct.unpack("<Q", source.read(8).ljust(8, b"\0"))
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"{file.name}: a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = msgspec.json.decode(source.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{file.name}: {size} bytes, its header tells of {8 + length + end}")
    return {name: tuple(entry["shape"]) for name, entry in header.items()}
