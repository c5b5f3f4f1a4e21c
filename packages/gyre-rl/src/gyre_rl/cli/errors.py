"""The boundary between the library's exceptions and a person at a terminal.

Invariant: an error made on purpose is printed in its four parts without a traceback and with its exit status: 2 when
the person has to change what was typed or configured, 1 when something failed. Anything else is a fault of ours and
keeps its traceback. With `--json` the same error is also the one JSON line on standard output.
"""

from __future__ import annotations

import errno
import sys
from typing import NoReturn

from gyre_core.errors import CapabilityError, ConfigError, GyreError, InfrastructureError, PluginError

from gyre_rl.cli.console import FAILED, USAGE, Console


def fail(console: Console, error: GyreError) -> NoReturn:
    """Print `error` and exit."""
    status = USAGE if isinstance(error, ConfigError | PluginError | CapabilityError) else FAILED
    console.say(render(error))
    if console.json:
        parts = {"doing": error.doing, "got": error.got, "expected": error.expected, "fix": error.fix}
        console.result({"ok": False, "error": {"type": type(error).__name__, **parts}})
    sys.exit(status)


def render(error: GyreError) -> str:
    """The four parts, a line each, aligned."""
    parts = [("error", f"{error.doing} failed"), ("got", error.got), ("expected", error.expected), ("do", error.fix)]
    return "\n".join(f"{name:>9}  {_indent(text.strip())}" for name, text in parts if text.strip())


def _indent(text: str) -> str:
    return text.replace("\n", "\n" + " " * 11)


def explain(error: BaseException) -> GyreError | None:
    """What the operating system refused, in the four parts; None for an error that it did not make."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    if isinstance(error, BaseExceptionGroup):
        found = (explain(inner) for inner in error.exceptions)
        return next((known for known in found if known is not None), None)
    for each in chain:
        if isinstance(each, GyreError):
            return each
        if isinstance(each, OSError) and each.errno in _ADVICE:
            return _from_os(each)
    return None


_ADVICE = {
    errno.ENOSPC: (
        "writing to disk",
        "room for it",
        "Free some space, or put the run on another disk with --set dir=...; a run that had begun goes on with "
        "`gyre resume DIR`.",
    ),
    errno.EDQUOT: (
        "writing to disk",
        "room within the quota",
        "Free some space, or use another disk with --set dir=...",
    ),
    errno.EROFS: (
        "writing to disk",
        "a file system that can be written to",
        "Choose another folder with --set dir=...",
    ),
    errno.EACCES: (
        "opening a file",
        "permission",
        "Change its permissions or choose another folder with --set dir=...",
    ),
    errno.EADDRINUSE: (
        "listening on a port",
        "a free one",
        "Stop the program that has it, or let the system choose with --set proxy.port=0.",
    ),
    errno.EMFILE: (
        "opening a file or a socket",
        "fewer open files than the limit",
        "Raise it with `ulimit -n 65536` in the shell that starts Gyre.",
    ),
}


def _from_os(error: OSError) -> GyreError:
    doing, expected, fix = _ADVICE[error.errno or 0]
    file = f" ({error.filename})" if error.filename else ""
    return InfrastructureError(doing, got=f"{error.strerror}{file}", expected=expected, fix=fix)
