"""`gyre check`, `tree` on what was recorded, and `gyre replay` of the scheduler's log.

Thin: trajectories are gyre-tito's business and the log is gyre-sched's; both have these commands under their own names
for people who use them alone. Invariant: nothing recorded is changed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gyre_core import PluginManager
from gyre_core.errors import ConfigError
from gyre_sched import POLICIES, Policy
from gyre_sched.errors import LogError
from gyre_sched.log import read_header

from gyre_rl.cli.console import Console
from gyre_rl.config import FILE_NAME, load
from gyre_rl.run.directory import RunDirectory
from gyre_rl.run.scheduling import make_policy


def is_recording(path: Path) -> bool:
    """Whether `path` is a run directory, a store or a rollout file, rather than a run's TOML file."""
    if path.is_dir():
        return not (path / FILE_NAME).is_file() and any(path.glob("*.db"))
    return path.is_file() and path.suffix != ".toml"


def tito(command: str, arguments: Sequence[str], console: Console) -> None:
    """Run one of gyre-tito's commands and exit with its status when it is not 0."""
    from gyre_tito.__main__ import main

    status = main([command, *arguments, *(["--json"] if console.json else [])])
    if status:
        sys.exit(status)


def plan(arguments: Sequence[str], console: Console) -> None:
    """Run gyre-sched's planner and exit with its status when it is not 0."""
    from gyre_sched.__main__ import main

    status = main(["plan", *arguments, *(["--json"] if console.json else [])])
    if status:
        sys.exit(status)


def _policy_of(run_dir: Path, name: str) -> Policy | None:
    """The policy of a run where a plugin brings it, made as the run made it; None for one that gyre-sched has."""
    if name in POLICIES:
        return None
    return make_policy(load(RunDirectory(run_dir).config), PluginManager.installed())


def replay_scheduler(run_dir: Path, story: str, console: Console) -> None:
    """Feed the scheduler's log to a new machine and say where it ends, or tell the story of one of its things."""
    from gyre_sched.replay import replay

    log = RunDirectory(run_dir).scheduler_log
    if not log.is_file():
        fix = "Give the directory that `gyre run` printed."
        raise ConfigError(
            f"replaying {run_dir}", got=f"no {log.name} in it", expected="the directory of a run", fix=fix
        )
    events: Counter[str] = Counter()
    commands: Counter[str] = Counter()

    def watch(event: object, answers: Sequence[object]) -> None:
        events[type(event).__name__] += 1
        commands.update(type(answer).__name__ for answer in answers)

    try:
        machine = replay(log, _policy_of(run_dir, read_header(log)[0]), watch)
    except LogError as error:
        raise ConfigError(f"replaying {log}", got=str(error)) from error
    if story:
        told = machine.story(story)
        console.result({"story": told}, told)
        return
    lines = [f"{sum(events.values())} events led to {sum(commands.values())} commands."]
    lines += [f"{n:>8}  {name}" for name, n in commands.most_common()]
    console.result({"events": dict(events), "commands": dict(commands)}, "\n".join(lines))
