"""How one tensor differs from its base: the code of a delta.

Elements are compared as bit patterns, so that the result is exact for every dtype. What changed is coded in the
smaller of two ways: single elements (the gaps between their positions, and their bits) or whole blocks of elements
(block numbers, and their bits). Invariant: `patch(base, difference(base, new)) == new`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_weights.arrays import DTYPE_BYTES, HostTensor
from gyre_weights.digest import CHUNK, Digest
from gyre_weights.errors import CorruptError

Words: TypeAlias = npt.NDArray[Any]
BLOCK_ELEMENTS = 256


@dataclass(frozen=True, slots=True)
class Patch:
    """Changed elements of one flat tensor of `elements` elements: ascending int64 positions and their new bits."""

    dtype: str
    elements: int
    positions: npt.NDArray[np.int64]
    bits: Words
    """Unsigned integers of the element's size, [positions]."""

    def values(self) -> HostTensor:
        """The new values as a flat tensor."""
        return HostTensor(self.dtype, (len(self.bits),), np.ascontiguousarray(self.bits).view(np.uint8))


@dataclass(frozen=True, slots=True)
class Coded:
    """The parts a patch is stored as, by part name."""

    parts: dict[str, HostTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts.values())


def difference(base: HostTensor, new: HostTensor) -> tuple[Patch, str]:
    """What leads from `base` to `new`, of one dtype and size, and the digest of `new`; one pass in cache-sized
    pieces."""
    old_words, new_words = base.words(), new.words()
    step = CHUNK // DTYPE_BYTES[new.dtype]
    digest = Digest()
    places: list[npt.NDArray[np.int64]] = []
    bits: list[Words] = []
    for start in range(0, len(new_words), step):
        piece = new_words[start : start + step]
        digest.add(piece.view(np.uint8))
        at = np.flatnonzero(old_words[start : start + step] != piece)
        if len(at):
            bits.append(piece[at])
            places.append(at + start)
    if not places:
        return Patch(new.dtype, len(new_words), np.empty(0, np.int64), new_words[:0].copy()), digest.hex()
    return Patch(new.dtype, len(new_words), np.concatenate(places), np.concatenate(bits)), digest.hex()


def encode(new: HostTensor, change: Patch) -> Coded:
    """The stored parts of `change`, which leads to `new`: elements, blocks, or all of `new`, whichever is least."""
    positions = change.positions
    if not len(positions):
        return Coded({})
    width, words = DTYPE_BYTES[new.dtype], new.words()
    gaps = np.diff(positions, prepend=0)
    widest = int(gaps.max())
    if widest >= 1 << 32:
        return Coded({"full": HostTensor(new.dtype, (len(words),), new.data)})
    gap_type = np.uint8 if widest < 1 << 8 else np.uint16 if widest < 1 << 16 else np.uint32
    block_of = positions // BLOCK_ELEMENTS
    first_of_block = np.diff(block_of, prepend=-1) != 0
    by_element = len(positions) * (width + np.dtype(gap_type).itemsize)
    by_block = int(np.count_nonzero(first_of_block)) * (4 + BLOCK_ELEMENTS * width)
    if min(by_element, by_block) >= new.nbytes:
        return Coded({"full": HostTensor(new.dtype, (len(words),), new.data)})
    if by_element <= by_block:
        return Coded({"gaps": _plain(gaps.astype(gap_type)), "values": _bits(new.dtype, change.bits)})
    blocks = block_of[first_of_block]
    inside = _block_positions(blocks, len(words))
    return Coded({"blocks": _plain(blocks.astype(np.uint32)), "values": _bits(new.dtype, words[inside])})


def decode(name: str, dtype: str, elements: int, parts: dict[str, HostTensor]) -> Patch:
    """The patch that `parts` code; CorruptError when they contradict themselves or the tensor's size."""
    doing = f"decoding the delta of {name}"
    if not parts:
        return Patch(dtype, elements, np.empty(0, np.int64), np.empty(0, f"u{DTYPE_BYTES[dtype]}"))
    if set(parts) == {"full"}:
        positions = np.arange(elements, dtype=np.int64)
        bits = parts["full"].words()
    elif set(parts) == {"gaps", "values"}:
        positions = np.cumsum(parts["gaps"].numpy(), dtype=np.int64)
        bits = parts["values"].words()
    elif set(parts) == {"blocks", "values"}:
        blocks = parts["blocks"].numpy().astype(np.int64)
        positions = _block_positions(blocks, elements)
        bits = parts["values"].words()
    else:
        raise CorruptError(doing, got=f"parts {sorted(parts)}", expected="full, gaps and values, or blocks and values")
    if len(positions) != len(bits) or bits.itemsize != DTYPE_BYTES[dtype]:
        raise CorruptError(
            doing, got=f"{len(bits)} values of {bits.itemsize} bytes",
            expected=f"{len(positions)} of {DTYPE_BYTES[dtype]}",
        )  # fmt: skip
    if len(positions) and not (positions[0] >= 0 and positions[-1] < elements):
        raise CorruptError(doing, got=f"position {positions[-1]}", expected=f"positions below {elements}")
    return Patch(dtype, elements, positions, bits)


def patch(words: Words, change: Patch) -> None:
    """Write the changed elements into the flat bits of the base, in place."""
    words[change.positions] = change.bits


def _block_positions(blocks: npt.NDArray[np.int64], elements: int) -> npt.NDArray[np.int64]:
    inside = (blocks.astype(np.int64)[:, None] * BLOCK_ELEMENTS + np.arange(BLOCK_ELEMENTS)).reshape(-1)
    return inside[inside < elements]  # the last block may be short


def _plain(array: npt.NDArray[Any]) -> HostTensor:
    code = {1: "U8", 2: "U16", 4: "U32"}[array.dtype.itemsize]
    return HostTensor(code, array.shape, np.ascontiguousarray(array).view(np.uint8))


def _bits(dtype: str, words: Words) -> HostTensor:
    return HostTensor(dtype, words.shape, np.ascontiguousarray(words).view(np.uint8))
