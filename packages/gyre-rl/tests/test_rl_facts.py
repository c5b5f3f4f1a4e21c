"""A cell whose trainer has made another model of the folder than the engine will does not come up for training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from gyre_core import EngineCapability, InfrastructureError, ModelFacts, Role, WeightSource
from gyre_core.agreement import facts_at
from gyre_core.ranks import Entry
from gyre_core.ranks.tensorfile import create
from gyre_rl.cell.host import CellHost
from gyre_rl.cell.messages import CellBody
from gyre_rl.procs.child import ChildSpec


class Engine:
    capabilities: frozenset[EngineCapability] = frozenset()


class Trainer:
    version = 0

    def __init__(self, facts: ModelFacts | None) -> None:
        self.facts = facts
        self.holds = False

    async def start(self, source: WeightSource, *, core: bool) -> None:
        self.holds = True

    async def offload(self) -> None:
        self.holds = False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["X"], "vocab_size": 31, "rope_theta": 5e5, "num_experts": 2})
    )
    create(tmp_path / "model.safetensors", [Entry("lm_head.weight", "BF16", (31, 4))])
    return tmp_path


async def enter(folder: Path, trainer: Trainer, kind: str = "disk") -> Role | None:
    source = WeightSource(0, str(folder), kind)
    body = CellBody(Role.TRAIN, True, source, "e", "t", replays_experts=True)
    spec = ChildSpec("m:f", "cell-0", 1, "http://x", "token", ".")
    host = CellHost(spec, body, Engine(), trainer)  # type: ignore[arg-type]
    await host._enter(Role.TRAIN, source)
    return host.role


async def test_a_trainer_of_the_same_model_is_let_in(folder: Path) -> None:
    same = dataclasses.replace(facts_at(folder), router_replay=True)
    let_in = Trainer(same)
    assert await enter(folder, let_in) is Role.TRAIN
    assert let_in.holds
    assert await enter(folder, Trainer(None)) is Role.TRAIN
    assert await enter(folder, Trainer(dataclasses.replace(same, parameters=1)), "delta") is Role.TRAIN


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parameters": 123}, "parameters 123"),
        ({"rope": {"rope_type": "default", "rope_theta": 1e4}}, "rope"),
        ({"router_replay": False}, "router replay"),
    ],
)
async def test_another_model_is_refused_by_the_fact(folder: Path, change: dict[str, Any], named: str) -> None:
    same = dataclasses.replace(facts_at(folder), router_replay=True)
    refused = Trainer(dataclasses.replace(same, **change))
    with pytest.raises(InfrastructureError, match=named):
        await enter(folder, refused)
    assert not refused.holds, "the engine that the cell goes back to needs the memory"
