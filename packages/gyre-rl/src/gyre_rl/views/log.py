"""Reading a run's event log back.

Invariant: a log whose last line was cut in writing is read up to there; any other broken line is an error that says
which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from gyre_core.runtime import RunEvent


def decode_lines(lines: Iterable[bytes]) -> Iterator[RunEvent]:
    """The events of a log. A last line that was cut in writing is left out; ValueError for any other broken line."""
    decoder = msgspec.json.Decoder(RunEvent)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if not line.endswith(b"\n"):
                return
            raise ValueError(f"reading an event log, line {number}: {error}") from error


def read_log(path: Path) -> list[RunEvent]:
    """All events of the JSON-lines file at `path`."""
    with path.open("rb") as lines:
        return list(decode_lines(lines))
