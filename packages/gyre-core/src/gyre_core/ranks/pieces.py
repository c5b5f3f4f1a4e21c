"""Shards: which part of which named tensor a rank holds, and where.

A trainer shards as it likes (flat slices, rows, columns, interleaved heads); a `Piece` says how its local tensor lies
in the full tensor that has a Hugging Face name. Loading, publishing, contributions and checkpoints are then copies
between local tensors and files, in any number of ranks. Invariant: every element of every named tensor has exactly
one owner among all ranks of a replica. Tensors are used by their methods alone; torch is the plugin's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_core.ranks.tensorfile import Entry, TensorFile

ViewOf = Callable[[TensorFile, Entry], Any]
"""The tensor that lies in the file's memory at an entry: torch's `frombuffer`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`take(full)` is the view of the full tensor `name` that `local` holds; same shape. Copies of one shard on several
    ranks have one `owner`, which writes it."""

    name: str
    take: Callable[[Any], Any]
    local: Any
    owner: bool = True


class Tensors(Mapping[str, Any]):
    """The tensors of some files, by name; views, made when asked for."""

    def __init__(self, paths: Iterable[Path], view: ViewOf, *, writable: bool = False) -> None:
        self._files = [TensorFile(path, writable=writable) for path in paths]
        self._where = {name: (file, entry) for file in self._files for name, entry in file.entries.items()}
        self._view = view

    def __getitem__(self, name: str) -> Any:
        return self._view(*self._where[name])

    def __iter__(self) -> Any:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def flush(self) -> None:
        """To the disk."""
        for file in self._files:
            file.flush()


def read(pieces: Iterable[Piece], tensors: Mapping[str, Any], prefix: str = "") -> None:
    """Local tensors from the full ones."""
    for piece in pieces:
        piece.local.copy_(piece.take(tensors[prefix + piece.name]))


def write(pieces: Iterable[Piece], tensors: Mapping[str, Any], prefix: str = "") -> None:
    """What this rank owns, into the full ones."""
    for piece in pieces:
        if piece.owner:
            piece.take(tensors[prefix + piece.name]).copy_(piece.local)


def finite(pieces: Iterable[Piece], tensors: Mapping[str, Any] | None = None) -> bool:
    """Whether every number is, of the local tensors or of these pieces of full ones."""
    return all(
        bool((piece.local if tensors is None else piece.take(tensors[piece.name])).isfinite().all()) for piece in pieces
    )


def total(pieces: Iterable[Piece], parts: list[Mapping[str, Any]], divisor: float) -> float:
    """Set local tensors to the sum of the parts, in their order, divided once; the square of what this rank owns."""
    square = 0.0
    for piece in pieces:
        piece.local.copy_(piece.take(parts[0][piece.name]))
        for part in parts[1:]:
            piece.local.add_(piece.take(part[piece.name]).to(piece.local.device))
        piece.local.div_(divisor)
        if piece.owner:
            square += float(piece.local.double().square().sum())
    return square
