"""Options of the scorers: limits that hold for every task; what a task checks is in its `ScorerSpec.options`.

Invariant: defaults give a usable scorer. Imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FilesOptions:
    """Scorer `files`."""

    largest_bytes: int = 1 << 22
    """A larger file does not pass."""


@dataclass(frozen=True, slots=True)
class CommandsOptions:
    """Scorer `commands`."""

    timeout_s: float = 60.0
    """Of one command whose milestone names none."""
    output_bytes: int = 1 << 16
    """Of one command that are looked at."""


@dataclass(frozen=True, slots=True)
class CompositeOptions:
    """Scorer `composite`: the options of the scorers it composes."""

    files: FilesOptions = FilesOptions()
    commands: CommandsOptions = CommandsOptions()
