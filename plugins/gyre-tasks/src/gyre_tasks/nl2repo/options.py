"""Options of the task set `nl2repo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PROMPTS = ("file", "text")


@dataclass(frozen=True, slots=True)
class Nl2RepoOptions:
    """Where the benchmark's folders are, and where the hidden tests come from."""

    path: str | None = None
    """Folder of the benchmark's project folders, relative to the run's configuration. Needed."""
    tests: str | None = None
    """Folder of hidden tests: `NAME/` laid out as the project is, or the project's source archive. None: each project's
    source distribution, fetched from the package index with pip when the tasks are listed, and kept."""
    only: tuple[str, ...] = ()
    """Names of projects; empty: all."""
    heldout: tuple[str, ...] | None = None
    """Names of projects of the split `heldout`; None: one in five, by name."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Project -> what pip is asked for, such as "Unidecode==1.4.0"; otherwise the folder's name."""
    prompt: str = "file"
    """`file`: the description lies in the workspace as start.md; `text`: it is the prompt (10 000 tokens or so)."""
    cache: str | None = None
    """Folder for fetched sources; None: below the user's cache folder."""
    python: str | None = None
    """Interpreter whose pip fetches; None: the first found that has one."""
    fetch_s: float = 600.0
    """Seconds that one fetch may take."""
    timeout_s: float = 900.0
    """Of a suite, when scored."""
    test_timeout_s: float = 60.0
    """Of one test."""
    skipped: str = "left out"
    """What a test counts as that the suite itself skips: `left out`, `passed` or `failed`."""

    def __post_init__(self) -> None:
        if self.prompt not in PROMPTS:
            raise ValueError(
                f"options of the task set 'nl2repo': prompt is {self.prompt!r}, expected one of {', '.join(PROMPTS)}"
            )
