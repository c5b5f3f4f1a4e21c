"""Where ranks run: which interpreter, on how many accelerators.

Invariant: a missing environment is found out before anything is started, with the command that makes it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from gyre_core.environments import find, read_spec
from gyre_core.errors import ConfigError
from gyre_core.registration import ComponentContext


def interpreter(library: str, description: Path, given: str, base: str) -> Path:
    """The interpreter that has `library`: the one given (relative to `base`), the environment that was built from
    `description` (an environment.toml), an older one of its name, or this one. ConfigError when there is none."""
    if given:
        path = Path(base) / given
        if not path.is_file():
            raise ConfigError(f"looking for the Python of {library}", got=str(path), expected="an interpreter")
        return path
    spec = read_spec(description)
    found = find(spec.name, spec=spec) or find(spec.name)
    if found is not None:
        return found
    if importlib.util.find_spec(library) is not None:
        return Path(sys.executable)
    raise ConfigError(
        f"looking for a Python environment with {library}", got="none",
        expected=f"the environment that {description} describes",
        fix=f"Build it with `python tools/engine_env.py {spec.name}`, or give the option `python`.",
    )  # fmt: skip


def world_of(ranks: int, context: ComponentContext) -> int:
    """How many ranks: as many as asked for, or one for each accelerator of the cell; ConfigError when it has fewer."""
    accelerators = int(getattr(context, "accelerators", 0) or context.extra.get("accelerators", 0) or 0)
    if ranks and accelerators and context.device != "cpu" and ranks > accelerators:
        raise ConfigError(
            "starting a trainer's ranks", got=f"{ranks} ranks", expected=f"at most {accelerators} in a cell of as many",
            fix="Give the cells more accelerators, or set ranks = 0.",
        )  # fmt: skip
    return ranks or (1 if context.device == "cpu" else max(1, accelerators))


def local_device(device: str, rank: int) -> str:
    """The device of a rank on its machine: all on the CPU, or each the accelerator of its number."""
    return device if device == "cpu" else f"{device.split(':')[0]}:{rank}"
