"""Cells: joining, loss, load reports, draining, flushing, switching, weights.

A turn goes DRAINING (or FLUSHING) → SWITCHING → the other role. A cell is switched only when it is empty: no session,
no move out of it, no lease. A failed drain or switch leads back to the old role.
"""

from __future__ import annotations

from collections.abc import Callable

from . import checks, on_sessions
from .commands import DrainCell, RecallLease, SwitchCell, SyncWeights, UndrainCell
from .errors import BadValueError, LateOutcomeError, StaleIncarnationError
from .events import (
    CellJoined,
    CellJoining,
    CellLost,
    DrainDone,
    DrainFailed,
    LoadReported,
    SwitchDone,
    SwitchFailed,
    WeightsFailed,
    WeightsLoaded,
)
from .ids import CellId, CellState, Role, SessionPhase
from .records import Cell, Session
from .world import World

__all__ = ["begin_turn", "give_up_turn", "lose", "progress", "sync_all"]

S = CellState


def _new_life(w: World, ev: CellJoining | CellJoined) -> Cell | None:
    """Validate a life that begins; returns the living earlier life that it replaces, if any."""
    name = ev.cell
    if not (isinstance(name, tuple) and len(name) == 2 and isinstance(name[1], int) and name[1] >= 0):
        raise BadValueError(ev, f"cell is {name!r}; expected CellId(name, incarnation) with incarnation >= 0")
    old = w.cells.get(name[0])
    if old is not None and name[1] <= old.id.incarnation:
        problem = f"life {name[1]} of cell {name[0]!r} has been; the next one is {old.id.incarnation + 1}"
        checks.refuse(StaleIncarnationError, w, ev, problem, name[0])
    core = w.core
    if ev.core and core is not None and core.state is not S.LOST and core is not old:
        checks.refuse(BadValueError, w, ev, f"{core.id} is the core cell; there is one at a time", core.id.name)
    return old if old is not None and old.state is not S.LOST else None


def _enter(w: World, ev: CellJoining | CellJoined, old: Cell | None) -> Cell:
    if old is not None:
        lose(w, old, f"replaced by life {ev.cell[1]}")
    before = w.cells.get(ev.cell[0])
    if before is not None:
        w.bury(f"cell {before.id}", before.notes)
    w.joined += 1
    cell = Cell(CellId(*ev.cell), ev.core, w.joined, w.now)
    w.cells[cell.id.name] = cell
    if ev.core:
        w.core = cell
    w.note(cell, "starts{}", " as the core cell" if ev.core else "")
    return cell


def joining(w: World, ev: CellJoining) -> None:
    """A cell starts up."""
    _enter(w, ev, _new_life(w, ev))


def joined(w: World, ev: CellJoined) -> None:
    """A cell is up."""
    known = w.cells.get(ev.cell[0]) if isinstance(ev.cell, tuple) else None
    starting = known is not None and known.id == ev.cell and known.state is S.JOINING
    old = None if starting else _new_life(w, ev)
    checks.positive(w, ev, slots=ev.slots, kv_tokens=ev.kv_tokens)
    if starting and known is not None and known.core != ev.core:
        checks.refuse(BadValueError, w, ev, f"core was {known.core} when it started", known.id.name)
    if ev.version > max(w.ledger.version, w.ledger.published):
        newest = max(w.ledger.version, w.ledger.published)
        raise BadValueError(ev, f"it brings weights of version {ev.version}; the newest made is {newest}")
    cell = known if starting and known is not None else _enter(w, ev, old)
    cell.slots, cell.kv_tokens, cell.version = ev.slots, ev.kv_tokens, ev.version
    w.all_slots += cell.slots
    w.all_kv += cell.kv_tokens
    w.set_state(cell, S(Role(ev.role).value), f"joined with {ev.slots} slots, {ev.kv_tokens} KV tokens")
    _catch_up(w, cell)


def lost(w: World, ev: CellLost) -> None:
    """A cell is gone."""
    lose(w, checks.cell(w, ev, ev.cell), ev.reason)


def lose(w: World, cell: Cell, why: str) -> None:
    """Everything a cell held goes elsewhere: leases to the ledger, sessions to other cells, their KV nowhere."""
    w.set_state(cell, S.LOST, why)
    w.behind.pop(cell.order, None)
    lease = cell.lease
    if lease is not None:
        w.ledger.close(lease, frozenset())
        w.note(lease, "returned whole: {} is lost", cell.id)
        w.bury(f"lease {lease.id}", lease.notes)
    if cell.core:
        again = w.ledger.forget_sum()
        if again:
            w.note(cell, "its gradient sum is lost: {} micro-batches go back to the ledger", again)
    for session in [s for s in w.moves.values() if s.src is cell]:
        on_sessions.abandon_move(w, session, f"{cell.id} is lost, and the KV with it")
    for session in list(cell.sessions.values()):
        _orphan(w, session, cell)
    w.dirty = True


