"""Putting files and folders at rest atomically.

Invariant: a name either does not exist, or exists complete and flushed to disk; readers of an old folder keep what
they have open.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_CHUNK = 1 << 22


def flush(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under a temporary name, flush, rename. OSError when the disk is full."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        save_file(plain, partial, dict(metadata or {}) | {"format": "pt"})
        flush(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; on leaving it becomes `target` in one rename (an older `target` is moved aside first). On an
    error it is removed and `target` stays as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:8]
    partial, old = target.with_name(f".{target.name}.{mark}"), target.with_name(f".{target.name}.{mark}.old")
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            flush(path)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        flush(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, in one line an entry so that differences read well."""
    path.write_text(json_text(value), encoding="utf-8")


def json_text(value: Any) -> str:
    """The text of `write_json`."""
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def checksum(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    value = 0
    with path.open("rb") as reader:
        while piece := reader.read(_CHUNK):
            value = zlib.crc32(piece, value)
    return value
