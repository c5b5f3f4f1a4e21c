"""The scheduler's own settings, made from the run's.

Invariant: a field of `[scheduler]` bears the name and the default that gyre-sched gives it (tested), and is passed on
as it is; pacing comes from `[rollout]`, where a person looks for it.
"""

from __future__ import annotations

import dataclasses

from gyre_sched import CostPriors, SchedConfig

from gyre_rl.config.schema import RunConfig


def sched_config(config: RunConfig, first_version: int = 0) -> SchedConfig:
    """What gyre-sched needs to know; raises its ConfigError for values that it refuses."""
    scheduler, rollout = config.scheduler, config.rollout
    own = {f.name: getattr(scheduler, f.name) for f in dataclasses.fields(scheduler)}
    del own["policy"]
    own["priors"] = CostPriors(**dataclasses.asdict(scheduler.priors))
    return SchedConfig(
        **own,
        first_version=first_version,
        groups_per_step=rollout.tasks_per_step,
        max_staleness=rollout.max_staleness,
        max_retries=rollout.retries,
    )
