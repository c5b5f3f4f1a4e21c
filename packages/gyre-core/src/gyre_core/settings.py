"""What this package takes from the process environment; nothing else in it reads one."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where things live that can be made again: GYRE_CACHE, or `gyre` in the user's cache folder."""
    own = os.environ.get("GYRE_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gyre"


def inherited_environment() -> dict[str, str]:
    """What a process in another Python environment may inherit: all but the variables that steer this one's Python."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
