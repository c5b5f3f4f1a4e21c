"""A numpy array that grows at its end in amortised constant time.

Invariant: views handed out before an `extend` keep their content, because filled cells are never rewritten (a full
buffer is replaced, not resized). Not thread-safe; does not shrink.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

ScalarT = TypeVar("ScalarT", bound=np.generic)


class Growable(Generic[ScalarT]):
    """One-dimensional array of `dtype` with room to grow."""

    __slots__ = ("_data", "_size")

    def __init__(self, dtype: type[ScalarT], capacity: int = 64) -> None:
        self._data: NDArray[ScalarT] = np.empty(max(capacity, 1), dtype=dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: ArrayLike) -> None:
        """Append `values` (anything numpy converts to a one-dimensional array)."""
        new = np.asarray(values, dtype=self._data.dtype)
        end = self._size + len(new)
        if end > len(self._data):
            grown = np.empty(max(end, len(self._data) + len(self._data) // 4), dtype=self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : end] = new
        self._size = end

    def append(self, value: Any) -> None:
        """Append one value."""
        self.extend((value,))

    def view(self, start: int = 0, stop: int | None = None) -> NDArray[ScalarT]:
        """A read-only view of cells start:stop; stays valid when the array grows."""
        out = self._data[start : self._size if stop is None else stop]
        out.flags.writeable = False
        return out

    def __setitem__(self, index: int, value: Any) -> None:
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} outside 0..{self._size - 1}")
        self._data[index] = value

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(f"index {index} outside 0..{self._size - 1}")
        return self._data[index]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return int(self._data.nbytes)
