"""Errors that tell what was being done, what came, what was expected, and the story of the thing concerned.

An ``EventError`` means: the event was refused and the machine is exactly as before. Holds no state.
"""

from __future__ import annotations

__all__ = [
    "BadValueError",
    "ConfigError",
    "DuplicateCommitError",
    "EventError",
    "InvalidTransitionError",
    "LateOutcomeError",
    "LogError",
    "SchedError",
    "StaleIncarnationError",
    "TimeWentBackError",
    "UnknownNameError",
]


class SchedError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(SchedError):
    """A setting has a value that cannot work."""


class LogError(SchedError):
    """An event log cannot be read or written."""


class EventError(SchedError):
    """An event was refused; nothing changed. ``story`` tells what is known about what it concerns."""

    def __init__(self, event: object, problem: str, story: str = "") -> None:
        self.event = event
        self.problem = problem
        self.story = story
        text = f"refused {event}: {problem}"
        super().__init__(text + (f"\nstory:\n{story}" if story else ""))


class UnknownNameError(EventError):
    """The event names a cell, session, execution, group or lease that does not exist (any more)."""


class StaleIncarnationError(EventError):
    """The event speaks of an earlier life of a cell. Callers drop it."""


class LateOutcomeError(EventError):
    """The outcome of a command that is no longer awaited (superseded, timed out). Callers drop it."""


class TimeWentBackError(EventError):
    """The event is older than one already handled."""


class BadValueError(EventError):
    """A number is not finite, negative where it cannot be, or contradicts what is known."""


class DuplicateCommitError(EventError):
    """A micro-batch would count twice."""


class InvalidTransitionError(EventError):
    """A cell cannot go from its state to the asked one."""
