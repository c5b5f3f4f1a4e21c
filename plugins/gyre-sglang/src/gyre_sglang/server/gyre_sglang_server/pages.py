"""KV pages that several servers share: a cache linker of SGLang, one file for each page, in the machine's shared memory
or in a folder that several machines see.

A session that is re-routed finds on its new cell the pages that its old cell left behind; nothing is asked for and
nothing is pushed. SGLang offers pages when a prompt has been computed and when a call ends or is aborted, and asks for
them when a prompt comes. Invariants: a page is named by the hash of all tokens up to it and of the weights (the
engine's cache key is part of it); what was computed across a change of weights is never kept; a page is whole and
has the digest of its name and bytes, or it is not there; one that could not be read is not looked up again until it is
written anew here. Synchronous, for CPU pools. Written for SGLang 0.5.23.
"""

# mypy: disable-error-code="import-not-found,misc"
from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.runtime_context import get_serving

TRIM_EVERY = 256
"""Pages between two looks at how much the folder holds."""
DIGEST = 16
"""Bytes at the end of a page's file."""


class SharedPages(UnifiedCacheLinker):
    """`extra_config`: `folder`, and `limit_bytes` of all pages in it."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool}
        self.layer_done_counter = _Done()
        self._page = int(params.page_size)
        self._buffers = [*pool.k_buffer, *pool.v_buffer]
        self._folder = Path(extra_config["folder"]) / _layout(self._buffers, self._page)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._limit = int(extra_config["limit_bytes"])
        self._written = 0
        self._lost: set[str] = set()
        """Pages that were there and could not be read: by name alone they may still seem to be."""
        self._queued: dict[str, tuple[list[str], torch.Tensor]] = {}
        self._landed: dict[int, bool] = {}
        self._done: deque[bool] = deque()
        self._batch = -1

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    # Taking

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Lengths, in pages, of the prefixes that are there."""
        (transfer,) = transfers
        found = 0
        for key in transfer.keys:
            if key in self._lost or not _is_there(self._path(key)):
                break
            found += 1
        return list(range(1, found + 1))

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Remember what to read into which slots."""
        (transfer,) = transfers
        self._queued[rid] = (list(transfer.keys), transfer.device_indices.clone())
        return True

    def start_layer_wise_loading(self) -> int:
        """Read what was queued, now."""
        if not self._queued:
            return -1
        self._batch += 1
        whole = True
        for keys, slots in self._queued.values():
            pages = slots.reshape(-1, self._page)
            whole &= all(self._read(key, at) for key, at in zip(keys, pages, strict=True))
        self._queued.clear()
        self._landed[self._batch] = whole
        return self._batch

    def _read(self, key: str, slots: torch.Tensor) -> bool:
        """False when the page has gone or is damaged: SGLang then ends the call that wanted it, and the engine sends it
        again."""
        path = self._path(key)
        try:
            data = bytearray(path.read_bytes())
            os.utime(path)
        except OSError:
            self._lost.add(key)
            return False
        body, digest = memoryview(data)[:-DIGEST], bytes(data[-DIGEST:])
        size = sum(buffer[slots].nbytes for buffer in self._buffers)
        if len(body) != size or _digest(path.name, body) != digest:
            self._lost.add(key)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            return False
        at = 0
        for buffer in self._buffers:
            shape = (len(slots), *buffer.shape[1:])
            count = buffer[0].numel() * len(slots)
            buffer[slots] = torch.frombuffer(data, dtype=buffer.dtype, count=count, offset=at).reshape(shape)
            at += count * buffer.itemsize
        return True

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Whether all of that batch came."""
        return self._landed.pop(counter_index, True)

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load that has not begun."""
        return self._queued.pop(rid, None) is not None

    # Keeping

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Keep pages, unless the weights have changed since the call began: `session_id` ends with their version."""
        (transfer,) = transfers
        if session_id is not None and session_id.rpartition("@")[2] == str(get_serving().weight_version):
            for key, slots in zip(transfer.keys, transfer.device_indices.reshape(-1, self._page), strict=True):
                self._write(key, slots)
        self._done.append(True)
        return True

    def _write(self, key: str, slots: torch.Tensor) -> None:
        path = self._path(key)
        if _is_there(path):
            return
        data = b"".join(buffer[slots].contiguous().view(torch.uint8).numpy().tobytes() for buffer in self._buffers)
        with contextlib.suppress(OSError):  # the medium is full or away: a page that is not there is computed
            handle, partial = tempfile.mkstemp(dir=self._folder, suffix=".partial")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data + _digest(path.name, data))
                os.replace(partial, path)
                self._lost.discard(key)
            except OSError:
                os.unlink(partial)
        self._written += 1
        if self._written % TRIM_EVERY == 0:
            with contextlib.suppress(OSError):
                self._trim()

    def _trim(self) -> None:
        """Drop the pages that were used longest ago until all fit into nine tenths of the limit."""
        pages = []
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):  # another server was faster
                stat = path.stat()
                pages.append((stat.st_mtime, stat.st_size, path))
        held = sum(size for _, size, _ in pages)
        for _, size, path in sorted(pages):
            if held <= 0.9 * self._limit:
                return
            path.unlink(missing_ok=True)
            held -= size

    def num_completed_offloads(self) -> int:
        """Offloads whose end has not been taken note of."""
        return len(self._done)

    def pop_completed_offload(self) -> bool:
        """The oldest of them."""
        return self._done.popleft()

    def reset(self) -> None:
        """Forget what is queued; pages stay, they are named by their weights."""
        self._queued.clear()
        self._landed.clear()
        self._done.clear()
        self._lost.clear()
        self._batch = -1

    def close(self) -> None:
        """Nothing is held."""
        self.reset()


class _Done:
    """A counter of layers that have all landed before the forward pass begins."""

    def set_consumer(self, index: int) -> None:
        """Nothing to remember."""

    def wait_until(self, layer: int) -> None:
        """Nothing to wait for."""


def _is_there(path: Path) -> bool:
    """Whether a page of that name is there, as far as the file system will say."""
    try:
        return path.is_file()
    except OSError:
        return False


def _digest(name: str, body: bytes | memoryview) -> bytes:
    """Of a page's bytes under its name."""
    return hashlib.blake2b(body, digest_size=DIGEST, person=bytes.fromhex(name)[:16]).digest()


def _layout(buffers: list[torch.Tensor], page: int) -> str:
    """Pages go only between pools of one layout."""
    text = repr([(tuple(buffer.shape[1:]), str(buffer.dtype)) for buffer in buffers] + [page])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
