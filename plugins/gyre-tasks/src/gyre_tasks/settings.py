"""The one place that looks at the environment: where downloaded sources are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder for what can be downloaded again, as the XDG base directory specification places it."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) / "gyre" if base.startswith("/") else Path.home() / ".cache" / "gyre"