def _orphan(w: World, session: Session, cell: Cell) -> None:
    calling = session.phase is not SessionPhase.PAUSED and (session.phase is not SessionPhase.MOVING or session.wants)
    on_sessions.abandon_move(w, session, f"{cell.id} is lost")
    w.note(session, "{} is lost, KV and all", cell.id)
    w.detach(session)
    w.set_phase(session, SessionPhase.PAUSED)
    if calling and not on_sessions.route(w, session):
        w.set_phase(session, SessionPhase.WAITING)


def reported(w: World, ev: LoadReported) -> None:
    """Measured load of an engine."""
    cell = checks.cell(w, ev, ev.cell)
    checks.finite(w, ev, running=ev.running, waiting=ev.waiting, kv_tokens=ev.kv_tokens, growth=ev.growth_tps)
    checks.finite(w, ev, prefill_tps=ev.prefill_tps)
    if cell.state is S.ROLLOUT:
        cell.report = (ev.running, ev.waiting, ev.kv_tokens)
        if ev.growth_tps is not None:
            w.reported_growth += ev.growth_tps - cell.growth_tps
            cell.growth_tps = ev.growth_tps
    if ev.prefill_tps:
        w.costs.prefilled(ev.prefill_tps)
    w.dirty = True


# --- turns -------------------------------------------------------------------------------------------------


def begin_turn(w: World, cell: Cell, role: Role, why: str) -> None:
    """Start turning a cell that is in the other role."""
    cell.turn_why = why
    if role is Role.TRAIN:
        w.set_state(cell, S.DRAINING, why)
        cell.target = role
        cell.quiet = False
        w.out.append(DrainCell(cell.id, why))
    else:
        w.set_state(cell, S.FLUSHING, why)
        cell.target = role
        if cell.lease is not None:
            cell.lease.recalled = True
            w.note(cell.lease, "recalled: {}", why)
            w.out.append(RecallLease(cell.id, cell.lease.id, why))
    w.touched.append(cell)


def give_up_turn(w: World, cell: Cell, why: str) -> None:
    """Go back to the old role while nothing irreversible has begun."""
    if cell.state is S.DRAINING:
        w.set_state(cell, S.ROLLOUT, why)
        w.out.append(UndrainCell(cell.id, why))
        _catch_up(w, cell)
    else:
        w.set_state(cell, S.TRAIN, why)


def progress(w: World, cell: Cell) -> None:
    """Bring a draining or flushing cell one bit further; switch it once it is empty."""
    if cell.state is S.DRAINING:
        if cell.sessions:
            _drain(w, cell)
        if not cell.sessions and not cell.moves_out and cell.quiet:
            _switch(w, cell, Role.TRAIN)
    elif cell.state is S.FLUSHING and cell.lease is None:
        _switch(w, cell, Role.ROLLOUT)


def _switch(w: World, cell: Cell, role: Role) -> None:
    what = "drained" if role is Role.TRAIN else "flushed"
    why = f"{cell.turn_why}; {what} in {w.now - cell.since:.3f} s"
    w.set_state(cell, S.SWITCHING, why)
    cell.target = role
    w.out.append(SwitchCell(cell.id, role, why))


def _drain(w: World, cell: Cell) -> None:
    """Send away what can go: sessions in a pause at once, running calls once they had time to reach one."""
    patience = w.now - cell.since >= w.config.pause_wait_s
    for session in list(cell.sessions.values()):
        if session.phase is SessionPhase.MOVING:
            continue
        calling = session.phase is SessionPhase.CALLING
        if calling and not patience:
            continue
        carry = w.config.carry_kv and w.costs.carries(session.context)
        if (carry or calling) and cell.moves_out >= w.config.drain_moves:
            continue
        need, version = session.context, session.version
        dst = w.rollout.least(version, _has_room(need))
        dst = dst or w.rollout.least(version)
        if dst is None:
            continue
        if carry or calling:
            wants = session.phase is SessionPhase.WAITING
            on_sessions.start_move(w, session, dst, carry, calling, _move_reason(w, cell, need, carry))
            session.wants = wants
        else:
            on_sessions.rehome(w, session, dst, _move_reason(w, cell, need, carry))


