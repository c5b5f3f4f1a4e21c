"""The scheduler of a run: gyre-sched's machine with the run's settings and its write-ahead log.

Invariant: the log of each life of a run is a file of its own, so that any of them can be replayed. Decides nothing.
"""

from __future__ import annotations

import difflib

from gyre_core import ConfigError
from gyre_sched import POLICIES, Scheduler
from gyre_sched.log import EventLog

from gyre_rl.config.scheduling import sched_config
from gyre_rl.config.schema import RunConfig
from gyre_rl.run.directory import RunDirectory


def make_scheduler(config: RunConfig, first_version: int) -> Scheduler:
    """A fresh machine that goes on with the step of number `first_version`."""
    name = config.scheduler.policy
    policy = POLICIES.get(name)
    if policy is None:
        near = difflib.get_close_matches(name, POLICIES, 1)
        raise ConfigError(
            "choosing the scheduling policy (scheduler.policy)",
            got=repr(name),
            expected=f"one of {', '.join(sorted(POLICIES))}",
            fix=f"Did you mean {near[0]!r}?" if near else "",
        )
    return Scheduler(sched_config(config, first_version), policy)


def scheduler_log(config: RunConfig, scheduler: Scheduler, directory: RunDirectory) -> EventLog:
    """The write-ahead log of this life of the run; an earlier life's is kept under a number."""
    path = directory.scheduler_log
    if path.exists():
        number = 1
        while (old := path.with_name(f"scheduler.{number}.jsonl")).exists():
            number += 1
        path.rename(old)
    return EventLog(path, scheduler.config, policy=config.scheduler.policy)
