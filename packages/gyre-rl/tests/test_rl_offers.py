"""What an engine lacks is said before a run, and refused where the run could not be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from gyre_core import EngineCapability, PluginManager
from gyre_rl.cli.offers import (
    engine_problems,
    expert_problems,
    make_engine,
    missing,
    objective_problems,
    offered_by,
    require_offers,
)
from gyre_rl.config import PluginChoice, RunConfig, RunConfigError
from gyre_rl.config.schema import CellsConfig, ModelConfig, SchedulerConfig

EVERYTHING = frozenset(EngineCapability)
RUN = RunConfig("r", ModelConfig("m"), PluginChoice("files"), cells=CellsConfig(count=3))


@dataclass(frozen=True)
class TrainerOptions:
    objective: str = "ppo"
    objective_options: Mapping[str, Any] = field(default_factory=dict)


def test_what_is_offered_is_not_told() -> None:
    assert missing(EVERYTHING) == []
    ways = {EngineCapability.KV_MOVE, EngineCapability.KV_HANDOVER}
    for one in ways:
        assert missing(EVERYTHING - {one}) == []
    assert missing(EVERYTHING - ways) == [
        "no kv_move or kv_handover: a session that changes its cell prefills again there"
    ]


def test_cells_that_cannot_turn_are_refused_unless_none_shall() -> None:
    sleepless = EVERYTHING - {EngineCapability.SLEEP}
    (problem,) = engine_problems(RUN, sleepless)
    assert problem.path == "scheduler.policy"
    assert not list(engine_problems(RUN, EVERYTHING))
    assert not list(engine_problems(replace(RUN, scheduler=SchedulerConfig(policy=PluginChoice("static"))), sleepless))
    assert not list(engine_problems(replace(RUN, cells=CellsConfig(count=1)), sleepless))


def test_the_engine_is_made_and_not_started() -> None:
    engine = make_engine(RUN, PluginManager.installed())
    assert engine.version == -1
    assert EngineCapability.KV_MOVE in engine.capabilities


@pytest.mark.parametrize("name", ["vllm", "sglang"])
@pytest.mark.parametrize("options", [{}, {"url": "http://node7:8000"}], ids=["ours", "running"])
def test_servers_that_are_to_tell_experts_and_to_sleep_are_not_refused(name: str, options: dict[str, str]) -> None:
    """They are asked before there is a server."""
    pytest.importorskip(f"gyre_{name}")
    engine = PluginChoice(name, {**options, "routed_experts": True})
    config = replace(RUN, engine=engine, model=replace(RUN.model, routed_experts=True))
    offered = make_engine(config, PluginManager.installed()).capabilities
    assert not [*engine_problems(config, offered), *expert_problems(config, offered)]


class Running:
    """An engine on a server that runs already, and lacks what it was said to have."""

    capabilities = EVERYTHING

    async def look(self) -> frozenset[EngineCapability]:
        return EVERYTHING - {EngineCapability.SLEEP}


def test_a_server_that_runs_already_is_asked_by_the_machine_that_will_use_it() -> None:
    plugins: Any = SimpleNamespace(create=lambda *_: Running())
    with pytest.raises(RunConfigError, match="cannot give its memory back"):
        require_offers(RUN, plugins)
    assert EngineCapability.SLEEP not in offered_by(RUN, plugins, ask=True)
    assert EngineCapability.SLEEP in offered_by(RUN, plugins, ask=False), "`gyre check --elsewhere`"
    assert EngineCapability.SLEEP in offered_by(replace(RUN, launcher=PluginChoice("machines")), plugins, ask=True)


@dataclass(frozen=True)
class Replaying:
    router_replay: bool


def test_experts_are_recorded_by_engines_that_tell_them() -> None:
    wanted = replace(
        RUN, model=replace(RUN.model, routed_experts=True), trainer=replace(RUN.trainer, options=Replaying(True))
    )
    (problem,) = expert_problems(wanted, EVERYTHING - {EngineCapability.ROUTED_EXPERTS})
    assert problem.path == "model.routed_experts"
    assert not list(expert_problems(wanted, EVERYTHING))
    assert not list(expert_problems(RUN, frozenset()))


def test_experts_are_recorded_for_trainers_that_use_them_again() -> None:
    wanted = replace(RUN, model=replace(RUN.model, routed_experts=True))
    (problem,) = expert_problems(replace(wanted, trainer=PluginChoice("t", Replaying(False))), EVERYTHING)
    assert problem.path == "model.routed_experts"
    assert "trainer 't'" in problem.message
    stranger = PluginChoice("t", {"unknown": 1})
    assert not list(expert_problems(replace(wanted, trainer=stranger), EVERYTHING))


def test_an_objective_that_cannot_be_made_is_told_before_the_run() -> None:
    def told(**options: Any) -> list[str]:
        chosen = PluginChoice("local", TrainerOptions(**options))
        return [f"{p.path}: {p.message}" for p in objective_problems(replace(RUN, trainer=chosen))]

    assert told() == []
    assert told(objective="gspo", objective_options={"low": 3e-4, "high": 4e-4}) == []
    (wrong,) = told(objective="pppo")
    assert "Did you mean 'ppo'" in wrong
    (wrong,) = told(objective_options={"hihg": 0.3})
    assert "Did you mean 'high'" in wrong
    assert list(objective_problems(replace(RUN, trainer=PluginChoice("mine")))) == []
