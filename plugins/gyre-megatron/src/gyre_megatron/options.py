"""Options of the Megatron trainer; import-light.

Invariant: a combination that this adapter does not compute is refused when the options are made, or, where it depends
on the number of ranks or on the model, when the ranks start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre_core.ranks.options import RankTrainerOptions, at_least


@dataclass(frozen=True, slots=True)
class MegatronTrainerOptions(RankTrainerOptions):
    """What every trainer with ranks has, and how Megatron splits the model over them.

    The number of ranks is tensor_parallel x pipeline_parallel x data_parallel; what the first two leave is data
    parallel, and expert_parallel divides that: such ranks see different tokens and send them to where an expert is.
    """

    tensor_parallel: int = 1
    """Ranks that share each layer's heads, neurons and the vocabulary; must divide the key-value heads."""
    pipeline_parallel: int = 1
    """Ranks that share the layers; must divide their number."""
    pipeline_batches: int = 0
    """With pipeline_parallel above 1: into how many parts a micro-batch is cut to keep the stages busy; 0: twice as
    many as there are stages."""
    sequence_parallel: bool = False
    """Not offered: Megatron's own layers need TransformerEngine for it."""
    context_parallel: int = 1
    """Only 1: context parallelism needs TransformerEngine's attention, which takes no tree mask."""
    expert_parallel: int = 1
    """Data-parallel ranks that share each layer's experts; must divide their number. Not with tensor_parallel."""
    cpu_shim: bool = False
    """For tests without a GPU: rewrite, at import, the places where Megatron-Core calls torch.cuda. Never on a GPU."""

    def __post_init__(self) -> None:
        RankTrainerOptions.__post_init__(self)
        at_least(self, 1, "tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
        at_least(self, 0, "pipeline_batches")
        if self.sequence_parallel:
            raise ValueError(
                "options of MegatronTrainerOptions: sequence_parallel, expected false (Megatron-Core's own norms do "
                "not do it, and TransformerEngine's attention takes no tree mask)"
            )
        if self.context_parallel != 1:
            raise ValueError(
                f"options of MegatronTrainerOptions: context_parallel {self.context_parallel}, expected 1 (it needs "
                "TransformerEngine's attention, which takes no tree mask)"
            )
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(
                f"options of MegatronTrainerOptions: expert_parallel {self.expert_parallel} with tensor_parallel "
                f"{self.tensor_parallel}, expected one of them to be 1 (Megatron-Core trains such layers with sequence "
                "parallelism alone)"
            )
        if self.ranks and self.ranks % self.split:
            raise ValueError(
                f"options of MegatronTrainerOptions: {self.ranks} ranks, expected a multiple of tensor_parallel x "
                f"pipeline_parallel x expert_parallel = {self.split}"
            )

    def kept(self, accelerators: int, *, core: bool) -> Mapping[str, tuple[int, int, int]]:
        """For the memory estimate of `gyre check`: by kind, bytes for each weight, and over how many accelerators the
        weights that every token meets and those of experts are split. Data-parallel ranks hold the same."""
        plain = self.tensor_parallel * self.pipeline_parallel
        narrow = self.dtype == "bfloat16"
        found = {"weights": 2 if narrow else 4, "gradients": 4, "open sum": 4}
        if core:
            found |= {"moments": 8} | ({"masters": 4} if narrow else {})
        return {kind: (size, plain, self.split) for kind, size in found.items()}

    @property
    def split(self) -> int:
        """Ranks that hold every weight once or more: the least there can be."""
        return self.tensor_parallel * self.pipeline_parallel * self.expert_parallel
