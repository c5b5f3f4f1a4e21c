"""A TreeBatch as a flat dict of arrays, and as one blob of bytes.

For sending a micro-batch to a cell. The blob is a magic, a length, a JSON header (names, dtypes, shapes), the arrays'
raw little-endian bytes, each 8-byte aligned, and a CRC-32 of all of it. The invariant: reading back what was written
gives an equal batch, and a damaged or foreign blob is a ValueError, never a wrong batch. No pickle. Needs numpy
alone.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_loss._check import fail, field
from gyre_loss.batch import TreeBatch

_DOING = "reading a TreeBatch"
MAGIC = b"GYRETB01"
_HEAD = struct.Struct("<8sI")
_TAIL = struct.Struct("<I")
_PLAIN = tuple(name for name in TreeBatch.__dataclass_fields__ if name not in ("execution_ids", "routed_experts"))


def to_arrays(batch: TreeBatch) -> dict[str, NDArray[Any]]:
    """The batch as named numpy arrays; execution names are UTF-8 bytes and their lengths."""
    names = [name.encode() for name in batch.execution_ids]
    arrays: dict[str, NDArray[Any]] = {name: getattr(batch, name) for name in _PLAIN}
    arrays["execution_name_bytes"] = np.frombuffer(b"".join(names), np.uint8)
    arrays["execution_name_length"] = np.array([len(name) for name in names], np.int64)
    if batch.routed_experts is not None:
        arrays["routed_experts"] = batch.routed_experts
    return arrays


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> TreeBatch:
    """The inverse of ``to_arrays``; raises ValueError for a missing or malformed array."""
    raw = np.asarray(field(arrays, "execution_name_bytes", _DOING), np.uint8).tobytes()
    lengths = np.asarray(field(arrays, "execution_name_length", _DOING), np.int64)
    if np.any(lengths < 0) or int(lengths.sum()) != len(raw):
        fail(_DOING, f"execution names of {int(lengths.sum())} bytes", f"{len(raw)} bytes")
    ends = np.cumsum(lengths).tolist()
    names = tuple(raw[end - size : end].decode() for end, size in zip(ends, lengths.tolist(), strict=True))
    plain = {name: field(arrays, name, _DOING) for name in _PLAIN}
    return TreeBatch(execution_ids=names, routed_experts=arrays.get("routed_experts"), **plain)


def to_bytes(batch: TreeBatch) -> bytes:
    """The batch as one blob."""
    arrays = {name: np.ascontiguousarray(values) for name, values in to_arrays(batch).items()}
    header = json.dumps([[name, a.dtype.newbyteorder("<").str, a.shape] for name, a in arrays.items()]).encode()
    header += b" " * (-(_HEAD.size + len(header)) % 8)
    pieces = [_HEAD.pack(MAGIC, len(header)), header]
    for array in arrays.values():
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        pieces.append(data + b"\0" * (-len(data) % 8))
    body = b"".join(pieces)
    return body + _TAIL.pack(zlib.crc32(body))


def from_bytes(blob: bytes | bytearray | memoryview) -> TreeBatch:
    """The inverse of ``to_bytes``; raises ValueError for a foreign, cut or damaged blob."""
    view = memoryview(bytearray(blob))
    if len(view) < _HEAD.size + _TAIL.size or bytes(view[:8]) != MAGIC:
        fail(_DOING, f"{len(view)} bytes that begin with {bytes(view[:8])!r}", f"a blob that begins with {MAGIC!r}")
    if zlib.crc32(view[: -_TAIL.size]) != _TAIL.unpack(view[-_TAIL.size :])[0]:
        fail(_DOING, "a blob with a wrong checksum", "the bytes as they were written", "Send the micro-batch again.")
    size = _HEAD.unpack(view[: _HEAD.size])[1]
    offset = _HEAD.size + size
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype, shape in json.loads(bytes(view[_HEAD.size : offset])):
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(view, np.dtype(dtype), count, offset).reshape(shape)
        data = count * np.dtype(dtype).itemsize
        offset += data + (-data % 8)
    return from_arrays(arrays)
