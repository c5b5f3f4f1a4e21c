"""What must be true of the machine after every event, checked from first principles.

Slow on purpose: everything is recounted. For tests, and for doubts about a log (``replay`` with ``watch``).
"""

from __future__ import annotations

from .ids import CellState, SessionPhase
from .machine import Scheduler
from .world import World

__all__ = ["BrokenInvariantError", "check"]


class BrokenInvariantError(AssertionError):
    """The machine contradicts itself."""


def _must(truth: bool, what: str) -> None:
    if not truth:
        raise BrokenInvariantError(what)


def check(machine: Scheduler) -> None:
    """Raise ``BrokenInvariantError`` if a law of the machine is broken."""
    w = machine._w
    _cells(w)
    _sessions(w)
    _groups(w)
    _ledger(w)


def _cells(w: World) -> None:
    members = w.rollout.members
    for cell in w.cells.values():
        s = cell.state
        _must((cell.order in members) == (s is CellState.ROLLOUT), f"{cell.id} {s}: routing set")
        _must((cell.order in w.trainers) == (s is CellState.TRAIN), f"{cell.id} {s}: training set")
        moving = s in (CellState.DRAINING, CellState.FLUSHING, CellState.SWITCHING)
        _must((cell.order in w.in_transit) == moving, f"{cell.id} {s}: set of cells under way")
        _must((cell.target is not None) == moving, f"{cell.id} {s}: target {cell.target}")
        if s not in (CellState.ROLLOUT, CellState.DRAINING):
            _must(not cell.sessions and not cell.calling, f"{cell.id} is {s} and has sessions")
        if s is not CellState.LOST:
            _must(cell.moves_out == sum(x.src is cell for x in w.moves.values()), f"{cell.id}: moves out")
        if s in (CellState.SWITCHING, CellState.LOST, CellState.ROLLOUT, CellState.DRAINING):
            _must(cell.lease is None, f"{cell.id} is {s} and holds a lease")
        _must((cell.order in w.idle) == (s is CellState.TRAIN and cell.lease is None), f"{cell.id}: idle set")
        _must(cell.kv_held == sum(x.context for x in cell.sessions.values()), f"{cell.id}: KV sum")
        calling = sum(x.phase is SessionPhase.CALLING for x in cell.sessions.values())
        _must(cell.calling == calling, f"{cell.id}: {cell.calling} calls, counted {calling}")
    free = {c.order for c in members.values() if c.has_slot(w.config.overload)}
    _must(w.rollout.free == free, f"cells with a free slot: {w.rollout.free}, counted {free}")
    _must(w.slots == sum(c.slots for c in members.values()), "slots of the rollout cells")
    _must(w.kv_tokens == sum(c.kv_tokens for c in members.values()), "KV of the rollout cells")
    said = sum(c.growth_tps for c in members.values())
    _must(abs(w.reported_growth - said) < 1e-3, f"reported growth {w.reported_growth}, counted {said}")
    cores = [c.id for c in w.cells.values() if c.core and c.state is not CellState.LOST]
    _must(len(cores) <= 1, f"core cells: {cores}")


def _sessions(w: World) -> None:
    homes: dict[str, list[str]] = {}
    for cell in w.cells.values():
        for name in cell.sessions:
            homes.setdefault(name, []).append(str(cell.id))
    for session in w.sessions.values():
        where = homes.pop(session.id, [])
        home = [] if session.home is None else [str(session.home.id)]
        _must(where == home, f"session {session.id} is on {where}, believed to be on {home}")
        phase = session.phase
        _must((session.id in w.waiting) == (phase is SessionPhase.WAITING), f"{session.id}: line")
        _must((session.src is not None) == (phase is SessionPhase.MOVING), f"{session.id} {phase}: move")
        if phase is SessionPhase.CALLING:
            _must(session.home is not None, f"session {session.id} is in a call on no cell")
            if session.home is not None:
                ok = session.home.version >= session.execution.group.version
                _must(ok, f"session {session.id} samples from weights older than its group's")
        _must(session.execution.running, f"session {session.id} outlives its execution")
    _must(not homes, f"cells hold sessions that are over: {homes}")
    _must(w.calling == sum(s.phase is SessionPhase.CALLING for s in w.sessions.values()), "calls")
    _must(w.kv_held == sum(s.context for s in w.sessions.values()), "KV of all sessions")
    _must(w.homed == sum(s.home is not None for s in w.sessions.values()), "homed sessions")
    for number, session in w.moves.items():
        _must(session.move == number, f"move {number}")
    if w.waiting:
        free = [c for c in w.rollout.members.values() if c.has_slot(w.config.overload)]
        for session in w.waiting.values():
            new = session.home is None
            able = [c.id for c in free if c.version >= session.execution.group.version]
            _must(not (new and able), f"session {session.id} waits on no cell while {able} have room")


def _groups(w: World) -> None:
    led = w.ledger
    for group in w.groups.values():
        open_ends = group.size - sum(e.status is not None for e in group.executions.values())
        _must(group.unfinished == open_ends, f"group {group.id}: unfinished")
        _must((group.id in w.queue) == (group.stage == "queued"), f"group {group.id} {group.stage}: queue")
        _must((group.id in led.ended) == (group.stage == "ended"), f"group {group.id} {group.stage}: ended")
        seated = group.stage in ("building", "batched")
        _must((group.id in led.seated) == seated, f"group {group.id} {group.stage}: seats")
        waits = group.stage in ("running", "ended") and not group.evaluation
        _must((group.id in led.outstanding) == waits, f"group {group.id} {group.stage}: outstanding")
        if waits or seated:
            stale = led.version - group.version
            _must(stale <= w.config.max_staleness, f"group {group.id} would train at staleness {stale}")
    _must(w.live == sum(g.unfinished for g in w.groups.values() if g.stage != "queued"), "live executions")
    building = sum(g.stage == "building" for g in w.groups.values())
    _must(led.building == building, f"groups being built: {led.building}, counted {building}")
    running = [e for e in w.executions.values() if e.running]
    unstarted = sum(g.size for g in w.groups.values() if g.stage == "running")
    unstarted -= sum(e.running or e.status is not None for e in w.executions.values() if e.group.stage == "running")
    _must(w.unstarted == unstarted, f"unstarted {w.unstarted}, counted {unstarted}")
    _must(w.bare == sum(not e.sessions for e in running), "executions without a session")
    _must(len(led.seated) <= w.config.groups_per_step, "more groups than seats")


def _ledger(w: World) -> None:
    led = w.ledger
    ready = {line.batch.id for line in led.ready}
    _must(len(ready) == len(led.ready), "a micro-batch is ready twice")
    holders: dict[str, int] = {}
    for lease in led.leases.values():
        _must(lease.cell.lease is lease, f"lease {lease.id} and its holder disagree")
        _must(
            lease.cell.state in (CellState.TRAIN, CellState.FLUSHING),
            f"lease {lease.id} is on a {lease.cell.state} cell",
        )
        for line in lease.batches:
            _must(line.batch.id not in holders, f"micro-batch {line.batch.id} has two holders")
            holders[line.batch.id] = lease.id
    for name, line in led.batches.items():
        places = (name in ready) + (name in holders) + line.done
        _must(places == 1, f"micro-batch {name} is in {places} places")
        _must(line.lease == holders.get(name), f"micro-batch {name}: holder")
    _must(led.undone == sum(not x.done for x in led.batches.values()), "micro-batches not done")
    _must(led.ready_tokens == sum(x.batch.tokens for x in led.ready), "ready tokens")
    _must(not led.applying or (led.sealed and not led.undone), "applied before all is done")
