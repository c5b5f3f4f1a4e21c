"""Putting files and folders at rest atomically.

Invariant: a name either does not exist, or exists complete and flushed to disk; readers of an old folder keep what
they have open.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gyre_core.ranks.files import new_file
from safetensors.torch import save_file

_CHUNK = 1 << 22


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file under a temporary name, flush, rename. OSError when the disk is full."""
    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    with new_file(path) as partial:
        save_file(plain, partial, dict(metadata or {}) | {"format": "pt"})


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
