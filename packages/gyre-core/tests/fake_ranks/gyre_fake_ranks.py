"""A rank without torch: vectors of the standard library, sharded flat over the ranks; `python -m gyre_fake_ranks`.

A micro-batch is JSON: {"add": 1.0} adds that to every element's gradient; {"do": "die" | "hang" | "raise" | "refuse" |
"rubbish" | "nan", "rank": 1} misbehaves in one rank; "guilty" names the executions, of e1 and e2, that are not finite.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_core import ModelFacts
from gyre_core.ranks import Computed, Entry, Piece, RankReplica, RankSeat, TensorFile, serve

SHAPES = [("a.weight", (4, 3)), ("b.weight", (5,))]


class Vector:
    """float32 numbers in somebody's memory, with the few methods of a tensor that shards need."""

    device = "cpu"

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    @classmethod
    def zeros(cls, count: int) -> Vector:
        return cls(memoryview(bytearray(4 * count)).cast("f"))

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, part: slice) -> Vector:
        return Vector(self.memory[part])

    def _each(self, found: Sequence[float]) -> Vector:
        for index, value in enumerate(found):
            self.memory[index] = value
        return self

    def copy_(self, other: Vector) -> Vector:
        assert len(self) == len(other)
        return self._each(list(other.memory))

    def add_(self, other: Vector) -> Vector:
        return self._each([x + y for x, y in zip(self.memory, other.memory, strict=True)])

    def div_(self, value: float) -> Vector:
        return self._each([x / value for x in self.memory])

    def mul_(self, value: float) -> Vector:
        return self._each([x * value for x in self.memory])

    def to(self, *ignored: Any, copy: bool = False) -> Vector:
        return Vector.zeros(len(self)).copy_(self) if copy else self

    def detach(self) -> Vector:
        return self

    double = detach

    def square(self) -> Sequence[float]:
        class Squares(list[float]):
            def sum(self) -> float:
                return math.fsum(self)

        return Squares(x * x for x in self.memory)

    def isfinite(self) -> Any:
        class Flags(list[bool]):
            def all(self) -> bool:
                return all(self)

        return Flags(math.isfinite(x) for x in self.memory)


class FakeReplica(RankReplica):
    """Plain gradient descent with a running sum of gradients for a moment."""

    def __init__(self, seat: RankSeat) -> None:
        super().__init__()
        self.seat = seat
        self.ranges: list[tuple[str, slice, int]] = []
        for name, shape in SHAPES:
            count = math.prod(shape)
            each = -(-count // seat.world)
            part = slice(min(seat.rank * each, count), min((seat.rank + 1) * each, count))
            self.ranges.append((name, part, part.stop - part.start))
        if seat.body.get("fail") == seat.rank:
            raise RuntimeError("no such accelerator")

    def _vectors(self) -> list[Vector]:
        return [Vector.zeros(size) for _, _, size in self.ranges]

    def _pieces(self, vectors: Sequence[Vector]) -> list[Piece]:
        return [
            Piece(name, lambda full, part=part: full[part], vector)
            for (name, part, _), vector in zip(self.ranges, vectors, strict=True)
        ]

    def prepare(self, folder: Path) -> None:
        pass

    def build(self, folder: Path, core: bool) -> None:
        self.w, self.sum, self.grad, self.moment = (self._vectors() for _ in range(4))
        self.square = self._vectors()

    def teardown(self) -> None:
        del self.w, self.sum, self.grad, self.moment, self.square

    def parameters(self) -> Sequence[tuple[str, tuple[int, ...]]]:
        return SHAPES

    def facts(self) -> ModelFacts:
        return ModelFacts("Fake", 17, False, 3, 4)

    def weights(self) -> Sequence[Piece]:
        return self._pieces(self.w)

    def weights_loaded(self) -> None:
        pass

    def compute(self, blob: bytes) -> Computed:
        told = json.loads(blob)
        if "add" not in told and "do" not in told:
            raise ValueError("a micro-batch without add")
        if told.get("rank", self.seat.rank) == self.seat.rank:
            self._misbehave(told.get("do"))
        for vector in self.sum:
            vector.add_(Vector.zeros(len(vector))._each([told.get("add", math.nan)] * len(vector)))
        return Computed(told.get("do") != "nan", loss=told.get("add", 0.0), trained=1, executions=("e1", "e2"))

    def finite(self, blob: bytes, execution: str) -> bool:
        return execution not in json.loads(blob).get("guilty", [])

    def _misbehave(self, what: str | None) -> None:
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(600)
        if what == "raise":
            raise MemoryError("out of memory")
        if what == "refuse":
            raise ValueError("this rank alone refuses")
        if what == "rubbish":
            os.write(int(sys.argv[1]), b"HTTP/1.1 200 OK and so on, which is no frame at all")
            time.sleep(60)

    def logprobs(self, blob: bytes) -> Sequence[float] | None:
        return [-1.0, -2.0] if self.seat.rank == self.seat.world - 1 else None

    def clear(self) -> None:
        self.sum = self._vectors()

    def reduce(self) -> Sequence[Piece]:
        return self._pieces(self.sum)

    def gradients(self) -> Sequence[Piece]:
        return self._pieces(self.grad)

    def apply(self, rate: float, steps: int) -> None:
        for w, grad, moment in zip(self.w, self.grad, self.moment, strict=True):
            moment.add_(grad)
            w.add_(grad.to(copy=True).mul_(-rate))

    def drop(self) -> None:
        pass

    def states(self) -> Mapping[str, Sequence[Piece]]:
        return {"exp_avg": self._pieces(self.moment), "exp_avg_sq": self._pieces(self.square)}

    def states_loaded(self, steps: int) -> None:
        pass

    def view(self, file: TensorFile, entry: Entry) -> Vector:
        return Vector(memoryview(file.buffer)[entry.start : entry.start + entry.size].cast("f"))


if __name__ == "__main__":
    serve(FakeReplica)
