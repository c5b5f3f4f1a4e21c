"""`gyre dash`: serve a run's pages until Ctrl-C.

The tokenizer that turns ids into text is the one that the run's own configuration names, where it is still there.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from gyre_core.errors import GyreError

from gyre_rl.cli.console import Console
from gyre_rl.cli.rundirs import reopen_run
from gyre_rl.cli.signals import Stopped, until_stopped
from gyre_rl.dash.server import make_dash, serve


def show_dash(run_dir: Path, host: str, port: int, console: Console) -> None:
    """Serve the run in `run_dir`."""
    model, family = tokenizer_of(run_dir)
    dash = make_dash(run_dir, model, family)

    def ready(address: str) -> None:
        console.say(f"{address}  (Ctrl-C ends it; the run does not notice)")

    with contextlib.suppress(Stopped):
        asyncio.run(until_stopped(serve(dash, host, port, ready), lambda: None))


def tokenizer_of(run_dir: Path) -> tuple[Path | None, str | None]:
    """Folder of the run's tokenizer and its chat format; None when it cannot be found any more."""
    try:
        config = reopen_run(run_dir, [])
    except GyreError:
        return None, None
    folder = config.tokenizer_dir
    return (folder, config.model.family) if folder.is_dir() else (None, None)
