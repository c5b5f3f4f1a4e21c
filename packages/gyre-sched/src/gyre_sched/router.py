"""Which rollout cell serves a call: home first, then the longest known prefix, then the least load.

Bounded load: a prefix match wins only while its cell is not much fuller than the mean, and a session leaves an
overloaded home for a much emptier cell. A cell that drains, or whose weights are older than the session's group may
sample from, is never chosen. Changes the prefix table only.
"""

from __future__ import annotations

from .ids import CellState
from .records import Cell, Session
from .world import World

__all__ = ["better_home", "choose", "learn_prefix", "serves"]

_LONGEST = 64


def serves(cell: Cell, session: Session) -> bool:
    """Whether ``cell`` may take a call of ``session`` now."""
    return cell.state is CellState.ROLLOUT and cell.version >= session.execution.group.version


def choose(w: World, session: Session, prefix: tuple[int, ...]) -> tuple[Cell, str] | None:
    """The cell for a homeless session and the reason, or ``None`` if no cell may serve it."""
    need = session.context
    if prefix and w.prefixes:
        limit = _mean_load(w) * (1.0 + w.config.spread)
        for length in range(min(len(prefix), _LONGEST), 0, -1):
            order = w.prefixes.get(prefix[length - 1])
            if order is None:
                continue
            cell = w.rollout.members.get(order)
            if cell is None or not serves(cell, session):
                continue
            if cell.load() <= limit + 1.0 / cell.slots and cell.kv_held + need <= cell.kv_tokens:
                return cell, f"holds {length} blocks of its prefix"
    version = session.execution.group.version
    least = w.rollout.least(version, lambda c: c.kv_held + need <= c.kv_tokens)
    if least is None:
        least = w.rollout.least(version)
    return None if least is None else (least, "least loaded")


def better_home(w: World, session: Session, home: Cell) -> Cell | None:
    """A much emptier cell if ``home`` is overloaded."""
    load = home.load()
    if load <= w.config.overload:
        return None
    version, need = session.execution.group.version, session.context
    other = w.rollout.least(version, lambda c: c.kv_held + need <= c.kv_tokens, tries=4)
    if other is None or other is home or other.load() + 1.0 / other.slots > 0.75 * load:
        return None
    return other


def learn_prefix(w: World, cell: Cell, prefix: tuple[int, ...]) -> None:
    """``cell`` will hold these blocks."""
    table = w.prefixes
    for key in prefix[:_LONGEST]:
        table[key] = cell.order
        table.move_to_end(key)
    while len(table) > w.config.prefix_entries:
        table.popitem(last=False)


def _mean_load(w: World) -> float:
    if w.slots <= 0:
        return 0.0
    return max(w.homed / w.slots, w.kv_held / w.kv_tokens)
