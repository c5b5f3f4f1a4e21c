"""Events of a run on their way to the log, the sinks and whoever looks on.

Invariant: an event is in the log before anybody else hears of it, in the order in which things happened. A sink that
fails is dropped with a notice; a log that cannot be written (disk full) stops the run with a clear error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from gyre_core import EventSink, InfrastructureError

from gyre_rl.views.events import Event, Notice, encode
from gyre_rl.views.log import cut_torn_tail

log = logging.getLogger("gyre.run")


class EventBus:
    """Writes and hands on events."""

    def __init__(self, path: Path, sinks: Sequence[EventSink]) -> None:
        self._path, self._sinks = path, list(sinks)
        cut_torn_tail(path)
        self._file = path.open("ab", buffering=0)

    def emit(self, event: Event) -> None:
        """Log and hand on; raises InfrastructureError when the log cannot be written."""
        record = event.at(time.time())
        try:
            self._write(encode(record) + b"\n")
        except OSError as error:
            raise InfrastructureError(
                f"writing the event log {self._path}",
                got=error.strerror or str(error),
                expected="room on the disk",
                fix="Free some space, then `gyre resume` the run.",
            ) from error
        for sink in list(self._sinks):
            try:
                sink.emit(record)
            except Exception:  # boundary: a broken sink must not stop the run
                log.exception("an event sink failed and is dropped")
                self._sinks.remove(sink)

    def _write(self, line: bytes) -> None:
        """All of it: an unbuffered file may take only a part of a line when the disk is nearly full."""
        while line:
            line = line[self._file.write(line) :]

    def notice(self, text: str, level: str = "warning") -> None:
        """Tell a person."""
        self.emit(Notice(text, level))

    def close(self) -> None:
        """Close log and sinks."""
        self._file.close()
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:  # boundary, as above
                log.exception("an event sink did not close")
