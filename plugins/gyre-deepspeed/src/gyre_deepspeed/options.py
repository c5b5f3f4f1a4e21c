"""Options of the DeepSpeed trainer; import-light.

Invariant: a combination that this adapter does not compute is refused when the options are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre_core.ranks.options import RankTrainerOptions, one_of


@dataclass(frozen=True, slots=True)
class DeepSpeedTrainerOptions(RankTrainerOptions):
    """What every trainer with ranks has, and how ZeRO shards."""

    stage: int = 2
    """1: optimizer state is sharded over the ranks; 2: gradients too; 3: weights too."""
    offload_optimizer: bool = False
    """Master weights and moments live in host memory, and the optimizer's step runs there."""
    offload_parameters: bool = False
    """Stage 3: weights live in host memory as well and come when a layer needs them."""
    bucket_elements: int = 50_000_000
    """Elements that are reduced (stage 3: also fetched ahead) together."""

    def __post_init__(self) -> None:
        RankTrainerOptions.__post_init__(self)
        one_of(self, "stage", (1, 2, 3))
        if self.bucket_elements < 1:
            raise ValueError(f"options of DeepSpeedTrainerOptions: bucket_elements is {self.bucket_elements}")
        if self.stage == 1 and self.dtype == "bfloat16":
            raise ValueError(
                "options of DeepSpeedTrainerOptions: stage 1 with bfloat16, expected stage 2 or 3 (DeepSpeed has "
                "another optimizer for it, which this adapter does not know)"
            )
        if self.offload_parameters and self.stage != 3:
            raise ValueError("options of DeepSpeedTrainerOptions: offload_parameters needs stage 3")

    def kept(self, accelerators: int, *, core: bool) -> Mapping[str, tuple[int, int, int]]:
        """For the memory estimate of `gyre check`: by kind, bytes for each weight, and over how many accelerators the
        weights that every token meets and those of experts are sharded, which is the same here. A satellite has masters
        too: ZeRO makes them with the engine, but where weights of stage 3 are float32 and do as well. What is offloaded
        is in host memory; the adapter's open sum never is."""
        ranks = self.ranks or accelerators
        own_masters = self.stage < 3 or self.dtype != "float32" or self.offload_parameters
        found: dict[str, tuple[int, int]] = {"open sum": (4, ranks)}
        if not self.offload_parameters:
            found["weights"] = (2 if self.dtype == "bfloat16" else 4, ranks if self.stage == 3 else 1)
        if not self.offload_optimizer:
            found["gradients"] = (4, ranks if self.stage > 1 else 1)
            if own_masters:
                found["masters"] = (4, ranks)
            if core:
                found["moments"] = (8, ranks)
        return {kind: (size, shards, shards) for kind, (size, shards) in found.items()}

    @property
    def router_replay(self) -> bool:
        """gyre-loss's forward uses recorded experts again, but not when a layer is computed twice."""
        return not self.recompute
