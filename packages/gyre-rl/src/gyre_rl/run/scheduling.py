"""The scheduler of a run: gyre-sched's machine with the run's settings and policy, and its write-ahead log.

Invariant: the log of each life of a run is a file of its own, so that any of them can be replayed. Decides nothing.
"""

from __future__ import annotations

from gyre_core import ComponentContext, Kind, PluginManager
from gyre_sched import Policy, Scheduler
from gyre_sched.log import EventLog

from gyre_rl.config.scheduling import sched_config
from gyre_rl.config.schema import RunConfig
from gyre_rl.run.directory import RunDirectory


def make_scheduler(config: RunConfig, plugins: PluginManager, first_version: int) -> Scheduler:
    """A fresh machine that goes on with the step of number `first_version`."""
    return Scheduler(sched_config(config, first_version), make_policy(config, plugins))


def make_policy(config: RunConfig, plugins: PluginManager) -> Policy:
    """The run's policy; PluginError when no installed plugin brings it."""
    chosen = config.scheduler.policy
    context = ComponentContext(".", "scheduler", config.seed, base_dir=config.base_dir)
    policy: Policy = plugins.create(Kind.POLICY, chosen.name, chosen.options, context)
    return policy


def scheduler_log(config: RunConfig, scheduler: Scheduler, directory: RunDirectory) -> EventLog:
    """The write-ahead log of this life of the run; an earlier life's is kept under a number."""
    path = directory.scheduler_log
    if path.exists():
        number = 1
        while (old := path.with_name(f"scheduler.{number}.jsonl")).exists():
            number += 1
        path.rename(old)
    return EventLog(path, scheduler.config, policy=config.scheduler.policy.name)