def _has_room(need: int) -> Callable[[Cell], bool]:
    return lambda cell: cell.roomy(need)


def _move_reason(w: World, cell: Cell, tokens: int, carry: bool) -> str:
    move, fill = w.costs.move_seconds(tokens), w.costs.prefill_seconds(tokens)
    sign = "<" if move < fill else ">="
    trial = ", tried all the same" if carry and move >= fill else ""
    return f"{cell.id} drains; {tokens} tokens: move {move:.3f} s {sign} prefill {fill:.3f} s{trial}"


def drain_done(w: World, ev: DrainDone) -> None:
    """The engine takes no new calls."""
    cell = checks.cell(w, ev, ev.cell, S.DRAINING)
    cell.quiet = True
    w.touched.append(cell)


def drain_failed(w: World, ev: DrainFailed) -> None:
    """The engine goes on serving."""
    cell = checks.cell(w, ev, ev.cell, S.DRAINING)
    w.set_state(cell, S.ROLLOUT, f"drain failed: {ev.reason}")
    cell.role_since = w.now


def switch_done(w: World, ev: SwitchDone) -> None:
    """A cell is in its new role."""
    cell = checks.cell(w, ev, ev.cell, S.SWITCHING)
    checks.finite(w, ev, seconds=ev.seconds)
    if cell.target is not ev.role:
        checks.refuse(BadValueError, w, ev, f"{cell.id} was to become {cell.target}, not {ev.role}", cell.id.name)
    w.costs.switched(ev.role, ev.seconds)
    w.switches += 1
    w.set_state(cell, S(ev.role.value), f"switched in {ev.seconds:.3f} s")
    _catch_up(w, cell)


def switch_failed(w: World, ev: SwitchFailed) -> None:
    """A cell did not get there."""
    cell = checks.cell(w, ev, ev.cell, S.SWITCHING)
    if cell.target is not ev.role:
        checks.refuse(LateOutcomeError, w, ev, f"{cell.id} is on its way to {cell.target}, not {ev.role}", cell.id.name)
    if not ev.fell_back:
        lose(w, cell, f"switch to {ev.role} failed and could not be undone: {ev.reason}")
        return
    w.set_state(cell, S(ev.role.other.value), f"switch to {ev.role} failed: {ev.reason}")
    cell.role_since = w.now
    _catch_up(w, cell)


# --- weights -----------------------------------------------------------------------------------------------


def _catch_up(w: World, cell: Cell) -> None:
    """Ask for the newest weights if the cell is behind."""
    newest = w.ledger.published
    if cell.version < newest and (cell.syncing is None or cell.syncing < newest):
        cell.syncing = newest
        w.out.append(SyncWeights(cell.id, newest))


def catch_up_all(w: World) -> None:
    """Ask cells again whose load failed."""
    if w.behind:
        for cell in list(w.behind.values()):
            del w.behind[cell.order]
            if cell.state in (S.ROLLOUT, S.TRAIN):
                _catch_up(w, cell)


def sync_all(w: World) -> None:
    """New weights can be fetched: every cell at work shall have them."""
    for cell in w.cells.values():
        if cell.state in (S.ROLLOUT, S.TRAIN):
            _catch_up(w, cell)


def weights_loaded(w: World, ev: WeightsLoaded) -> None:
    """A cell has newer weights."""
    cell = checks.cell(w, ev, ev.cell)
    checks.finite(w, ev, seconds=ev.seconds)
    if ev.version > w.ledger.version:
        raise BadValueError(ev, f"version {ev.version} does not exist; trained is v{w.ledger.version}")
    if ev.version < cell.version:
        checks.refuse(LateOutcomeError, w, ev, f"{cell.id} already has v{cell.version}", cell.id.name)
    if ev.seconds > 0:
        w.costs.synced(ev.seconds)
    w.set_version(cell, ev.version)
    if cell.syncing is not None and cell.syncing <= ev.version:
        cell.syncing = None
    w.note(cell, "weights v{} loaded in {:.3f} s", ev.version, ev.seconds)
    w.dirty = True


def weights_failed(w: World, ev: WeightsFailed) -> None:
    """A cell keeps its old weights; it is asked again with the next tick."""
    cell = checks.cell(w, ev, ev.cell)
    if cell.syncing != ev.version:
        checks.refuse(LateOutcomeError, w, ev, f"{cell.id} is not loading v{ev.version}", cell.id.name)
    cell.syncing = None
    w.behind[cell.order] = cell
    w.note(cell, "weights v{} not loaded: {}", ev.version, ev.reason)
