"""Reads the benchmark's folders: `start.md`, `test_case_count.txt`, `test_commands.json`, `test_files.json`.

Invariant: a folder that cannot be used is a ConfigError naming the file and the line; nothing is guessed. Pure but for
reading files. Not here: the hidden tests.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gyre_core import ConfigError

STATEMENT = "start.md"
_WITH_VALUE = ("-k", "-m", "--ignore", "--ignore-glob", "--deselect", "--import-mode")
"""Options of pytest that choose what runs, or how it is imported. Others are about output or need other packages."""
_VALUE_FOLLOWS = (
    *_WITH_VALUE,
    "-p",
    "-o",
    "-W",
    "-c",
    "-n",
    "-r",
    "--tb",
    "--rootdir",
    "--maxfail",
    "--cov",
    "--color",
)


@dataclass(frozen=True, slots=True)
class Project:
    """One project of the benchmark."""

    name: str
    statement: str
    """What the project shall be, in Markdown."""
    count: int
    """How many tests the benchmark counts."""
    test_files: tuple[str, ...]
    """Files and folders of the original project that are hidden."""
    targets: tuple[str, ...]
    """What pytest is given."""
    arguments: tuple[str, ...]
    """Further arguments of pytest."""
    left_out: tuple[str, ...]
    """Commands and arguments that the scorer does not carry out: installing, reports."""

    def hidden(self, path: str) -> bool:
        """Whether this path of the original project belongs to the hidden tests."""
        return any(path == entry or path.startswith(f"{entry.rstrip('/')}/") for entry in self.test_files)


def read_projects(root: Path) -> list[Project]:
    """All projects in `root`, by name; ConfigError when there is none."""
    if not root.is_dir():
        raise ConfigError(f"reading NL2RepoBench from {root}", got="no such folder", expected="the benchmark's folders")
    found = [read_project(file.parent) for file in sorted(root.glob(f"*/{STATEMENT}"))]
    if not found:
        raise ConfigError(
            f"reading NL2RepoBench from {root}", got="no project", expected=f"folders with a {STATEMENT}, one a project"
        )
    return found


def read_project(folder: Path) -> Project:
    """The project that one folder describes."""
    count_file = folder / "test_case_count.txt"
    text = _read(count_file).strip()
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"reading {count_file}:1", got=repr(text), expected="the number of tests")
    test_files = _texts(folder / "test_files.json")
    commands = _texts(folder / "test_commands.json")
    targets, arguments, left_out = split_commands(commands, folder / "test_commands.json")
    return Project(
        folder.name, _read(folder / STATEMENT), int(text), test_files, targets or test_files, arguments, left_out
    )


def split_commands(commands: Sequence[str], file: Path) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """(targets, arguments that choose tests, what is left out) of the one pytest command among `commands`."""
    left_out: list[str] = []
    runs: list[list[str]] = []
    for command in commands:
        words = shlex.split(command)
        at = next((i for i, word in enumerate(words) if word in ("pytest", "py.test")), None)
        if at is None or words[:1] == ["pip"]:
            left_out.append(command)
        else:
            runs.append(words[at + 1 :])
    if len(runs) != 1:
        raise ConfigError(
            f"reading {file}:1", got=f"{len(runs)} commands that run pytest in {list(commands)}", expected="one"
        )
    targets: list[str] = []
    arguments: list[str] = []
    words = runs[0]
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            targets.append(word.removeprefix("./").rstrip("/") or ".")
            continue
        pair = [word, words.pop(0)] if word in _VALUE_FOLLOWS and words else [word]
        chosen = word.partition("=")[0] in _WITH_VALUE or word == "--doctest-modules"
        (arguments if chosen else left_out).extend(pair)
    return tuple(targets), tuple(arguments), tuple(left_out)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"reading the NL2RepoBench project {file.parent}", got=f"no {file.name}", expected="the benchmark's folder"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"reading {file}", got=str(error), expected="UTF-8 text") from error


def _texts(file: Path) -> tuple[str, ...]:
    """A JSON list of texts."""
    try:
        found = json.loads(_read(file))
    except json.JSONDecodeError as error:
        raise ConfigError(f"reading {file}:{error.lineno}", got=error.msg, expected="a JSON list of texts") from error
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise ConfigError(f"reading {file}:1", got=f"{found!r:.100}", expected="a JSON list of texts")
    return tuple(found)
