"""The configuration of a run: one TOML file, typed, right as a whole before anything starts.

    config = load(Path("examples/quickstart"), ["seed=1"])
    config.rollout.group_size, config.engine.name, config.engine.options

`dumps(config)` is the resolved form that is kept in the run directory; `load` reads it back to an equal object.
"""

from gyre_rl.config.dump import dumps
from gyre_rl.config.load import FILE_NAME, find_file, load, loads
from gyre_rl.config.problems import Problem, RunConfigError
from gyre_rl.config.schema import (
    CellsConfig,
    CheckpointConfig,
    EvalConfig,
    LossConfig,
    ModelConfig,
    PluginChoice,
    ProxyConfig,
    ReportConfig,
    RolloutConfig,
    RunConfig,
    SchedulerConfig,
)

__all__ = [
    "FILE_NAME",
    "CellsConfig",
    "CheckpointConfig",
    "EvalConfig",
    "LossConfig",
    "ModelConfig",
    "PluginChoice",
    "Problem",
    "ProxyConfig",
    "ReportConfig",
    "RolloutConfig",
    "RunConfig",
    "RunConfigError",
    "SchedulerConfig",
    "dumps",
    "find_file",
    "load",
    "loads",
]
