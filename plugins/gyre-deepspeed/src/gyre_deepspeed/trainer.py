"""`DeepSpeedTrainer`: the trainer protocol over ranks that run DeepSpeed.

Invariant: DeepSpeed is imported in the ranks alone; this process needs neither it nor torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import gyre_core
import gyre_loss
import gyre_weights
from gyre_core import ComponentContext
from gyre_core.ranks import RankPlan, RankTrainer, package_folders
from gyre_core.ranks.places import interpreter, world_of
from gyre_weights.ranks import RankVersions

import gyre_deepspeed
from gyre_deepspeed.options import DeepSpeedTrainerOptions

ENVIRONMENT = Path(__file__).with_name("environment.toml")


def plan_of(options: DeepSpeedTrainerOptions, context: ComponentContext) -> RankPlan:
    """How this cell's ranks are started."""
    kind = context.device.split(":")[0]
    env = {"DS_ACCELERATOR": kind, "OMP_NUM_THREADS": str(context.threads), "HF_HUB_OFFLINE": "1"}
    if kind == "cpu":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return RankPlan(
        name=f"deepspeed-{context.name}".replace("/", "_"),
        python=interpreter("deepspeed", ENVIRONMENT, options.python, context.base_dir),
        module="gyre_deepspeed.rank",
        world=world_of(options.ranks, context),
        body={
            "options": asdict(options), "device": context.device, "threads": context.threads, "seed": context.seed,
        },
        log_folder=Path(context.run_dir) / "ranks",
        packages=package_folders(gyre_core, gyre_loss, gyre_weights, gyre_deepspeed),
        env=env,
    )  # fmt: skip


class DeepSpeedTrainer(RankTrainer):
    """A transformers model under ZeRO, for one cell, core or satellite."""

    def __init__(self, options: DeepSpeedTrainerOptions | None, context: ComponentContext) -> None:
        options = options or DeepSpeedTrainerOptions()
        versions = RankVersions(options.publish, full_every=options.full_every)
        super().__init__(options, plan_of(options, context), context.device, versions)
