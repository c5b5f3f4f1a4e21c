"""Views as event sinks: the live one on a terminal, lines of text elsewhere.

Invariant: a view takes every event without blocking and never raises; an event it cannot read becomes a line, not an
error of the run. Drawing happens a few times a second in a thread of rich's own, from an immutable state.
"""

from __future__ import annotations

import time
from typing import Protocol, TextIO

from gyre_core.runtime import RunEvent

from gyre_rl.views import events as ev
from gyre_rl.views.model import RunState, reduce
from gyre_rl.views.plain import line_of

REDRAWS_PER_S = 3


class View(Protocol):
    """An event sink that a person looks at."""

    @property
    def state(self) -> RunState:
        """The run as the view knows it."""

    def emit(self, event: RunEvent) -> None:
        """Take an event."""

    def say(self, text: str) -> None:
        """Show a sentence now."""

    def close(self) -> None:
        """Leave the terminal clean. May be called twice."""


class PlainView:
    """One line of text for each event worth one, written to `out`."""

    def __init__(self, out: TextIO) -> None:
        self.state = RunState()
        self._out = out

    def emit(self, event: RunEvent) -> None:
        """Take an event and write its line."""
        self.state = advance(self.state, event)
        line = line_of(event, self.state) if readable(event) else None
        if line is not None:
            self.say(line)

    def say(self, text: str) -> None:
        """Write a line; a closed pipe is not the run's trouble."""
        try:
            self._out.write(text + "\n")
            self._out.flush()
        except (OSError, ValueError):
            return

    def close(self) -> None:
        """Nothing is held."""


class LiveView:
    """A block at the foot of the terminal that is drawn again and again."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        from gyre_rl.views.live import render

        self.state = RunState()
        self._console = Console(file=out)
        self._live = Live(
            get_renderable=lambda: render(self.state, time.time() if self.state.ended is None else self.state.time),
            console=self._console,
            refresh_per_second=REDRAWS_PER_S,
            transient=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        self._open = True

    def emit(self, event: RunEvent) -> None:
        """Take an event; it is seen at the next drawing."""
        self.state = advance(self.state, event)

    def say(self, text: str) -> None:
        """Show a sentence above the block."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Draw for the last time and leave the cursor below."""
        if self._open:
            self._open = False
            self._live.stop()


def choose_view(out: TextIO, *, plain: bool = False) -> View:
    """The live view when `out` is a terminal, else lines of text."""
    return LiveView(out) if out.isatty() and not plain else PlainView(out)


def readable(event: RunEvent) -> bool:
    """Whether the event is one of the vocabulary, whole."""
    try:
        return ev.parse(event) is not None
    except ValueError:
        return False


def advance(state: RunState, event: RunEvent) -> RunState:
    """`reduce`, with a notice in place of an event that cannot be read."""
    try:
        return reduce(state, event)
    except ValueError as error:
        return reduce(state, ev.Notice(str(error)).at(event.time))
