"""A session's KV between two engines that give it to one another (`KV_HANDOVER`): what the two cells do.

The destination asks the source's cell for an export and lets its engine import it; while a call runs at the source this
is done twice, so that the call is cut only for what was sampled in between. Invariant: nothing is decided or copied
here, and a handover that fails leaves both engines as they were: the destination then prefills.
"""

from __future__ import annotations

import time

import numpy as np
from gyre_core import ExportedKV, GyreError, KVHandover

from gyre_rl.cell.messages import Exported, ExportSession, Pulled, PullSession
from gyre_rl.procs.wire import Peer

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
    """The destination's part; what went wrong is said in `why`."""
    began = paused = time.perf_counter()
    nbytes = computed = tokens = 0
    running, stop = True, False
    try:
        while running:
            paused = time.perf_counter()
            held = await source.call("/export", ExportSession(message.session, stop), Exported)
            if held.version < 0:
                return Pulled(False, why=f"the source has no KV of {message.session} under its present weights")
            ids = np.frombuffer(held.token_ids, "<i4")
            came = await engine.kv_import(ExportedKV(held.session, held.version, ids, held.ticket))
            nbytes, computed, tokens = nbytes + came.nbytes, came.computed, came.tokens
            running, stop = held.running, True
    except GyreError as error:
        return Pulled(False, why=str(error))
    now = time.perf_counter()
    if computed >= tokens:
        return Pulled(False, why=f"none of {tokens} tokens came: the destination computed them")
    return Pulled(True, nbytes, tokens - computed, now - began, now - paused, TRANSPORT)
