"""Which rollout cell serves a call: home first, then the longest known prefix, then the least load.

Bounded load: a prefix match wins only while its cell is not much fuller than the mean, and no cell gets
more calls than its slots (times ``overload``). A session leaves a full home for a free slot elsewhere if
getting its context there takes less time than about half a call. A cell that drains, or whose weights are
older than the session's group may sample from, is never chosen. Changes the prefix table only.
"""

from __future__ import annotations

from .ids import CellState
from .records import Cell, Session
from .world import World

__all__ = ["choose", "crowded", "learn_prefix", "serves", "worth_leaving"]

_LONGEST = 64


def serves(cell: Cell, session: Session) -> bool:
    """Whether ``cell`` may take calls of ``session``, if it has a slot."""
    return cell.state is CellState.ROLLOUT and cell.version >= session.version


def choose(w: World, session: Session, prefix: tuple[int, ...]) -> tuple[Cell, str] | None:
    """A cell with a free slot and the reason, or ``None`` if there is none."""
    if not w.rollout.free:
        return None
    need, overload = session.context, w.config.overload
    if prefix and w.prefixes:
        limit = _mean_load(w) * (1.0 + w.config.spread)
        for length in range(min(len(prefix), _LONGEST), 0, -1):
            order = w.prefixes.get(prefix[length - 1])
            if order is None:
                continue
            cell = w.rollout.members.get(order)
            if cell is None or not serves(cell, session) or not cell.has_slot(overload):
                continue
            if cell.load() <= limit + 1.0 / cell.slots and cell.roomy(need):
                return cell, f"holds {length} blocks of its prefix"
    version = session.version
    least = w.rollout.least(version, lambda c: c.has_slot(overload) and c.roomy(need))
    if least is None:
        least = w.rollout.least(version, lambda c: c.has_slot(overload))
    return None if least is None else (least, "least loaded")


def crowded(w: World, session: Session, home: Cell) -> bool:
    """Whether a session's next call would end sooner on the least loaded cell than at home, way there included."""
    balance, members = w.config.balance, len(w.rollout.members)
    here = home.calling + home.moves_in
    if not balance or here * members < w.calling + 2 * members:
        return False
    other = w.rollout.least(session.version, lambda c: c.roomy(session.context))
    if other is None or other is home:
        return False
    gain = balance * w.call_s * (here - other.calling - other.moves_in - 1) / (here + 1)
    return gain > _way_s(w, session.context)


def _way_s(w: World, tokens: int) -> float:
    """Seconds until a context of ``tokens`` is on another cell."""
    fill = w.costs.prefill_seconds(tokens)
    return min(fill, w.costs.move_seconds(tokens)) if w.config.carry_kv else fill


def worth_leaving(w: World, session: Session) -> bool:
    """Whether getting a session's context to another cell is quicker than waiting for a slot at its full
    home.
    """
    return _way_s(w, session.context) < 0.5 * w.call_s


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
