"""Safetensors files as memory: a header that is written first, and tensors that several processes fill in place.

Each rank of a trainer holds its own shards; here every one of them writes its part of one file at the same time, so
no process ever holds the whole, and nothing is gathered. Invariant: a file made here has the exact size that its
header says, all of it allocated, before anybody writes to it; one that is opened is whole. The format is that of
safetensors (8 bytes of header length, JSON, raw little-endian data without holes). Not here: what a tensor is.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gyre_core.errors import InfrastructureError

SIZES: Mapping[str, int] = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
_MAX_HEADER = 1 << 28
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file: `dtype` as safetensors names it, `start` its first byte in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * SIZES[self.dtype]


def create(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
    """A file with these tensors, all zero and all allocated; `start` of the entries does not matter. OSError when
    there is no room on the disk."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}
    offset = 0
    for entry in sorted(entries, key=lambda e: -SIZES[e.dtype]):  # stable; keeps every tensor aligned
        header[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, offset + entry.size],
        }  # fmt: skip
        offset += entry.size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(handle, 0, _LENGTH.size + len(text) + offset)
        os.pwrite(handle, _LENGTH.pack(len(text)) + text, 0)
    finally:
        os.close(handle)


class TensorFile:
    """An open file. `buffer` is its memory: shared and writable for `writable`, else a private view of it."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """InfrastructureError when it is missing, cut short or no safetensors file."""
        self.path = path
        try:
            with path.open("r+b" if writable else "rb") as file:
                self.metadata, self.entries = _read_header(file.fileno())
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_COPY
                self.buffer = mmap.mmap(file.fileno(), 0, access=access)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise InfrastructureError(
                f"reading the tensors in {path}", got=f"{type(error).__name__}: {error}",
                expected="a complete safetensors file",
            ) from error  # fmt: skip

    def flush(self) -> None:
        """What was written is on the disk."""
        self.buffer.flush()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape by name."""
        return {name: entry.shape for name, entry in self.entries.items()}


def _read_header(handle: int) -> tuple[dict[str, str], dict[str, Entry]]:
    size = os.fstat(handle).st_size
    (length,) = _LENGTH.unpack(os.pread(handle, _LENGTH.size, 0))
    if length > min(_MAX_HEADER, size):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    header = json.loads(os.pread(handle, length, _LENGTH.size))
    metadata = {str(k): str(v) for k, v in (header.pop("__metadata__", None) or {}).items()}
    base, end, entries = _LENGTH.size + length, 0, {}
    for name, told in header.items():
        entry = Entry(name, told["dtype"], tuple(told["shape"]), base + told["data_offsets"][0])
        if entry.size != told["data_offsets"][1] - told["data_offsets"][0] or min(entry.shape, default=0) < 0:
            raise ValueError(f"tensor {name} with {told}")
        entries[name] = entry
        end = max(end, told["data_offsets"][1])
    if base + end != size:
        raise ValueError(f"{size} bytes where the header says {base + end}")
    return metadata, entries


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder, by its index if it has one; InfrastructureError without any."""
    index = folder / INDEX
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            return [folder / name for name in names]
        found = sorted(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError) as error:
        raise InfrastructureError(
            f"reading {index}", got=f"{type(error).__name__}: {error}", expected="an index of safetensors files"
        ) from error
    if not found:
        raise InfrastructureError(
            f"loading weights from {folder}", got="no safetensors file" if folder.exists() else "no such folder",
            expected="a Hugging Face folder",
        )  # fmt: skip
    return found


def shards(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """File name -> its tensors, none above `limit` bytes unless one tensor alone is."""
    groups: list[list[Entry]] = [[]]
    room = limit
    for entry in entries:
        if groups[-1] and entry.size > room:
            groups.append([])
            room = limit
        groups[-1].append(entry)
        room -= entry.size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_index(folder: Path, files: Mapping[str, Sequence[Entry]]) -> None:
    """The index that belongs to several files; nothing for one."""
    if len(files) > 1:
        total = sum(entry.size for group in files.values() for entry in group)
        names = {entry.name: name for name, group in files.items() for entry in group}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=1)
        (folder / INDEX).write_text(text, encoding="utf-8")
