"""`torch.save` files as plain data, without torch and without running anything that is in them.

Such a file is a zip archive with one pickle and the bytes of its tensors. The unpickler builds containers, numbers,
text, tensors and numpy arrays (both as numpy arrays) and refuses every other class by name.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_tito.foreign.base import ForeignFileError

_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "<u2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
_PLAIN: dict[tuple[str, str], Any] = {
    **{(module, kind.__name__): kind for module in ("builtins", "__builtin__") for kind in (set, frozenset)},
    ("collections", "OrderedDict"): dict,
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): "ndarray",  # named by the functions below; nothing here makes one of it
}
_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy._core.numeric", "numpy.core.numeric")


def load(where: Path) -> Any:
    """What was saved. Error: `ForeignFileError`, it is no such file or holds other things than plain data."""
    with zipfile.ZipFile(where) as archive:
        name = next((one for one in archive.namelist() if one.endswith("data.pkl")), None)
        if name is None:
            raise ForeignFileError(f"reading {where}: no data.pkl inside; is it a torch.save file?")
        root = name.removesuffix("data.pkl")
        try:
            return _PlainUnpickler(io.BytesIO(archive.read(name)), lambda key: archive.read(f"{root}data/{key}")).load()
        except (pickle.UnpicklingError, EOFError, ValueError, KeyError, AttributeError) as error:
            if isinstance(error, ForeignFileError):
                raise
            raise ForeignFileError(f"reading {where}: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, read: Callable[[str], bytes]) -> None:
        super().__init__(file)
        self._read = read

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and name in _STORAGES:
            return name
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module in _ARRAY_MODULES and name in ("_reconstruct", "scalar", "_frombuffer"):
            return {"_reconstruct": _empty_array, "scalar": _number, "_frombuffer": _from_buffer}[name]
        if (module, name) == ("_codecs", "encode"):
            return _latin
        raise ForeignFileError(
            f"the file holds {module}.{name} objects; only lists, numbers, text, tensors and arrays are read. "
            "Save the samples with to_dict()"
        )

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        """The storage of a tensor: `("storage", kind, key, device, size)`."""
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage" or pid[1] not in _STORAGES:
            raise ForeignFileError(f"the file holds {pid!r:.60}, expected the storage of a tensor")
        values = np.frombuffer(self._read(str(pid[2])), dtype=_STORAGES[pid[1]])
        if pid[1] == "BFloat16Storage":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values


def _tensor(storage: NDArray[Any], offset: int, size: Sequence[int], stride: Sequence[int], *_: Any) -> NDArray[Any]:
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if offset < 0 or min((*size, *stride, 0)) < 0 or (0 not in size and last >= len(storage)):
        raise ForeignFileError(f"a tensor of shape {tuple(size)} does not fit its {len(storage)} stored numbers")
    steps = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), steps).copy()


def _empty_array(*_: Any) -> NDArray[Any]:
    return np.empty(0, dtype=np.uint8)


def _number(kind: np.dtype[Any], data: bytes) -> Any:
    return np.frombuffer(data, dtype=_without_objects(kind), count=1)[0].item()


def _from_buffer(data: bytes, kind: np.dtype[Any], shape: tuple[int, ...], order: Any) -> NDArray[Any]:
    return np.frombuffer(data, dtype=_without_objects(kind)).reshape(shape, order=order)


def _without_objects(kind: np.dtype[Any]) -> np.dtype[Any]:
    if kind.hasobject:
        raise ForeignFileError("the file holds an array of Python objects; only numbers are read")
    return kind


def _latin(text: str, _: str) -> bytes:
    return text.encode("latin-1")
