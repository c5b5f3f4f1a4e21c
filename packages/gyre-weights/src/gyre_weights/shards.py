"""safetensors shards, written as tensors come and read by mapping.

The format wants its header first, and a stream knows its header last: so room is kept for it at the front, tensors are
written behind, and the header, padded with blanks as the format allows, is put in at the end. Invariants: a tensor is
in memory only while it is written; any safetensors reader opens the result; each stored tensor is digested on the way,
while its bytes are in the cache.
"""

from __future__ import annotations

import json
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import numpy as np

from gyre_weights.arrays import Bytes, HostTensor
from gyre_weights.digest import CHUNK, Digest, digest_bytes
from gyre_weights.errors import CorruptError, IncompleteError
from gyre_weights.manifest import StoredEntry
from gyre_weights.parallel import SMALL, processors
from gyre_weights.spares import Spares

PAGE = 4096
HEADER_ROOM = 32 * PAGE
"""Bytes kept for length and header; the data begins on a page."""
_ENTRY_EXTRA = 120
"""More than an entry's JSON takes beyond its name."""


class ShardFile:
    """One shard being written."""

    def __init__(
        self,
        path: Path,
        *,
        version: int,
        room: int = HEADER_ROOM,
        helper: ThreadPoolExecutor | None = None,
        spares: Spares | None = None,
    ) -> None:
        self.path, self._room, self._helper = path, room, helper
        self._meta = {"format": "pt", "gyre_version": str(version)}
        self._entries: dict[str, dict[str, object]] = {}
        self._header_bytes = len(json.dumps({"__metadata__": self._meta})) + 16
        self._at = 0
        used = spares.take(path) if spares is not None else None
        made = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._handle = os.open(path, made, 0o600) if used is None else used
        os.lseek(self._handle, room, os.SEEK_SET)

    @property
    def nbytes(self) -> int:
        """Bytes of tensors so far."""
        return self._at

    def fits(self, name: str) -> bool:
        """Whether the header has room for another entry."""
        return self._header_bytes + len(json.dumps(name)) + _ENTRY_EXTRA <= self._room - 8

    def add(self, name: str, tensor: HostTensor) -> StoredEntry:
        """Write one tensor. OSError when the disk is full."""
        digest = self._write(tensor.data)
        begin, self._at = self._at, self._at + tensor.nbytes
        self._entries[name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, self._at]
        }  # fmt: skip
        self._header_bytes += len(json.dumps(name)) + _ENTRY_EXTRA
        return StoredEntry(
            self.path.name, self._room + begin, tensor.nbytes, tensor.dtype, tensor.shape, digest
        )  # fmt: skip

    def _write(self, data: Bytes) -> str:
        """Write and digest at the same time: by two threads, or piece by piece while a piece is in the cache."""
        if self._helper is not None and data.nbytes >= SMALL:
            digest = self._helper.submit(digest_bytes, data)
            _write_all(self._handle, data)
            return digest.result()
        digest_here = Digest()
        for start in range(0, data.nbytes, CHUNK):
            piece = data[start : start + CHUNK]
            digest_here.add(piece)
            _write_all(self._handle, piece)
        return digest_here.hex()

    def close(self, *, flush: bool) -> int:
        """Write the header and, with `flush`, force all to disk; the file's size."""
        header = json.dumps({"__metadata__": self._meta} | self._entries, separators=(",", ":")).encode()
        room = self._room - 8
        os.pwrite(self._handle, room.to_bytes(8, "little") + header.ljust(room), 0)
        os.ftruncate(self._handle, self._room + self._at)  # a shard that was used again may have been longer
        if flush:
            os.fsync(self._handle)
        os.close(self._handle)
        self._handle = -1
        return self._room + self._at

    def abandon(self) -> None:
        """Close without a header; the file is of no use."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _write_all(handle: int, data: Bytes) -> None:
    view = data.data
    while view:
        view = view[os.write(handle, view) :]


class ShardWriter:
    """A stream of tensors into shards `<stem>-00001.safetensors`, ... of at most `shard_bytes`, or one tensor."""

    def __init__(
        self, folder: Path, stem: str, *, version: int, shard_bytes: int, flush: bool, spares: Spares | None = None
    ) -> None:
        self._folder, self._stem, self._version = folder, stem, version
        self._limit, self._flush, self._spares = shard_bytes, flush, spares
        self._open: ShardFile | None = None
        self._helper = ThreadPoolExecutor(1, "gyre-weights") if processors() > 1 else None
        self.stored: dict[str, StoredEntry] = {}
        self.files: dict[str, int] = {}

    def add(self, name: str, tensor: HostTensor) -> StoredEntry:
        """Write it into the present shard, or the next one when that is full."""
        shard = self._open
        if shard is not None and (shard.nbytes + tensor.nbytes > self._limit or not shard.fits(name)):
            self._finish(shard)
            shard = None
        if shard is None:
            path = self._folder / f"{self._stem}-{len(self.files) + 1:05d}.safetensors"
            self._open = shard = ShardFile(path, version=self._version, helper=self._helper, spares=self._spares)
        self.stored[name] = shard.add(name, tensor)
        return self.stored[name]

    def _finish(self, shard: ShardFile) -> None:
        self.files[shard.path.name] = shard.close(flush=self._flush)
        self._open = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._helper is not None:
            self._helper.shutdown()
        if self._open is not None:
            if error is None:
                self._finish(self._open)
            else:
                self._open.abandon()


class MappedFile:
    """A file's bytes without reading them: pages come as they are touched. The mapping is private: writing into a
    tensor over it changes no file. It lives as long as an array over it does, also after the file was unlinked."""

    def __init__(self, path: Path, doing: str) -> None:
        self._doing, self._name = doing, path.name
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._handle)
            size = os.fstat(self._handle).st_size
            self.data: Bytes = (
                np.frombuffer(mmap.mmap(self._handle, 0, access=mmap.ACCESS_COPY), np.uint8)
                if size
                else np.empty(0, np.uint8)
            )
        except (OSError, ValueError) as error:
            raise IncompleteError(
                doing, got=f"{type(error).__name__}: {error}", expected=f"a readable file {path.name}",
                fix="The version may have been dropped as too old; take the newest one.",
            ) from error  # fmt: skip

    def read_into(self, memory: Bytes, offset: int) -> None:
        """Fill `memory` with the bytes at `offset`, without a page of the mapping being touched: for what is copied
        once, a mapping costs more than the copy. CorruptError when the file was cut meanwhile."""
        view = memory.data
        while view:
            count = os.preadv(self._handle, [view], offset)
            if not count:
                raise CorruptError(
                    self._doing, got=f"the end of {self._name} at byte {offset}", expected=f"{len(view)} bytes more",
                    fix="The file was cut short.",
                )  # fmt: skip
            view, offset = view[count:], offset + count

    def tensor(self, entry: StoredEntry) -> HostTensor:
        """A window of the file."""
        return HostTensor(entry.dtype, entry.shape, self.data[entry.offset : entry.offset + entry.nbytes])


def read_headers(folder: Path, files: Iterable[str], doing: str) -> tuple[dict[str, StoredEntry], dict[str, int]]:
    """Stored entries (without digests) and file sizes of safetensors files as their own headers tell them."""
    stored: dict[str, StoredEntry] = {}
    sizes: dict[str, int] = {}
    for file in files:
        path = folder / file
        try:
            with path.open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                length = int.from_bytes(handle.read(8), "little")
                if size < 8 or length > size - 8:
                    raise IncompleteError(doing, got=f"{file} of {size} bytes", expected=f"a header of {length} bytes")
                header: Mapping[str, dict[str, list[int]]] = json.loads(handle.read(length))
        except OSError as error:
            raise IncompleteError(doing, got=f"{type(error).__name__}: {error}", expected=file) from error
        except ValueError as error:
            raise CorruptError(doing, got=f"{file} with a damaged header ({error})", expected="safetensors") from error
        sizes[file] = size
        for name, info in header.items():
            if name == "__metadata__":
                continue
            begin, end = info["data_offsets"]
            if 8 + length + end > size:
                raise IncompleteError(
                    doing, got=f"{file} of {size} bytes", expected=f"at least {8 + length + end} for {name}",
                    fix="The file is cut short or still being written.",
                )  # fmt: skip
            shape = tuple(info["shape"])
            stored[name] = StoredEntry(file, 8 + length + begin, end - begin, str(info["dtype"]), shape, "")
    return stored, sizes
