"""How DeepSpeed's ZeRO optimizers hold a model: which flat range of which parameter this rank has, and where.

This is the one file that looks inside DeepSpeed, and it is written against 0.19.8. Public calls give whole tensors, one
at a time, by collectives; here every rank works on its own shards instead. Invariant: the pieces of all ranks tile
every parameter exactly once (padding is in none).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from gyre_core.ranks import Piece
from torch import Tensor, nn

VERSION = "0.19.8"


@dataclass(frozen=True, slots=True)
class Range:
    """Elements `start` to `stop` of the flattened parameter `name`; `group` and `offset` say where its master lies."""

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


class ZeroShards(Protocol):
    """A ZeRO optimizer's shards."""

    ranges: Sequence[Range]

    def masters(self) -> Sequence[Tensor]:
        """The flat float32 master of each group, on this rank."""

    def weights(self) -> Sequence[Piece]:
        """The compute weights that this rank can write."""

    def weights_changed(self) -> None:
        """Masters from weights."""

    def gradient_of(self, index: int) -> Tensor:
        """After a backward: the reduced gradient of `ranges[index]`, flat, averaged over the ranks."""

    def set_gradients(self, flats: Sequence[Tensor]) -> None:
        """The step's gradient, as flat as the masters."""

    def clear(self) -> None:
        """Forget gradients, as if no backward had been."""


class StageTwo:
    """ZeRO 1 and 2: whole weights on every rank, flat masters sharded across parameter borders."""

    def __init__(self, optimizer: Any, names: Mapping[int, str], rank: int, world: int) -> None:
        self._zero = optimizer
        self._parameters: list[nn.Parameter] = [p for group in optimizer.bit16_groups for p in group]
        self._names, self._rank, self._world = names, rank, world
        found = list(self._mapped())
        self.ranges: Sequence[Range] = [each for each, _ in found]
        self._holders = [holder for _, holder in found]

    def _mapped(self) -> Iterator[tuple[Range, nn.Parameter]]:
        for group, parameters in enumerate(self._zero.bit16_groups):
            for parameter in parameters:
                held = parameter._hp_mapping
                if held is not None:
                    low, high = held.lp_fragment_address, held.hp_fragment_address
                    name = self._names[id(parameter)]
                    yield Range(name, low.start, low.start + low.numel, group, high.start), parameter

    def masters(self) -> Sequence[Tensor]:
        """Flat, one a group."""
        return list(self._zero.single_partition_of_fp32_groups)

    def weights(self) -> Sequence[Piece]:
        """See `ZeroShards`."""
        return [
            Piece(self._names[id(p)], lambda full: full, p.data, owner=index % self._world == self._rank)
            for index, p in enumerate(self._parameters)
        ]

    def weights_changed(self) -> None:
        """See `ZeroShards`."""
        self._zero.refresh_fp32_params()

    def gradient_of(self, index: int) -> Tensor:
        """See `ZeroShards`."""
        parameter: Any = self._holders[index]
        fragment: Tensor = parameter._hp_mapping.get_lp_grad_fragment(parameter._index_in_param_group)
        return fragment.reshape(-1)

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

    def __init__(self, optimizer: Any, names: Mapping[int, str], rank: int, world: int) -> None:
        self._zero = optimizer
        ranges: list[Range] = []
        self._holders: list[Any] = []
        for group, parameters in enumerate(optimizer.fp16_groups):
            for parameter in parameters:
                part = int(parameter.partition_numel())
                _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
                start = min(rank * part, int(parameter.ds_numel))
                stop = min(start + part, int(parameter.ds_numel))
                if start < stop:
                    ranges.append(Range(names[id(parameter)], start, stop, group, int(offset)))
                    self._holders.append(parameter)
        self.ranges: Sequence[Range] = ranges

    def masters(self) -> Sequence[Tensor]:
        """Flat, one a group."""
        return list(self._zero.fp32_partitioned_groups_flat)

    def weights(self) -> Sequence[Piece]:
        """See `ZeroShards`."""
        return [
            Piece(each.name, each.take(), holder.ds_tensor.data.view(-1)[: each.size])
            for each, holder in zip(self.ranges, self._holders, strict=True)
        ]

    def weights_changed(self) -> None:
        """See `ZeroShards`."""
        for each, holder in zip(self.ranges, self._holders, strict=True):
            master = self._zero.fp32_partitioned_groups_flat[each.group]
            master.data[each.offset : each.offset + each.size].copy_(holder.ds_tensor.data.view(-1)[: each.size])

    def gradient_of(self, index: int) -> Tensor:
        """See `ZeroShards`."""
        holder = self._holders[index]
        found: Tensor = self._zero.get_local_fp32_grad_for_param(holder)
        return found.reshape(-1)[: self.ranges[index].size]

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


def shards_of(stage: int, optimizer: Any, names: Mapping[int, str], rank: int, world: int) -> ZeroShards:
    """The shards of an initialised engine's optimizer; `names` by the parameter's `id`."""
    kind = StageThree if stage == 3 else StageTwo
    return kind(optimizer, names, rank, world)
