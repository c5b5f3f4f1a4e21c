"""Reading a run's event log back.

Invariant: a log whose last line was cut in writing is read up to there; any other broken line is an error that says
which.
"""

from __future__ import annotations

import os
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


def cut_torn_tail(path: Path) -> int:
    """Cut a last line that was not written whole (a full disk, a kill), so that appending goes on with a whole one.

    Returns the bytes that were cut; 0 for a log that is whole or absent.
    """
    if not path.is_file():
        return 0
    with path.open("rb+") as log:
        size = log.seek(0, os.SEEK_END)
        end = size
        while end > 0:
            start = max(0, end - _CHUNK)
            log.seek(start)
            newline = log.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            log.truncate(end)
        return size - end


_CHUNK = 1 << 16
