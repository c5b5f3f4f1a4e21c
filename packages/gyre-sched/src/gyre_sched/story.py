"""Puts into words what happened to a cell, a session, an execution, a group or a lease, and why.

Reads the machine's notes; never changes anything. Notes are bounded, so a very long life loses its middle; the event
log holds all of it.
"""

from __future__ import annotations

from .records import Note
from .world import World

__all__ = ["render", "tell"]


def render(notes: list[Note]) -> str:
    """Notes as lines: ``[seconds] text``."""
    return "\n".join(f"  [{note[0]:.3f}] " + str(note[1]).format(*note[2:]) for note in notes)


def _cell(world: World, name: str) -> str | None:
    base, _, life = name.partition("#")
    cell = world.cells.get(base)
    if cell is None or (life and str(cell.id.incarnation) != life):
        return None
    lease = "no lease" if cell.lease is None else f"lease {cell.lease.id}"
    head = (
        f"cell {cell.id}{' (core)' if cell.core else ''}: {cell.state} since {cell.since:.3f}, weights "
        f"v{cell.version}, {len(cell.sessions)} sessions ({cell.calling} in a call), "
        f"{cell.kv_held} of {cell.kv_tokens} KV tokens, {lease}"
    )
    return head + "\n" + render(cell.notes)


def _session(world: World, name: str) -> str | None:
    session = world.sessions.get(name)
    if session is None:
        return None
    where = "on no cell" if session.home is None else f"on {session.home.id}"
    moving = f", KV on its way from {session.src.id}" if session.src is not None else ""
    head = (
        f"session {name} of execution {session.execution.id}: {session.phase} since {session.since:.3f} "
        f"{where}{moving}, context {session.context} tokens"
    )
    return head + "\n" + render(session.notes)


def _execution(world: World, name: str) -> str | None:
    execution = world.executions.get(name)
    if execution is None:
        return None
    state = "runs" if execution.running else (execution.status or "does not run")
    head = (
        f"execution {name} of group {execution.group.id}: {state}, attempt {execution.attempt}, "
        f"sessions {sorted(execution.sessions) or 'none'}"
    )
    return head + "\n" + render(execution.notes)


def _group(world: World, name: str) -> str | None:
    group = world.groups.get(name)
    if group is None:
        return None
    ended = group.size - group.unfinished
    head = f"group {name}: {group.stage}, {ended} of {group.size} ended, admitted at v{group.version}"
    if group.step >= 0:
        head += f", trains in step {group.step}"
    return head + "\n" + render(group.notes)


def _lease(world: World, name: str) -> str | None:
    number = name.removeprefix("lease ").removeprefix("lease:")
    lease = world.ledger.leases.get(int(number)) if number.isdigit() else None
    if lease is None:
        return None
    ids = ", ".join(line.batch.id for line in lease.batches)
    return f"lease {lease.id} of {lease.cell.id} on step {lease.step}: {ids}\n" + render(lease.notes)


def tell(world: World, name: str) -> str:
    """The story of whatever is called ``name`` (a lease: its number); of something that is over as well."""
    parts = [told for teller in (_cell, _session, _execution, _group, _lease) if (told := teller(world, name))]
    for kind in ("session", "execution", "group", "lease", "cell"):
        notes = world.graves.get(f"{kind} {name}")
        if notes is not None:
            parts.append(f"{kind} {name} (over)\n{render(notes)}")
    return "\n".join(parts) if parts else f"nothing is known about {name!r}"
