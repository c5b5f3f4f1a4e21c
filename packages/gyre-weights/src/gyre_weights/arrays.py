"""Tensors on their way: a dtype, a shape and bytes in host memory.

numpy has no bfloat16 and an engine's worker may have no need of torch, so the currency between publisher and receiver
is `HostTensor`: raw bytes with a safetensors dtype code. Invariant: no conversion changes a bit; NaN payloads and
signed zeros survive. torch is imported only by the functions that name it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_weights.errors import MismatchError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Named: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]]"
"""Tensors by Hugging Face name: a mapping, or an iterator that makes one tensor at a time."""

DTYPE_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element by safetensors dtype code."""
_NUMPY = {
    "F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "BF16": "uint16", "F8_E4M3": "uint8", "F8_E5M2": "uint8",
}  # fmt: skip
"""numpy dtype of each code; for those numpy lacks, an unsigned integer of the same size that holds the bits."""
_FROM_NUMPY = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"} | {
    name: code for code, name in _NUMPY.items() if code not in ("BF16", "F8_E4M3", "F8_E5M2")
}
_TORCH = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
    "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostTensor:
    """One tensor in host memory; `data` may be a window of a mapped file and is not to be written."""

    dtype: str
    """safetensors code, e.g. "BF16"."""
    shape: tuple[int, ...]
    data: Bytes
    """uint8[bytes], contiguous, row-major."""

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.data.nbytes

    def words(self) -> npt.NDArray[Any]:
        """The elements' bits, flat, as unsigned integers of the element's size."""
        return self.data.view(f"u{DTYPE_BYTES[self.dtype]}")

    def numpy(self) -> npt.NDArray[Any]:
        """A view of shape `shape`; bfloat16 and float8 come as unsigned integers holding the bits."""
        return self.data.view(_NUMPY[self.dtype]).reshape(self.shape)

    def torch(self) -> Any:
        """A CPU torch tensor over the same memory."""
        import torch

        dtype = torch_dtype(self.dtype)
        if not self.nbytes:
            return torch.empty(self.shape, dtype=dtype)
        return torch.from_numpy(self.data).view(dtype).reshape(self.shape)


def host_tensor(name: str, value: Any) -> HostTensor:
    """`value` (HostTensor, torch tensor of any device, numpy array) as a HostTensor; copies only from a device or
    when it is not contiguous. MismatchError for a dtype that safetensors does not know."""
    if isinstance(value, HostTensor):
        return value
    if is_torch(value):
        import torch

        code = torch_code(name, value.dtype)
        plain = value.detach().to("cpu").contiguous()
        return HostTensor(code, tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy())
    array = np.asarray(value)
    code = _code(name, _FROM_NUMPY, array.dtype.name)
    return HostTensor(code, array.shape, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def is_torch(value: Any) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def torch_code(name: str, dtype: Any) -> str:
    """safetensors code of a torch dtype."""
    return _code(name, {torch_name: code for code, torch_name in _TORCH.items()}, str(dtype).removeprefix("torch."))


def torch_dtype(code: str) -> Any:
    """torch dtype of a safetensors code."""
    import torch

    return getattr(torch, _TORCH[code])


def _code(name: str, table: Mapping[str, str], dtype: str) -> str:
    found = table.get(dtype)
    if found is None:
        raise MismatchError(f"taking tensor {name}", got=f"dtype {dtype}", expected=f"one of {', '.join(table)}")
    return found


def named_host_tensors(tensors: Named) -> Iterator[tuple[str, HostTensor]]:
    """Name and HostTensor of each, one at a time; MismatchError when a name comes twice."""
    seen: set[str] = set()
    for name, value in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in seen:
            raise MismatchError("taking tensors", got=f"{name} twice", expected="each name once")
        seen.add(name)
        yield name, host_tensor(name, value)
