"""What an engine lacks is said before a run, and refused where the run could not be."""

from __future__ import annotations

from dataclasses import replace

from gyre_core import EngineCapability, PluginManager
from gyre_rl.cli.offers import engine_problems, make_engine, missing
from gyre_rl.config import PluginChoice, RunConfig
from gyre_rl.config.schema import CellsConfig, ModelConfig, SchedulerConfig

EVERYTHING = frozenset(EngineCapability)
RUN = RunConfig("r", ModelConfig("m"), PluginChoice("files"), cells=CellsConfig(count=3))


def test_what_is_offered_is_not_told() -> None:
    assert missing(EVERYTHING) == []
    assert missing(EVERYTHING - {EngineCapability.KV_MOVE}) == [
        "no kv_move: a session that changes its cell prefills again there"
    ]


def test_cells_that_cannot_turn_are_refused_unless_none_shall() -> None:
    sleepless = EVERYTHING - {EngineCapability.SLEEP}
    (problem,) = engine_problems(RUN, sleepless)
    assert problem.path == "scheduler.policy"
    assert not list(engine_problems(RUN, EVERYTHING))
    assert not list(engine_problems(replace(RUN, scheduler=SchedulerConfig(policy="static")), sleepless))
    assert not list(engine_problems(replace(RUN, cells=CellsConfig(count=1)), sleepless))


def test_the_engine_is_made_and_not_started() -> None:
    engine = make_engine(RUN, PluginManager.installed())
    assert engine.version == -1
    assert EngineCapability.KV_MOVE in engine.capabilities
