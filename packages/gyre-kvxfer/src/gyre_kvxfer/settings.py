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
