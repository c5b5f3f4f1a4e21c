"""How a command talks: to a person on standard error, to a program by one JSON line on standard output.

Import-light, because every start of the command pays for it: whatever is needed only at the end is imported there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

USAGE, FAILED, STOPPED = 2, 1, 130
"""Exit statuses: change what you typed; something failed; stopped by Ctrl-C."""


@dataclass(frozen=True, slots=True)
class Console:
    """What a command was asked for: `json` one line of JSON on standard output, `debug` tracebacks."""

    json: bool = False
    debug: bool = False

    def result(self, value: object, text: str = "") -> None:
        """The command's outcome: `value` as the JSON line, or `text` for a person."""
        if self.json:
            import msgspec

            sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
        elif text:
            sys.stdout.write(text.rstrip("\n") + "\n")
        sys.stdout.flush()

    def say(self, text: str) -> None:
        """A line for a person, on standard error."""
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


@contextmanager
def reported(console: Console) -> Iterator[None]:
    """Print the errors that Gyre raises on purpose and end the process with their status; let others pass."""
    try:
        yield
    except Exception as error:
        from gyre_rl.cli.errors import explain, fail

        known = explain(error)
        if known is None or console.debug:
            raise
        fail(console, known)
