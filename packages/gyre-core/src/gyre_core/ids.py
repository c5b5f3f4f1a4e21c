"""Names of things that outlive a process: cells and their lives.

Invariant: a `CellId` is never used again once its cell was lost; a message that bears an older incarnation
is from a former life and must be dropped. Ids are plain tuples, so packages that do not import one another
still agree on equality and hashing.
"""

from __future__ import annotations

from typing import NamedTuple


class CellId(NamedTuple):
    """A cell in one of its lives: `name` is stable, `incarnation` (from 1) counts the lives."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"

    def next_life(self) -> CellId:
        """The id under which the cell returns after it was lost."""
        return CellId(self.name, self.incarnation + 1)


def parse_cell_id(text: str) -> CellId:
    """Read `name#incarnation`; raises ValueError with the offending text."""
    name, sep, life = text.rpartition("#")
    if not sep or not name or not life.isdigit() or int(life) < 1:
        raise ValueError(f"reading a cell id: got {text!r}, expected 'name#incarnation' such as 'cell-2#1'")
    return CellId(name, int(life))
