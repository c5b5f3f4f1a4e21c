"""How DeepSpeed's ZeRO optimizers hold a model: which flat range of which parameter this rank has, and where.

This is the one file that looks inside DeepSpeed, and it is written against 0.19.8. Public calls give whole tensors, one
at a time, by collectives; here every rank works on its own shards instead. Invariant: the pieces of all ranks tile
every parameter exactly once (padding is in none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from gyre_core.ranks import Piece
from gyre_core.ranks.stored import Stored
from torch import Tensor, nn

VERSION = "0.19.8"
Names = Mapping[int, Sequence[Stored]]
"""By a parameter's `id`, the names under which files hold it."""


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of the flattened tensor `name`; `group` and `offset` say where its master lies."""

    name: str
    start: int
    stop: int
    group: int
    offset: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    def take(self) -> Callable[[Tensor], Tensor]:
        """The range of a full tensor."""
        return lambda full: full.view(-1)[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Held:
    """A range, the parameter it is of, and where it begins in this rank's part of that."""

    range: Range
    parameter: Any
    begin: int

    def of(self, part: Tensor) -> Tensor:
        """The range in a tensor that holds this rank's part of the parameter, flat."""
        return part.reshape(-1)[self.begin : self.begin + self.range.size]


def cut(
    parameter: nn.Parameter, stored: Sequence[Stored], start: int, stop: int, group: int, offset: int
) -> Iterator[Held]:
    """Elements `start` to `stop` of a parameter, whose master lies at `offset`, by the names that files have."""
    for part in stored:
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high:
            where = Range(part.name, low - part.start, high - part.start, group, offset + low - start)
            yield Held(where, parameter, low - start)


def in_turn(held: Sequence[Held], part_of: Callable[[Any], Tensor]) -> Iterator[Tensor]:
    """Every range in this rank's part of its parameter; ranges of one parameter stand together."""
    for _, together in groupby(held, key=lambda each: id(each.parameter)):
        ranges = list(together)
        part = part_of(ranges[0].parameter)
        yield from (each.of(part) for each in ranges)


class ZeroShards(Protocol):
    """A ZeRO optimizer's shards."""

    ranges: Sequence[Range]

    def masters(self) -> Sequence[Tensor]:
        """The flat float32 master of each group, on this rank."""

    def weights(self) -> Sequence[Piece]:
        """The compute weights that this rank can write."""

    def weights_changed(self) -> None:
        """Masters from weights."""

    def reduced(self) -> Iterator[Tensor]:
        """After a backward: the reduced gradient of each of `ranges`, flat, averaged over the ranks. Made on the way,
        once for all ranges of a parameter: with offload each is a copy."""

    def set_gradients(self, flats: Sequence[Tensor]) -> None:
        """The step's gradient, as flat as the masters."""

    def clear(self) -> None:
        """Forget gradients, as if no backward had been."""


class StageTwo:
    """ZeRO 1 and 2: whole weights on every rank, flat masters sharded across parameter borders."""

    def __init__(self, optimizer: Any, stored: Names, rank: int, world: int) -> None:
        self._zero = optimizer
        self._parameters: list[nn.Parameter] = [p for group in optimizer.bit16_groups for p in group]
        self._stored, self._rank, self._world = stored, rank, world
        self._held = list(self._mapped())
        self.ranges: Sequence[Range] = [held.range for held in self._held]

    def _mapped(self) -> Iterator[Held]:
        for group, parameters in enumerate(self._zero.bit16_groups):
            for parameter in parameters:
                mapped = parameter._hp_mapping
                if mapped is not None:
                    low, high = mapped.lp_fragment_address, mapped.hp_fragment_address
                    start, stop = low.start, low.start + low.numel
                    yield from cut(parameter, self._stored[id(parameter)], start, stop, group, high.start)

    def masters(self) -> Sequence[Tensor]:
        """Flat, one a group."""
        return list(self._zero.single_partition_of_fp32_groups)

    def weights(self) -> Sequence[Piece]:
        """See `ZeroShards`."""
        return [
            Piece(
                part.name, lambda full: full, p.data.view(-1)[part.start : part.stop].view(part.shape),
                owner=index % self._world == self._rank,
            )
            for index, p in enumerate(self._parameters)
            for part in self._stored[id(p)]
        ]  # fmt: skip

    def weights_changed(self) -> None:
        """See `ZeroShards`."""
        self._zero.refresh_fp32_params()

    def reduced(self) -> Iterator[Tensor]:
        """See `ZeroShards`."""
        return in_turn(self._held, lambda p: p._hp_mapping.get_lp_grad_fragment(p._index_in_param_group))

    def set_gradients(self, flats: Sequence[Tensor]) -> None:
        """See `ZeroShards`."""
        for group, flat in enumerate(flats):
            if self._zero.cpu_offload:
                self._zero.single_partition_of_fp32_groups[group].grad.copy_(flat)
            else:
                self._zero.averaged_gradients[group] = [flat]

    def clear(self) -> None:
        """See `ZeroShards`."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero.micro_step_id = -1
        zero._offload_accumulated_param_ids = set()
        zero.reset_cpu_buffers()
        for group in range(len(zero.bit16_groups)):
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None


class StageThree:
    """ZeRO 3: each parameter cut into equal flat parts, one a rank; masters the same."""

    def __init__(self, optimizer: Any, stored: Names, rank: int, world: int) -> None:
        self._zero = optimizer
        self._held: list[Held] = []
        for group, parameters in enumerate(optimizer.fp16_groups):
            for parameter in parameters:
                part = int(parameter.partition_numel())
                _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = min(rank * part, int(parameter.ds_numel))
                stop = min(start + part, int(parameter.ds_numel))
                self._held += cut(parameter, stored[id(parameter)], start, stop, group, int(offset))
        self.ranges: Sequence[Range] = [held.range for held in self._held]

    def masters(self) -> Sequence[Tensor]:
        """Flat, one a group."""
        return list(self._zero.fp32_partitioned_groups_flat)

    def weights(self) -> Sequence[Piece]:
        """See `ZeroShards`."""
        return [
            Piece(held.range.name, held.range.take(), held.of(held.parameter.ds_tensor.data)) for held in self._held
        ]

    def weights_changed(self) -> None:
        """See `ZeroShards`."""
        for held in self._held:
            each = held.range
            master = self._zero.fp32_partitioned_groups_flat[each.group]
            master.data[each.offset : each.offset + each.size].copy_(held.of(held.parameter.ds_tensor.data))

    def reduced(self) -> Iterator[Tensor]:
        """See `ZeroShards`."""
        return in_turn(self._held, self._zero.get_local_fp32_grad_for_param)

    def set_gradients(self, flats: Sequence[Tensor]) -> None:
        """See `ZeroShards`."""
        zero = self._zero
        for group, flat in enumerate(flats):
            if zero.offload_optimizer:
                zero.fp32_partitioned_groups_flat[group].grad.copy_(flat)
            else:
                parts = [int(p.partition_numel()) for p in zero.fp16_groups[group]]
                zero.averaged_gradients[group] = list(torch.split(flat, parts))

    def clear(self) -> None:
        """See `ZeroShards`."""
        self._zero.zero_grad(set_to_none=True)
        self._zero.averaged_gradients = {}


def shards_of(stage: int, optimizer: Any, stored: Names, rank: int, world: int) -> ZeroShards:
    """The shards of an initialised engine's optimizer."""
    kind = StageThree if stage == 3 else StageTwo
    return kind(optimizer, stored, rank, world)
