"""The files that ranks fill and read, made and checked from the cell's side: names and shapes, no tensors.

Invariant: a file of another model is refused by the name of the first tensor that differs, before any rank reads it.
Not here: folders, atomicity and checksums (`files`), what is in a file (`tensorfile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gyre_core.errors import InfrastructureError
from gyre_core.ranks.tensorfile import Entry, TensorFile, create, shards, write_index

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
