"""What the chosen engine cannot do and what the run then does instead, and whether the trainer's objective can be made;
said before anything starts.

Invariant: makes the engine object and starts nothing. A server that runs already is asked what it can do, where this
machine is the one that will use it; elsewhere it may turn out to offer less, and the run says so when it reaches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from gyre_core import ComponentContext, Engine, EngineCapability, Kind, PluginManager

from gyre_rl.config import Problem, RunConfig, RunConfigError

WITHOUT = {
    (EngineCapability.KV_MOVE, EngineCapability.KV_HANDOVER): "a session that changes its cell prefills again there",
    (EngineCapability.SEED,): "seeds have no effect on sampling",
    (EngineCapability.PAUSE,): "it cannot be paused",
}
"""What lacking all of these capabilities means for a run."""


def make_engine(config: RunConfig, plugins: PluginManager) -> Engine:
    """The engine as a cell would make it, not started."""
    context = ComponentContext(
        ".", "check", config.seed, config.cells.device, config.cells.threads, config.cells.accelerators, config.base_dir
    )
    engine: Engine = plugins.create(Kind.ENGINE, config.engine.name, config.engine.options, context)
    return engine


def offered_by(config: RunConfig, plugins: PluginManager, *, ask: bool) -> frozenset[EngineCapability]:
    """What the engine offers; with `ask` also a server that runs already says so, if cells are on this machine."""
    engine = make_engine(config, plugins)
    look = getattr(engine, "look", None)
    if not ask or look is None or config.launcher.name != "local":
        return engine.capabilities
    told: frozenset[EngineCapability] = asyncio.run(look())
    return told


def missing(offered: Iterable[EngineCapability]) -> list[str]:
    """In words: what is not offered, with what that means."""
    has = set(offered)
    return [f"no {' or '.join(kinds)}: {meaning}" for kinds, meaning in WITHOUT.items() if not has & set(kinds)]


def require_offers(config: RunConfig, plugins: PluginManager) -> None:
    """RunConfigError where engine or objective cannot do what the run asks of them."""
    if problems := list(run_problems(config, offered_by(config, plugins, ask=True))):
        raise RunConfigError(f"of {config.name!r}", problems)


def run_problems(config: RunConfig, offered: Iterable[EngineCapability]) -> Iterator[Problem]:
    """All that is told here."""
    yield from engine_problems(config, offered)
    yield from expert_problems(config, offered)
    yield from objective_problems(config)


def engine_problems(config: RunConfig, offered: Iterable[EngineCapability]) -> Iterator[Problem]:
    """What keeps this engine from serving this run."""
    turning = config.cells.count > 1 and config.scheduler.policy.name != "static"
    if turning and EngineCapability.SLEEP not in set(offered):
        yield Problem(
            "scheduler.policy",
            f"got {config.scheduler.policy.name!r} with the engine {config.engine.name!r}, which cannot give its "
            'memory back, so that no cell can turn to TRAIN; expected "static", or an engine that can sleep',
        )


def expert_problems(config: RunConfig, offered: Iterable[EngineCapability]) -> Iterator[Problem]:
    """Experts are to be recorded by an engine that tells none, or for a trainer that would choose anew."""
    if not config.model.routed_experts:
        return
    if not getattr(config.trainer.options, "router_replay", True):
        yield Problem(
            "model.routed_experts",
            f"got true with the trainer {config.trainer.name!r}, which as it is configured does not use recorded "
            "experts again; expected one that does (deepspeed without recompute), or false",
        )
    if EngineCapability.ROUTED_EXPERTS not in set(offered):
        yield Problem(
            "model.routed_experts",
            f"got true with the engine {config.engine.name!r}, which as it is configured tells no experts; expected "
            "one that does (see its options), or false",
        )


def objective_problems(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with the objective of a trainer that takes gyre-loss's."""
    options = config.trainer.options
    if not hasattr(options, "objective") or not hasattr(options, "objective_options"):
        return
    from gyre_loss.named import make_objective  # torch: not for `gyre --help`

    try:
        make_objective(options.objective, options.objective_options)
    except ValueError as error:
        yield Problem("trainer.objective", str(error))
