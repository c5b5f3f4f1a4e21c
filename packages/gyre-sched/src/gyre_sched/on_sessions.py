"""Sessions and their calls: routing, pauses, moves.

Each handler validates first and then changes. A session that moves belongs to its destination at once; only its KV
may still be on the way.
"""

from __future__ import annotations

import heapq

from . import checks, router
from .commands import MoveSession, RouteCall
from .errors import BadValueError, LateOutcomeError
from .events import CallEnded, CallRequested, MoveDone, MoveFailed, SessionEnded, SessionStarted
from .ids import CellState, SessionPhase
from .records import Cell, Session
from .world import World

__all__ = ["abandon_move", "end_session", "leave_cell", "rehome", "route", "serve_waiting", "start_move"]

P = SessionPhase
_LOOK_PAST = 8
"""Sessions that wait for their own cell are passed over by at most this many others."""


def started(w: World, ev: SessionStarted) -> None:
    """A conversation begins; it gets a home with its first call."""
    execution = checks.execution(w, ev, ev.execution)
    if ev.session in w.sessions:
        checks.refuse(BadValueError, w, ev, "a session of this name is live", ev.session)
    session = Session(ev.session, execution, w.now)
    w.sessions[ev.session] = session
    if not execution.sessions:
        w.bare -= 1
    execution.sessions[ev.session] = session


def ended(w: World, ev: SessionEnded) -> None:
    """A conversation is over."""
    end_session(w, checks.session(w, ev, ev.session), "ended")


def end_session(w: World, session: Session, why: str) -> None:
    """Forget a session and everything under way for it."""
    execution = session.execution
    _drop_move(w, session)
    w.set_phase(session, P.PAUSED)
    cell = w.detach(session)
    w.kv_held -= session.context
    w.ended_contexts += session.context
    w.ended_sessions += 1
    del w.sessions[session.id]
    del execution.sessions[session.id]
    if not execution.sessions:
        w.bare += 1
    w.dirty = True
    w.note(session, "{}", why)
    w.bury(f"session {session.id}", session.notes)
    if cell is not None and cell.state is CellState.DRAINING:
        w.touched.append(cell)


def requested(w: World, ev: CallRequested) -> None:
    """A session wants a call."""
    session = checks.session(w, ev, ev.session)
    checks.finite(w, ev, prompt_tokens=ev.prompt_tokens)
    w.set_context(session, ev.prompt_tokens)
    if session.phase is P.MOVING:
        session.wants = True
        return
    if session.phase is P.CALLING:
        w.set_phase(session, P.PAUSED)
    if not route(w, session, ev.prefix):
        w.set_phase(session, P.WAITING)


def route(w: World, session: Session, prefix: tuple[int, ...] = ()) -> bool:
    """Find a cell with a free slot for a session that wants a call."""
    home = session.home
    if home is not None and router.serves(home, session):
        if home.has_slot(w.config.overload):
            if not router.crowded(w, session, home):
                _call(w, session, home, "home")
                return True
            why = f"{home.id} has {home.calling} calls, more than others"
        elif not router.worth_leaving(w, session):
            return False
        else:
            why = f"{home.id} is full"
    elif home is not None:
        why = f"{home.id} is {home.state} at v{home.version}"
    else:
        why = ""
    found = router.choose(w, session, prefix)
    if found is None:
        return False
    cell, reason = found
    if home is None:
        w.attach(session, cell)
        w.note(session, "routed to {}: {}", cell.id, reason)
    elif w.config.carry_kv and w.costs.carries(session.context):
        start_move(w, session, cell, True, False, why)
        session.wants = True
        return True
    else:
        rehome(w, session, cell, why)
        reason = why
    if prefix:
        router.learn_prefix(w, cell, prefix)
    _call(w, session, cell, reason)
    return True


def _call(w: World, session: Session, cell: Cell, why: str) -> None:
    w.set_phase(session, P.CALLING)
    w.out.append(RouteCall(session.id, cell.id, why))


def serve_waiting(w: World) -> None:
    """Slots became free: serve those who wait, oldest groups first, until one finds none."""
    w.freed = False
    line = w.line
    kept: list[tuple[int, int, str]] = []
    while line:
        entry = line[0]
        session = w.waiting.get(entry[2])
        if session is None:
            heapq.heappop(line)
        elif route(w, session):
            w.freed = False
            heapq.heappop(line)
        elif session.home is not None and len(kept) < _LOOK_PAST and w.rollout.members:
            kept.append(heapq.heappop(line))
        else:
            break
    for entry in kept:
        heapq.heappush(line, entry)
    w.freed = False


