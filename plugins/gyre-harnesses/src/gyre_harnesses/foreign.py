"""Where the interpreter is that has another project's package.

Invariant: an interpreter that the user names is taken as it is; otherwise this one if it has the package, otherwise the
environment that this plugin describes, if it was built. Looks only. Not here: building it, starting anything.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from gyre_core.environments import find, read_spec


def interpreter(named: str | None, package: str) -> str:
    """Path of an interpreter for `package`; this one's when nothing better is there, so that the error is its own."""
    if named is not None:
        return named
    if importlib.util.find_spec(package) is not None:
        return sys.executable
    spec = read_spec(Path(__file__).with_name("environment.toml"))
    return str(find(spec.name, spec=spec) or sys.executable)
