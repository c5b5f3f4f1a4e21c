"""What can be said without DeepSpeed: options, and what the ranks are started with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from gyre_core import ComponentContext, ConfigError, Kind
from gyre_core.environments import read_spec
from gyre_deepspeed.options import DeepSpeedTrainerOptions
from gyre_deepspeed.plugin import gyre_register
from gyre_deepspeed.trainer import ENVIRONMENT, plan_of


@pytest.mark.parametrize(
    "told",
    [
        {"stage": 0},
        {"stage": 1, "dtype": "bfloat16"},
        {"offload_parameters": True},
        {"bucket_elements": 0},
        {"temperature": 0.0},
        {"dtype": "float64"},
        {"beta2": 1.0},
        {"offload": "sometimes"},
    ],
)
def test_options_that_cannot_work_are_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DeepSpeedTrainerOptions"):
        DeepSpeedTrainerOptions(**told)


def test_a_cell_has_one_rank_for_each_accelerator(tmp_path: Path) -> None:
    options = DeepSpeedTrainerOptions(python=sys.executable)
    assert plan_of(options, ComponentContext(str(tmp_path), "c")).world == 1
    cell = ComponentContext(str(tmp_path), "c", device="cuda:0", accelerators=8)
    plan = plan_of(options, cell)
    assert (plan.world, plan.env["DS_ACCELERATOR"]) == (8, "cuda")
    assert {path.name for path in plan.packages} == {"gyre_core", "gyre_loss", "gyre_weights", "gyre_deepspeed"}
    json.dumps(plan.body)
    with pytest.raises(ConfigError, match="16 ranks"):
        plan_of(DeepSpeedTrainerOptions(python=sys.executable, ranks=16), cell)


NARROW = {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("told", "satellite"),
    [
        (NARROW, {"weights": (2, 1), "gradients": (4, 8), "masters": (4, 8), "open sum": (4, 8)}),
        ({"stage": 1}, {"weights": (4, 1), "gradients": (4, 1), "masters": (4, 8), "open sum": (4, 8)}),
        (NARROW | {"stage": 3}, {"weights": (2, 8), "gradients": (4, 8), "masters": (4, 8), "open sum": (4, 8)}),
        ({"stage": 3}, {"weights": (4, 8), "gradients": (4, 8), "open sum": (4, 8)}),
        (NARROW | {"ranks": 4}, {"weights": (2, 1), "gradients": (4, 4), "masters": (4, 4), "open sum": (4, 4)}),
        (NARROW | {"offload_optimizer": True}, {"weights": (2, 1), "open sum": (4, 8)}),
        (NARROW | {"stage": 3, "offload_optimizer": True, "offload_parameters": True}, {"open sum": (4, 8)}),
        (
            {"stage": 3, "offload_parameters": True},
            {"gradients": (4, 8), "masters": (4, 8), "open sum": (4, 8)},
        ),
    ],
)
def test_the_memory_estimate_is_told_what_ranks_keep(told: Any, satellite: dict[str, tuple[int, int]]) -> None:
    options = DeepSpeedTrainerOptions(**told)
    expected = {kind: (size, shards, shards) for kind, (size, shards) in satellite.items()}
    assert options.kept(8, core=False) == expected
    ranks = options.ranks or 8
    moments = {} if options.offload_optimizer else {"moments": (8, ranks, ranks)}
    assert options.kept(8, core=True) == expected | moments


def test_it_is_registered_and_its_environment_is_described() -> None:
    (found,) = gyre_register()
    assert (found.kind, found.name) == (Kind.TRAINER, "deepspeed")
    assert read_spec(ENVIRONMENT).name == "deepspeed"
