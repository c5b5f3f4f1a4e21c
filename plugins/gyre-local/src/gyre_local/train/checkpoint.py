"""Checkpoints as folders, and the small files of a published version.

Invariants: a folder appears complete or not at all; a checkpoint carries the size and checksum of each of its files,
so that one cut short is refused, not half used. No pickle anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gyre_core import InfrastructureError
from gyre_core.ranks.files import new_folder
from gyre_weights.folder import write_extras

from gyre_local.files import checksum, json_text, save_tensors, write_json

WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.state"
STATE = "state.json"
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt",
    "chat_template*", "*.model",
)  # fmt: skip


def model_files(source: Path, dtype: str) -> dict[str, bytes]:
    """What a model's folder has beside its weights: config.json for `dtype`, and the tokenizer's files of `source`, a
    folder of the same model. In memory, as that folder may go before the last version is published."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    found = {"config.json": json_text(config | {"dtype": dtype}).encode()}
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                found.setdefault(path.name, path.read_bytes())
    return found


def write_checkpoint(
    target: Path,
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    beside: Mapping[str, bytes],
) -> None:
    """Make `target` a complete checkpoint, in place of an older one; `beside` are the model's small files."""
    with new_folder(target) as folder:
        save_tensors(tensors, folder / WEIGHTS, {"gyre_version": str(state["version"])})
        write_extras(folder, beside, durable=False)
        save_tensors(optimizer, folder / OPTIMIZER)
        files = {p.name: {"bytes": p.stat().st_size, "crc32": checksum(p)} for p in sorted(folder.iterdir())}
        write_json(folder / STATE, dict(state) | {"files": files})


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's state after checking every file; InfrastructureError when anything is missing or cut."""
    doing = f"restoring the checkpoint {folder}"
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = state["files"]
        for name, expected in files.items():
            path = folder / name
            found = {"bytes": path.stat().st_size, "crc32": checksum(path)}
            if found != expected:
                raise InfrastructureError(
                    doing, got=f"{name} with {found}", expected=f"{expected}",
                    fix="It was cut short or changed; use an older checkpoint.",
                )  # fmt: skip
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InfrastructureError(
            doing, got=f"{type(error).__name__}: {error}", expected="a complete checkpoint",
            fix="It was cut short; use an older checkpoint.",
        ) from error  # fmt: skip
    return state
