"""A TOML file whose values know their line, for errors that say where.

Invariant: every error names the file and, where the key stands on a line of its own, the line; a key nobody asked
for is an error too (`Table.finish`). Not here: what the keys mean.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gyre_core import ConfigError

T = TypeVar("T")

_HEADER = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.-]+)\s*\]")
_KEY = re.compile(r"\s*([A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=")


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of each bare key and table header, by dotted path (`scorer.milestones.0.run`).

    Keys inside multi-line strings are passed over; quoted keys and inline tables are found by their parent.
    """
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix, closing = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:
            closing = "" if closing in line else closing
            continue
        header, key = _HEADER.match(line), _KEY.match(line)
        if header:
            prefix = header[2]
            if header[1] == "[[":
                counts[prefix] = counts.get(prefix, -1) + 1
                prefix = f"{prefix}.{counts[prefix]}"
            lines.setdefault(prefix, number)
        elif key:
            lines.setdefault(f"{prefix}.{key[1]}".lstrip("."), number)
            for quotes in ('"""', "'''"):
                if line.count(quotes) == 1:
                    closing = quotes
    return lines


@dataclass(slots=True)
class Table:
    """One table of a file. `take` gives a key's value and marks it as known."""

    file: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    path: str = ""
    _taken: set[str] = field(default_factory=set)

    def place(self, key: str = "") -> str:
        """`file:line` of a key, or of the nearest thing above it that has a line."""
        parts = [part for part in (self.path, key) if part]
        dotted = ".".join(parts)
        while dotted and dotted not in self.lines:
            dotted = dotted.rpartition(".")[0]
        return f"{self.file}:{self.lines[dotted]}" if dotted else str(self.file)

    def fault(self, key: str, got: str, expected: str, fix: str = "") -> ConfigError:
        """The error for a key of this table."""
        name = ".".join(part for part in (self.path, key) if part)
        return ConfigError(f"reading {self.place(key)}, key {name!r}", got=got, expected=expected, fix=fix)

    def take(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; ConfigError when it is absent without a default, or of another type."""
        self._taken.add(key)
        if key not in self.values:
            if default is None:
                raise self.fault(key, "nothing", _called(kind))
            return default
        value = self.values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(key, f"{value!r:.100}", _called(kind))
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts; empty when absent."""
        found = self.take(key, list, [])
        if not all(isinstance(each, str) for each in found):
            raise self.fault(key, f"{found!r:.100}", "a list of texts")
        return tuple(found)

    def table(self, key: str) -> Table:
        """The table below `key`."""
        return self._below(key, self.take(key, dict))

    def tables(self, key: str) -> Iterator[Table]:
        """The tables of the list below `key`."""
        for number, each in enumerate(self.take(key, list, [])):
            if not isinstance(each, dict):
                raise self.fault(key, f"{each!r:.100}", "a list of tables")
            yield self._below(f"{key}.{number}", each)

    def rest(self) -> dict[str, Any]:
        """What nobody has taken yet; now it is."""
        left = {key: value for key, value in self.values.items() if key not in self._taken}
        self._taken |= set(left)
        return left

    def finish(self) -> None:
        """ConfigError when a key was not asked for."""
        for key in self.values:
            if key not in self._taken:
                near = difflib.get_close_matches(key, self._taken, 1)
                hint = f"did you mean {near[0]!r}?" if near else ""
                raise self.fault(key, "an unknown key", f"one of {', '.join(sorted(self._taken))}", hint)

    def _below(self, key: str, values: Mapping[str, Any]) -> Table:
        return Table(self.file, values, self.lines, f"{self.path}.{key}".lstrip("."))


def read_toml(file: Path) -> Table:
    """The top table of a file; ConfigError naming file and line when it cannot be read."""
    try:
        text = file.read_text(encoding="utf-8")
        return Table(file, tomllib.loads(text), key_lines(text))
    except FileNotFoundError:
        raise ConfigError(f"reading {file}", got="no such file", expected="a TOML file that describes a task") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        line = re.search(r"at line (\d+)", str(error))
        where = f"{file}:{line[1]}" if line else str(file)
        raise ConfigError(f"reading {where}", got=str(error), expected="a TOML file") from error


def _called(kind: type) -> str:
    names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a table"}
    return names.get(kind, f"a {kind.__name__}")
