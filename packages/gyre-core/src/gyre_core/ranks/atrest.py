"""The files that ranks fill and read, made and checked from the cell's side: names and shapes, no tensors.

Invariant: a file of another model is refused by the name of the first tensor that differs, before any rank reads it.
Not here: folders, atomicity and checksums (`files`), what is in a file (`tensorfile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gyre_core.errors import InfrastructureError
from gyre_core.ranks import files
from gyre_core.ranks.tensorfile import Entry, TensorFile, create, files_of, shards, write_index

Shapes = Mapping[str, tuple[int, ...]]


def check_weights(shapes: Shapes, there: Shapes, doing: str) -> None:
    """InfrastructureError unless every weight of a model with these shapes is there."""
    for name, shape in shapes.items():
        if there.get(name) != shape:
            got = f"{name} of shape {list(there[name])}" if name in there else f"no tensor {name}"
            raise InfrastructureError(doing, got=got, expected=f"{name} of shape {list(shape)}")


def check_states(shapes: Shapes, kinds: Iterable[str], doing: str, path: Path) -> None:
    """InfrastructureError unless the file holds every kind of optimizer state of every weight."""
    there = TensorFile(path).shapes()
    for kind in kinds:
        for name, shape in shapes.items():
            if there.get(f"{kind}/{name}") != shape:
                got = f"{there.get(f'{kind}/{name}')} for {kind}/{name}"
                raise InfrastructureError(doing, got=got, expected=f"shape {shape}")


def open_checkpoint(
    folder: Path, shapes: Shapes, kinds: Iterable[str], dtype: str
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """What a checkpoint tells of itself, and what the command "restore" takes; InfrastructureError unless it is whole
    and of a model with these shapes and kinds of state, trained in `dtype`."""
    doing = f"restoring the checkpoint {folder}"
    state = files.read_state(folder)
    if state["dtype"] != dtype:
        raise InfrastructureError(doing, got=f"dtype {state['dtype']}", expected=dtype)
    weights = [path for path in files_of(folder) if path.name != files.OPTIMIZER]
    there = {name: shape for path in weights for name, shape in TensorFile(path).shapes().items()}
    check_weights(shapes, there, doing)
    check_states(shapes, kinds, doing, folder / files.OPTIMIZER)
    optimizer = str(folder / files.OPTIMIZER)
    return state, {"files": list(map(str, weights)), "optimizer": optimizer, "steps": state["steps"]}


def make_weight_files(folder: Path, shapes: Shapes, dtype: str, limit: int, version: int) -> list[str]:
    """Empty safetensors files for all weights, of at most `limit` bytes each, with their index."""
    groups = shards([Entry(name, dtype, shape) for name, shape in shapes.items()], limit)
    for name, group in groups.items():
        create(folder / name, group, {"gyre_version": str(version)})
    write_index(folder, groups)
    return [str(folder / name) for name in groups]


def make_state_file(path: Path, shapes: Shapes, kinds: Iterable[str]) -> str:
    """An empty file for the optimizer's state, float32."""
    create(path, [Entry(f"{kind}/{name}", "F32", shape) for kind in kinds for name, shape in shapes.items()])
    return str(path)
