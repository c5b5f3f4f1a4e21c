"""`MegatronTrainer`: the trainer protocol over ranks that run Megatron-Core.

Invariant: Megatron is imported in the ranks alone; this process needs neither it nor torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import gyre_core
import gyre_loss
import gyre_weights
from gyre_core import ComponentContext, ConfigError
from gyre_core.ranks import RankPlan, RankTrainer, package_folders
from gyre_core.ranks.places import interpreter, world_of
from gyre_weights.ranks import RankVersions

import gyre_megatron
from gyre_megatron.options import MegatronTrainerOptions

ENVIRONMENT = Path(__file__).with_name("environment.toml")


def world(options: MegatronTrainerOptions, context: ComponentContext) -> int:
    """How many ranks; ConfigError when the model's split does not divide them."""
    split = options.split
    on_cpu = context.device == "cpu"
    found = (options.ranks or split) if on_cpu else max(world_of(options.ranks, context), options.ranks)
    if found % split:
        raise ConfigError(
            "starting Megatron's ranks", got=f"{found} of them",
            expected=f"a multiple of tensor_parallel x pipeline_parallel x expert_parallel = {split}",
            fix="Change the cell's accelerators, or how the model is split.",
        )  # fmt: skip
    return found


def plan_of(options: MegatronTrainerOptions, context: ComponentContext) -> RankPlan:
    """How this cell's ranks are started."""
    if context.device == "cpu" and not options.cpu_shim:
        raise ConfigError(
            "starting Megatron's ranks", got="device cpu", expected="a GPU: Megatron-Core calls torch.cuda everywhere",
            fix="For tests without one set cpu_shim = true, which rewrites those places as they are imported.",
        )  # fmt: skip
    env = {"OMP_NUM_THREADS": str(context.threads), "HF_HUB_OFFLINE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    if context.device == "cpu":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return RankPlan(
        name=f"megatron-{context.name}".replace("/", "_"),
        python=interpreter("megatron", ENVIRONMENT, options.python, context.base_dir),
        module="gyre_megatron.rank",
        world=world(options, context),
        body={
            "options": asdict(options), "device": context.device, "threads": context.threads, "seed": context.seed,
        },
        log_folder=Path(context.run_dir) / "ranks",
        packages=package_folders(gyre_core, gyre_loss, gyre_weights, gyre_megatron),
        env=env,
    )  # fmt: skip


class MegatronTrainer(RankTrainer):
    """A model on Megatron-Core, for one cell, core or satellite."""

    def __init__(self, options: MegatronTrainerOptions | None, context: ComponentContext) -> None:
        options = options or MegatronTrainerOptions()
        versions = RankVersions(options.publish, full_every=options.full_every)
        super().__init__(options, plan_of(options, context), context.device, versions)
