"""Checks that need two keys at once.

Invariant: each check is a pure function from the configuration to problems, and each problem says which key to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gyre_sched.errors import ConfigError as SchedulerRefusal

from gyre_rl.config.problems import Problem, nearest
from gyre_rl.config.scheduling import sched_config
from gyre_rl.config.schema import RunConfig


def cross_checks(config: RunConfig) -> list[Problem]:
    """Every problem between sections."""
    return [*_cells(config), *_rollout(config), *_scheduler(config), *_network(config), *_name(config)]


def _cells(config: RunConfig) -> Iterator[Problem]:
    cells = config.cells
    if cells.train > cells.count:
        yield Problem("cells.train", f"got {cells.train} of {cells.count} cells, expected at most cells.count")
    if cells.train == cells.count and cells.count > 1:
        yield Problem("cells.train", "got all cells, expected at least one that begins as ROLLOUT; lower it")


def _rollout(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.group_size == 1 and config.loss.single == "zero":
        yield Problem(
            "rollout.group_size",
            'got 1 with loss.single = "zero", so that no execution would ever train; expected 2 or more, '
            'or loss.single = "raw"',
        )
    if rollout.max_in_flight is not None and rollout.max_in_flight < rollout.group_size:
        yield Problem(
            "rollout.max_in_flight",
            f"got {rollout.max_in_flight}, expected at least the {rollout.group_size} executions of one group, "
            "which start together",
        )
    trained_at = getattr(config.trainer.options, "temperature", None)
    if trained_at is not None and trained_at != rollout.temperature:
        yield Problem(
            "trainer.temperature",
            f"got {trained_at}, expected {rollout.temperature} as in rollout.temperature: the loss must take the "
            "log-probabilities that the tokens were drawn with",
        )
    if config.eval.split == rollout.split:
        yield Problem("eval.split", f"got {rollout.split!r}, the split that is trained on; expected another one")


def _scheduler(config: RunConfig) -> Iterator[Problem]:
    try:
        sched_config(config)
    except SchedulerRefusal as refusal:
        yield Problem("scheduler", str(refusal).replace("SchedConfig.", ""))


def _network(config: RunConfig) -> Iterator[Problem]:
    if config.network.address in ("", "0.0.0.0", "::"):
        yield Problem(
            "network.address",
            f"got {config.network.address!r}, expected one address of this machine that the run's processes reach",
        )


def transport_check(config: RunConfig, brought: Iterable[str]) -> Iterator[Problem]:
    """The transport is one of gyre-kvxfer's or one that plugins brought."""
    from gyre_kvxfer.transports.choose import NAMES  # numpy: not for those who read no run's file

    known = ("auto", *NAMES, *brought)
    if config.kv.transport not in known:
        near = nearest(config.kv.transport, known)
        hint = f"; did you mean {near!r}?" if near else ""
        yield Problem("kv.transport", f"got {config.kv.transport!r}, expected one of {', '.join(known)}{hint}")


def _name(config: RunConfig) -> Iterator[Problem]:
    if config.dir is None and (not config.name or set(config.name) & set("/\\\0") or config.name in (".", "..")):
        yield Problem("name", f"got {config.name!r}, expected a name that can be a folder's, or set `dir`")
