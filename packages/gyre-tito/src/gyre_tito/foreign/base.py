"""What the readers of foreign rollout files share: their error, JSON lines, text of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ForeignFileError(ValueError):
    """A rollout file cannot be read; the message says where and what was expected."""


def lines(where: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number, object) of every line that is not empty. Error: a line that is no JSON object."""
    with where.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ForeignFileError(f"reading {where}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ForeignFileError(f"reading {where}, line {number}: a {type(row).__name__}, expected an object")
            yield number, row


def text_of(messages: Any) -> str | None:
    """The text of a message list, or of text."""
    if isinstance(messages, list):
        return "\n".join(str(one.get("content") or "") for one in messages if isinstance(one, dict))
    return messages if isinstance(messages, str) else None
