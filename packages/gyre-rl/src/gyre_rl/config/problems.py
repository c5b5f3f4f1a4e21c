"""What is wrong with a configuration, collected so that all of it is said at once.

Invariant: a problem names the key it is about, and where that key was written if it was written anywhere.
Pure data and text; finding problems is the business of the modules that read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gyre_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct. `path` is the key ("rollout.group_size"), `where` its place ("gyre.toml:12") or ""."""

    path: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


class RunConfigError(ConfigError):
    """A run's configuration has problems; all of them are in `problems`, in the order of the file."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source, self.problems = source, tuple(problems)
        lines = "".join(f"\n  {problem}" for problem in problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"reading the configuration {source}",
            got=f"{count}{lines}",
            fix="\nCorrect the file or the --set, then look again with `gyre check`.",
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """The most similar of `known`, or "" when none is similar."""
    found = difflib.get_close_matches(name, list(known), 1, 0.6)
    return found[0] if found else ""
