"""The event log: every accepted event, in order, appended before anything is done about it.

JSON lines; the first names the format and the settings. A line that a crash tore is the last one and is left out.
``fsync="always"`` survives a power cut, ``"never"`` survives the process, ``"interval"`` syncs about once a second.
Knows nothing of what events mean.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from .codec import decode, encode
from .config import CostPriors, SchedConfig
from .errors import LogError
from .events import Event

__all__ = ["EventLog", "LogSink", "NoLog", "read_header", "read_log"]

FORMAT = "gyre-sched-log/1"
Fsync = Literal["always", "interval", "never"]


class LogSink(Protocol):
    """Where accepted events go."""

    def append(self, event: Event) -> None:
        """Keep ``event``; when this returns the event may be acted upon."""

    def close(self) -> None:
        """Nothing follows."""


class NoLog:
    """Keeps nothing."""

    def append(self, event: Event) -> None:
        """Forget it."""

    def close(self) -> None:
        """Nothing to do."""


class EventLog:
    """Append-only file of events. Opening an existing one goes on after its last whole line."""

    def __init__(
        self,
        path: str | Path,
        config: SchedConfig,
        *,
        policy: str = "watermark",
        fsync: Fsync = "interval",
        interval_s: float = 1.0,
    ) -> None:
        self.path = Path(path)
        self.fsync: Fsync = fsync
        self.interval_s = interval_s
        self._synced = 0.0
        fresh = not self.path.exists() or self.path.stat().st_size == 0
        if not fresh:
            _cut_torn_tail(self.path)
            fresh = self.path.stat().st_size == 0
        self._file: IO[bytes] = self.path.open("ab")
        if fresh:
            head = {"format": FORMAT, "policy": policy, "config": dataclasses.asdict(config)}
            self._write(head)
            self._sync()

    def append(self, event: Event) -> None:
        """Write one event; synced to disk according to ``fsync``."""
        self._write(encode(event))
        if self.fsync == "always" or (self.fsync == "interval" and event.time - self._synced >= self.interval_s):
            self._sync()
            self._synced = event.time

    def _write(self, data: dict[str, Any]) -> None:
        line = json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as err:
            raise LogError(
                f"cannot append to the event log {self.path}: {err.strerror}; free space or choose another place"
            ) from err

    def _sync(self) -> None:
        if self.fsync != "never":
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Sync and close."""
        if not self._file.closed:
            self._sync()
            self._file.close()


def _cut_torn_tail(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        step = 1 << 16
        keep = 0
        at = end
        while at > 0:
            start = max(0, at - step)
            file.seek(start)
            cut = file.read(at - start).rfind(b"\n")
            if cut >= 0:
                keep = start + cut + 1
                break
            at = start
        if keep != end:
            file.truncate(keep)


def read_header(path: str | Path) -> tuple[str, SchedConfig]:
    """Policy name and settings a log was written under."""
    with Path(path).open("rb") as file:
        first = file.readline()
    try:
        head = json.loads(first)
        if head["format"] != FORMAT:
            raise LogError(f"{path} has format {head['format']!r}; expected {FORMAT!r}")
        fields = dict(head["config"])
        fields["priors"] = CostPriors(**fields["priors"])
        return str(head["policy"]), SchedConfig(**fields)
    except (ValueError, KeyError, TypeError) as err:
        raise LogError(f"{path} is no event log of this package: its first line is {first[:80]!r}") from err


def read_log(path: str | Path) -> Iterator[Event]:
    """The events of a log, in order. A torn last line is left out; a broken line before it is an error."""
    read_header(path)
    with Path(path).open("rb") as file:
        file.readline()
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            try:
                data = json.loads(line)
            except ValueError as err:
                raise LogError(f"{path}, line {number} is broken: {line[:80]!r}") from err
            yield decode(data)
