"""Numpy arrays as small byte strings, for the store's blobs.

Format "pack v1": one byte that names the layout, then one zstd frame. `P`: the array's little-endian bytes, split into
planes (all first bytes, then all second bytes, ...), because the high bytes of token ids are nearly constant. `R`:
runs, (value, length) pairs of int32, for policy versions. Empty arrays are empty strings. Packing is lossless.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

_LEVEL = 3


class Packer:
    """Packs and unpacks. Holds compressor state, so one instance serves one thread."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        self._decompressor = zstandard.ZstdDecompressor()

    def planes(self, values: NDArray[Any]) -> bytes:
        """Pack an array of any fixed-size type by byte planes."""
        if values.size == 0:
            return b""
        flat = np.ascontiguousarray(values).reshape(-1)
        flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False)
        split = flat.view(np.uint8).reshape(-1, flat.dtype.itemsize).T
        return b"P" + self._compressor.compress(np.ascontiguousarray(split).tobytes())

    def runs(self, values: NDArray[np.int32]) -> bytes:
        """Pack an int32 array as runs of equal values."""
        if values.size == 0:
            return b""
        if (values == values[0]).all():  # nearly always
            pair = np.array([values[0], len(values)], dtype="<i4")
            return b"R" + self._compressor.compress(pair.tobytes())
        edges = np.flatnonzero(np.diff(values)) + 1
        starts = np.concatenate(([0], edges))
        lengths = np.diff(np.concatenate((starts, [len(values)])))
        pairs = np.stack([values[starts], lengths], axis=1).astype("<i4")
        return b"R" + self._compressor.compress(pairs.tobytes())

    def unpack(self, blob: bytes, dtype: type[Any]) -> NDArray[Any]:
        """The array that `planes` or `runs` packed. Error: a blob that is damaged or of another layout."""
        if not blob:
            return np.empty(0, dtype=dtype)
        try:
            raw = self._decompressor.decompress(blob[1:])
        except zstandard.ZstdError as error:
            raise ValueError(f"unpacking a {len(blob)}-byte array: damaged data ({error})") from error
        if blob[:1] == b"R":
            pairs = np.frombuffer(raw, dtype="<i4").reshape(-1, 2)
            return np.repeat(pairs[:, 0], pairs[:, 1]).astype(dtype)
        if blob[:1] != b"P":
            raise ValueError(f"unpacking an array: unknown layout {blob[:1]!r}; written by a newer gyre-tito?")
        size = np.dtype(dtype).itemsize
        split = np.frombuffer(raw, dtype=np.uint8).reshape(size, -1).T
        little = np.ascontiguousarray(split).view(np.dtype(dtype).newbyteorder("<")).reshape(-1)
        return little.astype(dtype, copy=False)
