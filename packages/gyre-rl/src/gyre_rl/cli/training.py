"""`gyre run` and `gyre resume`: from a file to the ring and back to the terminal.

Invariant: nothing is started before the configuration and the machine were found good; whatever ends the run, the
terminal is left clean and the person is told where the run lies and how to go on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gyre_rl.cli.console import STOPPED, Console
from gyre_rl.cli.preflight import preflight
from gyre_rl.cli.rundirs import RESOLVED, place_run, reopen_run, require_secrets
from gyre_rl.cli.signals import Stopped, until_stopped
from gyre_rl.config import RunConfig, dumps, load
from gyre_rl.views.watch import choose_view


def start(source: Path, sets: Sequence[str], console: Console, *, plain: bool) -> None:
    """Carry out the run that `source` describes, in a new directory."""
    config = place_run(load(source, sets))
    look_ahead(config, Path(config.dir or ""))
    carry_out(config, console, resume=False, plain=plain)


def go_on(run_dir: Path, sets: Sequence[str], console: Console, *, plain: bool) -> None:
    """Go on with the run in `run_dir`."""
    config = reopen_run(run_dir, sets)
    require_secrets(config)
    look_ahead(config, run_dir)
    carry_out(config, console, resume=True, plain=plain)


def look_ahead(config: RunConfig, run_dir: Path) -> None:
    """Raise what `gyre check` would say."""
    from gyre_core import PluginManager  # and what an engine imports: not for `gyre --help`

    from gyre_rl.cli.offers import require_offers

    require_offers(config, PluginManager.installed())
    preflight(config, run_dir)


def carry_out(config: RunConfig, console: Console, *, resume: bool, plain: bool) -> None:
    """Run the ring under a view until it ends or a signal stops it."""
    from gyre_rl.ring import run

    view = choose_view(sys.stderr, plain=plain)
    run_dir = shown(Path(config.dir or ""))
    stopped = False

    def stopping() -> None:
        nonlocal stopped
        stopped = True
        view.say("Stopping in order; Ctrl-C again kills the run at once.")

    console.say(f"Run directory: {run_dir}")
    record(config)
    summary: object = {"ok": False, "stopped": True, "run_dir": str(config.dir)}
    try:
        summary = asyncio.run(until_stopped(run(config, resume=resume, view=view), stopping, config.deadline_s))
    except Stopped:
        pass
    finally:
        view.close()
        report = make_report(config)
    if report is not None:
        console.say(f"Report: {shown(report)}")
    if stopped:
        console.say(f"Stopped. Go on with:  gyre resume {run_dir}")
    console.result(summary)
    if stopped:
        sys.exit(STOPPED)


def record(config: RunConfig) -> None:
    """Keep the resolved configuration with the run, whole or not at all; its secrets are not written down."""
    target = Path(config.dir or "") / RESOLVED
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(dumps(config, masked=True), encoding="utf-8")
    draft.replace(target)


def make_report(config: RunConfig) -> Path | None:
    """The report of what there is, also after a failure; None when it is not wanted or nothing was recorded.

    A disk that is too full for it is not worth a second error.
    """
    from gyre_rl.views.report import write_report

    run_dir = Path(config.dir or "")
    if not config.report.html or not (run_dir / "events.jsonl").is_file():
        return None
    with contextlib.suppress(OSError):
        return write_report(run_dir)
    return None


def shown(path: Path) -> Path:
    """`path` from the working directory when it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
