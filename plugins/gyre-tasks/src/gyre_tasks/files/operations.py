"""The operations of the family: a word of the brief, the shell command that does it, and its result.

Invariant: on every data file of the family the results of all operations and the file itself differ from one
another (`distinct`), so a milestone is earned by the right command and by no other of these. The commands are
POSIX, and their results on lower-case words do not depend on the locale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """`word` is how a brief asks for it; `command` reads standard input; `apply` is the same on lines."""

    word: str
    command: str
    apply: Callable[[Sequence[str]], list[str]]

    def shell(self, source: str, target: str) -> str:
        """The command line that does it from one file to another."""
        return f"{self.command} < {source} > {target}"

    def result(self, content: str) -> str:
        """What the target file must hold when the source holds `content`."""
        return _text(self.apply(content.splitlines()))


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


OPERATIONS: tuple[Operation, ...] = (
    Operation("order", "sort", lambda lines: sorted(lines)),
    Operation("descend", "sort -r", lambda lines: sorted(lines, reverse=True)),
    Operation("begin", "head -n 2", lambda lines: list(lines[:2])),
    Operation("end", "tail -n 2", lambda lines: list(lines[-2:])),
    Operation("count", "wc -l", lambda lines: [str(len(lines))]),
    Operation("shout", "tr a-z A-Z", lambda lines: [line.upper() for line in lines]),
)


def operation(word: str) -> Operation:
    """The operation a brief asks for by `word`; KeyError otherwise."""
    for candidate in OPERATIONS:
        if candidate.word == word:
            return candidate
    raise KeyError(word)


def distinct(content: str) -> bool:
    """Whether no operation's result equals another's or the file itself."""
    results = [content, *(op.result(content) for op in OPERATIONS)]
    return len(set(results)) == len(results)