def call_ended(w: World, ev: CallEnded) -> None:
    """A call was answered: the session pauses in its tool."""
    session = checks.session(w, ev, ev.session)
    checks.finite(w, ev, context_tokens=ev.context_tokens, pause_s=ev.pause_s)
    if session.phase is P.PAUSED:
        checks.refuse(LateOutcomeError, w, ev, "the session is in no call", ev.session)
    w.set_context(session, ev.context_tokens)
    if session.phase is P.MOVING:
        session.wants = False
        return
    if session.phase is P.CALLING:
        took = w.now - session.since
        w.call_s = took if not w.call_s else w.call_s + 0.02 * (took - w.call_s)
    w.set_phase(session, P.PAUSED)
    home = session.home
    if home is not None and home.state is CellState.DRAINING:
        w.touched.append(home)


def move_done(w: World, ev: MoveDone) -> None:
    """A session arrived."""
    session = _moving(w, ev, ev.move, ev.session)
    checks.finite(w, ev, bytes=ev.bytes, tokens=ev.tokens, seconds=ev.seconds)
    if ev.carried:
        w.costs.moved(ev.bytes, ev.tokens, ev.seconds)
        w.note(session, "KV arrived: {} tokens, {} bytes in {:.3f} s", ev.tokens, ev.bytes, ev.seconds)
    else:
        w.note(session, "arrived without its KV")
    _arrive(w, session)


def move_failed(w: World, ev: MoveFailed) -> None:
    """The KV did not come; the session prefills again where it is."""
    session = _moving(w, ev, ev.move, ev.session)
    w.note(session, "KV did not arrive ({}): {}", "refused" if ev.refused else "failed", ev.reason)
    _arrive(w, session)


def _moving(w: World, ev: MoveDone | MoveFailed, move: int, name: str) -> Session:
    session = w.moves.get(move)
    if session is None:
        if not (isinstance(move, int) and 0 < move < w.next_move):
            checks.refuse(BadValueError, w, ev, f"move {move} was never asked for", name)
        checks.refuse(LateOutcomeError, w, ev, f"move {move} is no longer awaited", name)
    if session.id != name:
        checks.refuse(BadValueError, w, ev, f"move {move} is of session {session.id!r}", session.id)
    return session


def _arrive(w: World, session: Session) -> None:
    _drop_move(w, session)
    wants, session.wants = session.wants, False
    w.set_phase(session, P.PAUSED)
    home = session.home
    if not wants:
        if home is not None and home.state is CellState.DRAINING:
            w.touched.append(home)
        return
    if not route(w, session):
        w.set_phase(session, P.WAITING)


def _drop_move(w: World, session: Session) -> None:
    """A move is over, whatever became of it: its source is free of it."""
    src = session.src
    if src is not None:
        del w.moves[session.move]
        session.src = None
        src.moves_out -= 1
        if session.home is not None:
            # The slot that was kept for it is free, unless it wants a call at once.
            session.home.moves_in -= 1
            w.rollout.recount(session.home)
            w.rollout.lighter(session.home)
            w.freed = True
        if src.state is CellState.DRAINING:
            w.touched.append(src)


def abandon_move(w: World, session: Session, why: str) -> None:
    """A cell of a move is gone: the session stays where it belongs, and its KV is not awaited any more."""
    if session.src is None:
        return
    w.note(session, "move given up: {}", why)
    home = session.home
    if home is None or home.state is CellState.LOST:
        _drop_move(w, session)
    else:
        _arrive(w, session)


def rehome(w: World, session: Session, dst: Cell, why: str) -> None:
    """Give a session another home without its KV: nothing has to be done for that but prefilling later."""
    w.costs.left_behind(session.context)
    leave_cell(w, session)
    w.attach(session, dst)
    w.note(session, "now on {}, to be prefilled again: {}", dst.id, why)


def leave_cell(w: World, session: Session) -> None:
    """Take a session off its home."""
    cell = w.detach(session)
    if cell is not None and cell.state is CellState.DRAINING:
        w.touched.append(cell)


def start_move(w: World, session: Session, dst: Cell, carry: bool, interrupt: bool, why: str) -> None:
    """Ask for a session to be brought to ``dst``, which owns it from now on."""
    src = session.home
    assert src is not None
    w.set_phase(session, P.MOVING)
    leave_cell(w, session)
    w.attach(session, dst)
    session.src = src
    session.move = w.next_move
    w.next_move += 1
    w.moves[session.move] = session
    src.moves_out += 1
    dst.moves_in += 1
    w.rollout.recount(dst)
    if carry:
        w.costs.carried(session.context)
    else:
        w.costs.left_behind(session.context)
    how = "with its KV" if carry else "without its KV"
    w.note(session, "moves {} → {} {}: {}", src.id, dst.id, how, why)
    w.out.append(MoveSession(session.move, session.id, src.id, dst.id, carry, interrupt, session.context, why))
