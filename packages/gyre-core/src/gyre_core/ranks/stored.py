"""Under which names files hold a transformers parameter: its own, or, of stacked experts, one for each.

transformers keeps the experts of a layer in one parameter where the files of most families name every expert.
Invariant: the parts of a parameter are contiguous, in order, and tile it. Not here: tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from gyre_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stored:
    """Elements `start` to `stop` of the flattened parameter are the tensor `name` of this shape."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One beyond its last element."""
        return self.start + prod(self.shape)


def stored_as(name: str, shape: Sequence[int], there: Collection[str]) -> list[Stored]:
    """The parts of a parameter in files that have the tensors `there`; ConfigError when stacked experts are not among
    them in a known way."""
    if name in there or len(shape) != 3:
        return [Stored(name, 0, tuple(shape))]
    top, _, last = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last, ())
    count, rows, columns = shape
    each = (rows // max(1, len(parts)), columns)
    found = [f"{top}.{expert}.{part}.weight" for expert in range(count) for part in parts]
    if not parts or not all(part in there for part in found):
        raise ConfigError(
            "looking for a model's weights", got=f"no tensor {name}, and none for each of its {count} experts",
            expected="either", fix="This trainer does not know how the files of this family hold experts.",
        )  # fmt: skip
    return [Stored(part, index * prod(each), each) for index, part in enumerate(found)]
