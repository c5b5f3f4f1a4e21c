"""Where runs are kept: choosing a directory for a new one, finding an old one again.

Invariant: a new run never writes into the directory of another; the resolved configuration in a run directory is the
file `RESOLVED`, and a directory is a run's exactly when it has that file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gyre_core.errors import ConfigError
from gyre_core.plugins import PluginManager

from gyre_rl.config import Problem, RunConfig, RunConfigError, load
from gyre_rl.config.dump import masked_keys

RUNS = "runs"
RESOLVED = "config.toml"


def place_run(config: RunConfig) -> RunConfig:
    """`config` with its directory fixed as an absolute path; ConfigError when it names one that is a run's already."""
    if config.dir is not None:
        path = Path(config.dir).absolute()
        if (path / RESOLVED).exists():
            raise ConfigError(
                "choosing the run directory",
                got=f"{path}, which holds a run",
                expected="a new directory",
                fix=f"Go on with that run by `gyre resume {config.dir}`, or name another one with --set dir=...",
            )
        return dataclasses.replace(config, dir=str(path))
    base = Path(RUNS, config.name).absolute()
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return dataclasses.replace(config, dir=str(path))


def reopen_run(run_dir: Path, sets: Sequence[str], plugins: PluginManager | None = None) -> RunConfig:
    """The configuration that the run in `run_dir` was started with, `sets` laid over it."""
    file = run_dir / RESOLVED
    if not file.is_file():
        raise ConfigError(
            f"resuming the run {run_dir}",
            got=f"a folder without {RESOLVED}" if run_dir.is_dir() else "no such folder",
            expected="the directory of a run, as `gyre run` printed it",
            fix=f"Runs are under {RUNS}/ when their file does not say otherwise.",
        )
    return dataclasses.replace(load(file, sets, plugins), dir=str(run_dir.absolute()))


def require_secrets(config: RunConfig) -> None:
    """RunConfigError where a saved configuration has a mask for what was not written down."""
    if keys := masked_keys(config):
        told = "a secret that was not saved with the run; give it again with --set, or name a variable that holds it"
        raise RunConfigError(f"of {config.name!r}", [Problem(key, told) for key in keys])
