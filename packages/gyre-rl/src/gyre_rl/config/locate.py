"""On which line of a TOML text each key stands.

The standard parser gives values without places; this scanner gives places without values, for a text the parser has
accepted. Invariant: it never fails on valid TOML, and a key that it does not list (inside an inline table) is found by
its nearest listed parent.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

_PART = r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)"""
_KEY = re.compile(rf"[ \t]*({_PART}(?:[ \t]*\.[ \t]*{_PART})*)[ \t]*=")
_HEADER = re.compile(rf"[ \t]*(\[\[?)[ \t]*({_PART}(?:[ \t]*\.[ \t]*{_PART})*)[ \t]*\]")
_TOKEN = re.compile(
    r'''"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]''', re.DOTALL
)


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of each key and table header of a valid TOML `text`, by dotted path ("sinks.0.name")."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    prefix: tuple[str, ...] = ()
    position = 0
    while position < len(text):
        header, key = _HEADER.match(text, position), _KEY.match(text, position)
        if header:
            prefix = _parts(header[2])
            if header[1] == "[[":
                name = ".".join(prefix)
                counts[name] = counts.get(name, -1) + 1
                prefix = (*prefix, str(counts[name]))
            _note(lines, text, prefix, header.start(2))
            position = _line_end(text, header.end())
        elif key:
            _note(lines, text, (*prefix, *_parts(key[1])), key.start(1))
            position = _line_end(text, key.end())
        else:
            position = _line_end(text, position)
    return lines


def _parts(key: str) -> tuple[str, ...]:
    table: Mapping[str, Any] | int = tomllib.loads(f"{key} = 0")
    parts: list[str] = []
    while isinstance(table, Mapping):
        name = next(iter(table))
        parts.append(name)
        table = table[name]
    return tuple(parts)


def _note(lines: dict[str, int], text: str, path: tuple[str, ...], position: int) -> None:
    line = text.count("\n", 0, position) + 1
    for end in range(1, len(path) + 1):
        lines.setdefault(".".join(path[:end]), line)


def _line_end(text: str, position: int) -> int:
    """The position after the newline that ends the statement going on at `position`."""
    depth = 0
    for token in _TOKEN.finditer(text, position):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        elif token[0] == "\n" and depth <= 0:
            return token.end()
    return len(text)
