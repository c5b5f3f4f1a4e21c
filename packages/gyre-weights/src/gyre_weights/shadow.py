"""The publisher's copy of the version it published last: what the next delta is against.

Invariant: its bytes are those of `version`, whose content digest is `digest`; it moves on only when a version has its
name, so a publication that failed leaves it as it was. Costs the model's bytes in host memory (in a trainer of several
processes each holds its own part's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from gyre_weights.arrays import HostTensor, Named, named_host_tensors
from gyre_weights.delta_code import Patch, patch
from gyre_weights.errors import MismatchError


class Shadow(Mapping[str, HostTensor]):
    """A private copy of a version."""

    def __init__(self, version: int, digest: str, tensors: Named) -> None:
        self.version, self.digest = version, digest
        self._tensors: dict[str, HostTensor] = {
            name: HostTensor(tensor.dtype, tensor.shape, np.array(tensor.data, copy=True))
            for name, tensor in named_host_tensors(tensors)
        }

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __getitem__(self, name: str) -> HostTensor:
        return self._tensors[name]

    def take(self, name: str, new: HostTensor) -> HostTensor:
        """The base of `new`; MismatchError when there is none of its shape and dtype."""
        base = self._tensors.get(name)
        if base is None or (base.dtype, base.shape) != (new.dtype, new.shape):
            has = "no such tensor" if base is None else f"{base.dtype} {list(base.shape)}"
            raise MismatchError(
                f"taking the difference of {name} to version {self.version}", got=f"{new.dtype} {list(new.shape)}",
                expected=f"what that version has ({has})", fix="Publish a full version.",
            )  # fmt: skip
        return base

    def advance(self, patches: Iterable[tuple[str, Patch]], version: int, digest: str) -> None:
        """Become the version that `patches` lead to."""
        for name, change in patches:
            patch(self._tensors[name].words(), change)
        self.version, self.digest = version, digest
