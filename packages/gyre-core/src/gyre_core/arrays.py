"""How core speaks of arrays without importing numpy.

Invariant: core and its protocols need an array's dtype, shape and bytes and nothing else; numpy arrays and
CPU torch tensors' numpy views satisfy `Array` as they are.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """A dense array in host memory: what numpy.ndarray offers of itself."""

    @property
    def dtype(self) -> Any:
        """Element type, as numpy names it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""

    def tobytes(self) -> bytes:
        """The elements in C order."""
