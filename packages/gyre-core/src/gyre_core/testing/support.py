"""What the tests of several plugins need around a suite: helper modules beside tests, environments of their own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from gyre_core.environments import build, read_spec


def load_module(path: Path) -> ModuleType:
    """The Python file at `path` as a module, loaded once; tests folders are no packages and share names."""
    name = f"gyre_test_support_{path.resolve().as_posix().replace('/', '_').removesuffix('.py')}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"loading the helper module {path}: got no Python file")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]  # the next one shall meet the same error, not half a module
            raise
    return sys.modules[name]


def environment_python(description: Path, given: str | None = None) -> str:
    """The interpreter of a plugin's environment: the one given, or that of `description` (an environment.toml), which
    is built if it is not there. Who asks for these tests wants them run: a failing build is an error, not a skip."""
    return given or str(build(read_spec(description), report=lambda line: print(line, file=sys.stderr)))  # noqa: T201
