"""Argument checks that name the array, the place and the expectation.

Every public constructor of this package checks what it is given before it computes anything. The invariant: a
``ValueError`` raised here says what was being built, which array and which index is wrong, what was found and
what would have been right. Nothing is repaired silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray


def fail(doing: str, found: str, expected: str, hint: str = "") -> NoReturn:
    """Raise the ValueError of this package: what was done, what came, what was expected, what to do."""
    message = f"while {doing}: {found}; expected {expected}"
    raise ValueError(f"{message}. {hint}" if hint else message)


def field(source: object, name: str, doing: str) -> Any:
    """Read ``name`` from a mapping or from an object's attribute; a missing one is a ValueError."""
    if isinstance(source, Mapping):
        if name in source:
            return source[name]
    elif hasattr(source, name):
        return getattr(source, name)
    fail(doing, f"no array named {name!r} in {type(source).__name__}", "tree arrays with that name")


def vector(values: object, name: str, dtype: DTypeLike, doing: str, size: int | None = None) -> NDArray[Any]:
    """Return ``values`` as a contiguous 1-D array of ``dtype``; refuses lossy casts and wrong sizes."""
    array = np.asarray(values)
    if array.ndim != 1:
        fail(doing, f"{name} has shape {array.shape}", f"one dimension{'' if size is None else f' of {size}'}")
    if size is not None and array.shape[0] != size:
        fail(doing, f"{name} has {array.shape[0]} entries", f"{size}")
    target = np.dtype(dtype)
    if array.dtype != target:
        if array.size and target.kind in "iu" and array.dtype.kind not in "iub":
            fail(doing, f"{name} has dtype {array.dtype}", f"integers that fit {target}")
        cast = array.astype(target)
        if target.kind in "iu" and array.size and not np.array_equal(cast.astype(np.int64), array):
            bad = int(np.flatnonzero(cast.astype(np.int64) != array)[0])
            fail(doing, f"{name}[{bad}] = {array[bad]} does not fit {target}", f"values that fit {target}")
        array = cast
    return np.ascontiguousarray(array)


def first(mask: NDArray[np.bool_]) -> int:
    """Index of the first true element; the caller knows that there is one."""
    return int(np.flatnonzero(mask)[0])
