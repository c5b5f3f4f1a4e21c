"""`gyre check FILE`: everything that can be known of a run before it starts.

Invariant: starts no process and writes nothing; the answer is the same that `gyre run` would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gyre_core import PluginManager

from gyre_rl.cli.console import Console
from gyre_rl.cli.offers import missing, offered_by, run_problems
from gyre_rl.cli.preflight import chat_problems, preflight
from gyre_rl.cli.rundirs import place_run
from gyre_rl.cli.sizing import memory_line, memory_problems
from gyre_rl.config import RunConfig, RunConfigError, dumps, load


def check_config(source: Path, sets: Sequence[str], console: Console, *, machine: bool, show: bool) -> None:
    """Say what the run would be; RunConfigError with every problem of the file, or of this machine."""
    config = place_run(load(source, sets))
    offered = offered_by(config, PluginManager.installed(), ask=machine)
    if problems := [*memory_problems(config), *run_problems(config, offered)]:
        raise RunConfigError(f"of {config.name!r}", problems)
    if machine:
        preflight(config, Path(config.dir or ""))
    elif problems := list(chat_problems(config)):
        raise RunConfigError(f"of {config.name!r}", problems)
    memory = memory_line(config)
    where = "on this machine" if machine else "as a file; this machine was not looked at"
    shown = dumps(config, masked=True)
    text = f"{shown}\n" if show else f"{outline(config, missing(offered))}\n"
    console.result(
        {"ok": True, "name": config.name, "memory": memory, "engine": missing(offered), "config": shown},
        f"{text}Good {where}.",
    )


def outline(config: RunConfig, engine_lacks: Sequence[str]) -> str:
    """The run in a few lines."""
    cells, rollout = config.cells, config.rollout
    executions = rollout.tasks_per_step * rollout.group_size
    lines = [
        ("run", f"{config.name}, seed {config.seed}, {config.steps} steps, into {config.dir}"),
        ("model", str(config.model_dir)),
        ("cells", f"{cells.count} on {cells.device}, {cells.train} of them begin as TRAIN; "
                  f"policy {config.scheduler.policy.name}"),
        ("memory", memory_line(config)),
        ("step", f"{rollout.tasks_per_step} tasks x {rollout.group_size} executions = {executions}; "
                 f"staleness at most {rollout.max_staleness}"),
        ("plugins", ", ".join(
            f"{kind} {choice.name}"
            for kind, choice in (
                ("tasks", config.tasks), ("engine", config.engine), ("trainer", config.trainer),
                ("harness", config.harness), ("sandbox", config.sandbox), ("launcher", config.launcher),
            )
        )),
        ("engine", "; ".join(engine_lacks)),
    ]  # fmt: skip
    return "\n".join(f"{name:>8}  {text}" for name, text in lines if text)
