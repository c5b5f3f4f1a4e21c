"""A session's KV between two engines that give it to one another (`KV_HANDOVER`): what the two cells do.

The destination asks the source's cell for an export and lets its engine import it. While a call runs at the source this
is done twice, the second time for what was sampled during the first; a third export then ends the call and holds the
rest. An engine that cannot do this last one ends the call without it, and the few tokens sampled since are computed
with the next ones. Invariant: nothing is decided or copied here, and a handover that fails before the call was ended
leaves the session with the source: the destination then prefills. What an earlier round brought stays in the cache
there; it is the KV of those tokens and does no harm.
"""

from __future__ import annotations

import logging
import time

import numpy as np
from gyre_core import ExportedKV, GyreError, KVHandover

from gyre_rl.cell.messages import Exported, ExportSession, Pulled, PullSession
from gyre_rl.procs.wire import Peer

log = logging.getLogger("gyre.cell")

ROUNDS = 2
"""Exports of a session whose call runs on."""

TRANSPORT = "engine"
"""What a move of this kind calls its transport: how the bytes go is the engine's own affair."""


async def export_session(engine: KVHandover, message: ExportSession) -> Exported:
    """The source's part."""
    held = await engine.kv_export(message.session, stop=message.stop)
    if held is None:
        return Exported(message.session, -1)
    tokens = np.ascontiguousarray(held.token_ids, "<i4").tobytes()
    return Exported(held.session, held.version, tokens, held.ticket, held.running)


async def take_over(engine: KVHandover, source: Peer, message: PullSession) -> Pulled:
    """The destination's part; what went wrong is said in `why`, and in this cell's log."""
    pulled = await _take(engine, source, message)
    if not pulled.carried:
        log.warning("moving %s: its context is computed here: %s", message.session, pulled.why)
    return pulled


async def _take(engine: KVHandover, source: Peer, message: PullSession) -> Pulled:
    session, began = message.session, time.perf_counter()
    nbytes = tokens = rounds = 0
    running, pause = True, 0.0
    try:
        while running and rounds < ROUNDS:
            held = await source.call("/export", ExportSession(session), Exported)
            if held.version < 0:
                return Pulled(False, why=f"the source has no KV of {session} under its present weights")
            came = await engine.kv_import(_exported(held))
            nbytes, tokens, running = nbytes + came.nbytes, came.tokens - came.computed, held.running
            rounds += 1
            if tokens <= 0:
                return Pulled(False, why=f"none of {came.tokens} tokens came: the destination computed them")
        if running:
            cut = time.perf_counter()
            tokens, nbytes = await _take_rest(engine, source, session, tokens, nbytes)
            pause = time.perf_counter() - cut
    except GyreError as error:
        return Pulled(False, why=str(error))
    return Pulled(True, nbytes, tokens, time.perf_counter() - began, pause, TRANSPORT)


async def _take_rest(engine: KVHandover, source: Peer, session: str, tokens: int, nbytes: int) -> tuple[int, int]:
    """End the session's calls at the source and fetch what earlier rounds have not; tokens and bytes with it."""
    held = await source.call("/export", ExportSession(session, stop=True), Exported)
    if held.version < 0:
        return tokens, nbytes
    try:
        came = await engine.kv_import(_exported(held))
    except GyreError as error:
        log.warning("moving %s: its last tokens are computed again: %s", session, error)
        return tokens, nbytes
    return max(tokens, came.tokens - came.computed), nbytes + came.nbytes


def _exported(held: Exported) -> ExportedKV:
    return ExportedKV(held.session, held.version, np.frombuffer(held.token_ids, "<i4"), held.ticket, held.running)
