"""Notices a server that died or hangs.

Invariant: says so once, by failing the engine; a server that sleeps is let be. Not here: what an engine does then.
"""

from __future__ import annotations

import asyncio
import time

from gyre_core import InfrastructureError

from gyre_vllm.server import Server
from gyre_vllm.state import EngineState, Phase

_WATCH_S = 0.5


async def watch(state: EngineState, server: Server, stall_s: float) -> None:
    """Notice that the server died or hangs, and say so once."""
    while True:
        await asyncio.sleep(_WATCH_S)
        if state.phase is Phase.ASLEEP:
            continue  # nobody needs it now; `wake` looks whether it still lives
        if not server.alive:
            state.fail(InfrastructureError("running vLLM", got=server.story(), expected="a live server"))
            return
        running = any(not call.at_rest.is_set() and not call.handing for call in state.calls)
        quiet = time.monotonic() - state.progress
        if not running or not state.open.is_set():
            state.note_progress()
        elif quiet > stall_s:
            state.fail(
                InfrastructureError(
                    "running vLLM",
                    got=f"no token for any call in {quiet:.0f} s; {server.story()}",
                    expected="tokens",
                    fix="It hangs. Raise stall_s if prompts take longer than that.",
                )
            )
            return
