"""What the engine knows of sessions so that their KV can be moved: pins, freezes and reservations.

Invariants: a pinned block keeps its content until `release`; reserved blocks belong to nobody else until committed
or cancelled; a frozen session's new calls are held until it is known where it goes on. Whether a later call of
a session that left belongs here is the router's business: it would be computed afresh.
Runs between two passes, as all of the core does.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from gyre_core import InfrastructureError, PinnedKV

from gyre_local.kv.pool import BlockPool
from gyre_local.kv.prefix import PrefixTree, Tokens
from gyre_local.serve.calls import Call

_REMEMBERED = 4096
"""Sessions whose tokens are remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class _Pin:
    session: str
    blocks: tuple[int, ...]


class Sessions:
    """Per-session state beside the calls."""

    def __init__(self, pool: BlockPool, tree: PrefixTree) -> None:
        self._pool, self._tree = pool, tree
        self._tokens: OrderedDict[str, Tokens] = OrderedDict()
        self._pins: dict[int, _Pin] = {}
        self._frozen: dict[str, int] = {}
        """Session → generation of the pin that froze it (-1 when it had no KV)."""
        self._held: dict[str, list[Call]] = {}
        self._reserved: dict[str, list[int]] = {}
        self._next_generation = 1

    # Calls of sessions that are not free to run

    @staticmethod
    def moved_away(call: Call) -> InfrastructureError:
        """The error of a call that was held when its session left."""
        return InfrastructureError(
            f"taking call {call.id!r}",
            got=f"session {call.session!r}, which has moved to another cell",
            expected="a session that is here",
            fix="Route the call to the session's new cell.",
        )

    def hold_if_frozen(self, call: Call) -> bool:
        """Keep a call of a frozen session aside until the freeze ends."""
        if call.session not in self._frozen:
            return False
        self._held.setdefault(call.session, []).append(call)
        return True

    def held_calls(self) -> list[Call]:
        """Calls kept aside."""
        return [call for calls in self._held.values() for call in calls]

    def drop_held(self, call: Call) -> None:
        """A call kept aside ends."""
        calls = self._held.get(call.session, [])
        if call in calls:
            calls.remove(call)

    def remember(self, session: str, tokens: Tokens) -> None:
        """The session's newest context with KV, int32 [n]."""
        self._tokens[session] = tokens
        self._tokens.move_to_end(session)
        if len(self._tokens) > _REMEMBERED:
            self._tokens.popitem(last=False)

    def forget_tokens(self) -> None:
        """No session has KV of the present version any more."""
        self._tokens.clear()

    @property
    def busy(self) -> list[str]:
        """Sessions with pins or reservations: their blocks are somebody else's to read or write."""
        return sorted({pin.session for pin in self._pins.values()} | set(self._reserved))

    # Outgoing

    def pin(self, session: str, running: Sequence[Call]) -> PinnedKV | None:
        """Hold the blocks of the session's longest present context: that of a running call, or what its last call left;
        None when nothing of it is cached under the present version."""
        whole = [c for c in running if c.session == session and c.kv_version == self._tree.version and c.computed]
        best = max(whole, key=lambda c: c.computed, default=None)
        if best is not None:
            tokens = best.tokens[: best.computed].copy()
            blocks = best.blocks[: math.ceil(best.computed / self._pool.block_tokens)]
        else:
            known = self._tokens.get(session)
            if known is None:
                return None
            match = self._tree.match(known, len(known))
            tokens = known[: match.tokens]
            blocks = [*match.blocks] if match.tail is None else [*match.blocks, match.tail]
        if not len(tokens):
            return None
        self._pool.hold(blocks)
        generation = self._next_generation
        self._next_generation += 1
        self._pins[generation] = _Pin(session, tuple(blocks))
        full = blocks[: len(tokens) // self._pool.block_tokens]
        kept = None if self._pool.digests is None else self._pool.digests.of(full)
        return PinnedKV(session, self._tree.version, tokens, np.array(blocks, np.int32), generation, kept)

    def freeze(self, session: str) -> PinnedKV | None:
        """Pin a session whose calls have ended and hold its new calls."""
        pinned = self.pin(session, ())
        self._frozen[session] = -1 if pinned is None else pinned.generation
        return pinned

    def unfreeze(self, session: str) -> list[Call]:
        """The session is ours: the calls that were held, to be queued."""
        self._frozen.pop(session, None)
        return self._held.pop(session, [])

    def release(self, session: str, generation: int, *, forget: bool) -> tuple[list[Call], list[Call]]:
        """Drop a pin; an unknown one is no error. Returns the held calls to queue and those to refuse."""
        pin = self._pins.get(generation)
        if pin is not None and pin.session == session:
            del self._pins[generation]
            self._pool.release(pin.blocks)
        if forget:
            self._tokens.pop(session, None)
            self._frozen.pop(session, None)
            return [], self._held.pop(session, [])
        if self._frozen.get(session) == generation:
            del self._frozen[session]
            return self._held.pop(session, []), []
        return [], []

    # Incoming

    def reserve(self, session: str, tokens: int) -> list[int] | None:
        """Blocks for `tokens` tokens; a second call for the session extends the first. None without room."""
        mine = self._reserved.get(session, [])
        fresh = self._pool.take(max(0, math.ceil(tokens / self._pool.block_tokens) - len(mine)))
        if fresh is None:
            return None
        self._reserved[session] = [*mine, *fresh]
        return list(self._reserved[session])

    def commit(self, session: str, tokens: Tokens, blocks: Sequence[int]) -> None:
        """Name the reserved blocks as these tokens' KV; ValueError when they are not the session's."""
        mine = self._reserved.get(session)
        need = math.ceil(len(tokens) / self._pool.block_tokens)
        if mine is None or list(blocks[:need]) != mine[:need] or len(blocks) < need or not len(tokens):
            raise ValueError(
                f"committing KV of session {session!r}: got {len(tokens)} tokens in blocks {list(blocks)[:8]}, "
                f"expected {need} of the blocks reserved for it, in order ({'none' if mine is None else mine[:8]})"
            )
        del self._reserved[session]
        self._tree.insert(tokens, mine, partial=True)
        self._pool.release(mine)
        self.remember(session, tokens)

    def cancel(self, session: str) -> None:
        """Give the reservation back, if there is one."""
        self._pool.release(self._reserved.pop(session, []))
