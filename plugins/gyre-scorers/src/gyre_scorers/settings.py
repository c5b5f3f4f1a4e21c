"""What this package takes from the process environment; nothing else in it reads one."""

from __future__ import annotations

import os


def variable(name: str) -> str | None:
    """The value of a variable that a configuration names; None when it is not set."""
    return os.environ.get(name)
