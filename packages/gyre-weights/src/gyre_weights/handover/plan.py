"""Which part of a gradient goes to which process of the core.

A core of several processes keeps its optimizer state in shards; each process says which element ranges of which tensors
it wants, so a satellite need not know how the core is split. Invariant: the pieces of all processes cover every element
of every tensor exactly once (`check_cover`). Pure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gyre_weights.arrays import DTYPE_BYTES
from gyre_weights.errors import MismatchError

Form: TypeAlias = tuple[str, tuple[int, ...]]
"""dtype code and shape of a gradient."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of the flattened tensor `name`."""

    name: str
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What one process of the core wants: its pieces, laid one after the other in this order."""

    forms: Mapping[str, Form]
    """Of all gradients, also those of other shards."""
    pieces: tuple[Piece, ...]

    def offsets(self) -> list[int]:
        """Byte at which each piece begins in the shard."""
        found, at = [], 0
        for piece in self.pieces:
            found.append(at)
            at += piece.elements * DTYPE_BYTES[self.forms[piece.name][0]]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return sum(piece.elements * DTYPE_BYTES[self.forms[piece.name][0]] for piece in self.pieces)


def whole(forms: Mapping[str, Form]) -> ShardPlan:
    """One process wants everything."""
    return ShardPlan(dict(forms), tuple(Piece(name, 0, math.prod(shape)) for name, (_, shape) in forms.items()))


def split_flat(forms: Mapping[str, Form], shards: int, *, multiple: int = 1) -> list[ShardPlan]:
    """All tensors laid end to end and cut into `shards` equal ranges, borders rounded to `multiple` elements: how
    ZeRO and Megatron's distributed optimizer split one buffer."""
    if shards < 1 or multiple < 1:
        raise ValueError(f"splitting gradients: got {shards} shards and multiple {multiple}, expected at least 1")
    total = sum(math.prod(shape) for _, shape in forms.values())
    step = -(-total // (shards * multiple)) * multiple
    found: list[list[Piece]] = [[] for _ in range(shards)]
    at = 0
    for name, (_, shape) in forms.items():
        start, size = 0, math.prod(shape)
        while start < size:
            owner = min((at + start) // step, shards - 1)
            stop = size if owner == shards - 1 else min(size, (owner + 1) * step - at)
            found[owner].append(Piece(name, start, stop))
            start = stop
        at += size
    return [ShardPlan(dict(forms), tuple(pieces)) for pieces in found]


def split_by_name(forms: Mapping[str, Form], owners: Mapping[str, int], shards: int) -> list[ShardPlan]:
    """Whole tensors to the process that owns each: how pipeline stages split a model."""
    found: list[list[Piece]] = [[] for _ in range(shards)]
    for name, (_, shape) in forms.items():
        found[owners[name]].append(Piece(name, 0, math.prod(shape)))
    return [ShardPlan(dict(forms), tuple(pieces)) for pieces in found]


def check_cover(forms: Mapping[str, Form], wanted: Iterable[Sequence[Piece]]) -> None:
    """MismatchError unless the pieces cover every element of `forms` exactly once."""
    doing = "planning a handover"
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for pieces in wanted:
        for piece in pieces:
            ranges[piece.name].append((piece.start, piece.stop))
    unknown = sorted(set(ranges) - set(forms))
    if unknown:
        raise MismatchError(doing, got=f"a wish for {unknown[0]}, which this gradient has not", expected="its tensors")
    for name, (_, shape) in forms.items():
        at = 0
        for start, stop in sorted(span for span in ranges[name] if span[0] != span[1]):
            if start != at or stop < start:
                what = "twice" if start < at else "by nobody"
                raise MismatchError(
                    doing, got=f"elements {min(start, at)} to {max(start, at)} of {name} wanted {what}",
                    expected="each once",
                )  # fmt: skip
            at = stop
        if at != math.prod(shape):
            raise MismatchError(
                doing, got=f"elements {at} to {math.prod(shape)} of {name} wanted by nobody", expected="each once",
                fix="Give the endpoints of all the core's processes, and the same model on both sides.",
            )  # fmt: skip
