"""Options of the scorers: limits that hold for every task; what a task checks is in its `ScorerSpec.options`.

Invariant: defaults give a usable scorer. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class PytestOptions:
    """Scorer `pytest`."""

    python: str = "python3"
    """Interpreter in the sandbox, 3.10 or later; it needs no pytest."""
    timeout_s: float = 900.0
    """Of a whole suite that names none."""
    test_timeout_s: float = 60.0
    """Of one test of a suite that names none."""
    setup_s: float = 600.0
    """Of copying the workspace, and of each set-up line."""
    output_bytes: int = 1 << 24
    """Of signed results."""
    most_runs: int = 12
    """How often a suite is run again because a test ended its process."""


@dataclass(frozen=True, slots=True)
class RubricOptions:
    """Scorer `rubric`: the judge."""

    base_url: str = ""
    """Ends in /v1. Needed."""
    model: str = "judge"
    api_key: str = field(default="", repr=False)
    """It is masked where the configuration is shown or saved; better name a variable of the environment."""
    api_key_env: str = ""
    """Variable of the environment that holds the key."""
    max_tokens: int = 512
    timeout_s: float = 120.0
    """Of one question."""
    tries: int = 3
    """How often a criterion is asked for a readable verdict; after that judging has failed, which is no zero."""
    retry_first_s: float = 1.0
    """Pause after a try that got no answer (no connection, HTTP 5xx or 429); it doubles with each."""
    concurrent: int = 8
    """Questions under way at a time."""
    file_bytes: int = 1 << 16
    """Of each file that are shown."""
    extra_body: Mapping[str, object] = field(default_factory=dict)
    """Added to each request."""


@dataclass(frozen=True, slots=True)
class CompositeOptions:
    """Scorer `composite`: the options of the scorers it composes, a table for each."""

    files: FilesOptions = FilesOptions()
    commands: CommandsOptions = CommandsOptions()
    pytest: PytestOptions = PytestOptions()
    rubric: RubricOptions = field(default_factory=RubricOptions)
    others: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Of scorers that other plugins bring, by name."""
