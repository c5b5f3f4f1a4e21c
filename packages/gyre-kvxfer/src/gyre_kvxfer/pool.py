"""`HostPool`: a paged KV pool in host memory that is a `KVSource` and a `KVSink`.

For engines that keep a host cache, for trying things out, and as the reference that real engines' KV interfaces are
compared with. Invariant: a block belongs to one sequence or reservation or is free; a pinned block is not reused; a
digest is that of the bytes its block had when it filled. It computes no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.blocks import block_digests
from gyre_kvxfer.copy import execute
from gyre_kvxfer.digest import U64
from gyre_kvxfer.engine import Int32, KeptDigests, Pinned, Region
from gyre_kvxfer.errors import MoveRefused, explain
from gyre_kvxfer.layout import KVLayout
from gyre_kvxfer.plan import plan_transfer


@dataclass(slots=True)
class Session:
    """One session's tokens and blocks. `frozen`: nothing may be added; `gone`: it has left; `pins`: who still
    reads; `digests`: of its first blocks.
    """

    tokens: Int32
    blocks: Int32
    frozen: bool = False
    gone: bool = False
    pins: int = 0
    digests: U64 = field(default_factory=lambda: np.zeros(0, np.uint64))


class HostPool:
    """A pool of `layout.num_blocks` blocks under one policy version.

    `digest`: the kind of digests it keeps of full blocks, made as they fill (`""`: none; a move that asks for digests
    then makes them itself). Blocks that came in by a move are caught up with when the session grows.
    """

    def __init__(self, layout: KVLayout, version: int = 0, digest: str = "") -> None:
        self.version = version
        self._digest = digest
        self._layout = layout
        self.buffers = [np.zeros(layout.region_nbytes, np.uint8) for _ in range(layout.region_count)]
        self._free = list(range(layout.num_blocks - 1, -1, -1))
        self._sessions: dict[str, Session] = {}
        self._reserved: dict[str, Int32] = {}
        self._pins: dict[int, Session] = {}
        self._generation = 0

    # -- filling and reading -------------------------------------------------------------------------------------
    def _dense(self, n_tokens: int) -> KVLayout:
        """Flat arrays [layer, kind, token, head, element], as a pool whose block i is token i."""
        axes = "LKBTHD" if self._layout.kind == "mha" else "LBTHD"
        return replace(self._layout, axes=axes, across="", block_size=1, num_blocks=max(n_tokens, 1), block_pitch=0)

    def append(self, session: str, token_ids: Int32, kv: npt.NDArray[np.uint8]) -> None:
        """Add int32[n] tokens with their KV: uint8, the bytes of [layer, kind, n, head, element]. Raises
        `MoveRefused`.
        """
        seq = self._sessions.setdefault(session, Session(np.zeros(0, np.int32), np.zeros(0, np.int32)))
        if seq.frozen:
            raise MoveRefused("busy", explain(f"appending to {session}", "a frozen session", "a live one", "Wait."))
        had, total = len(seq.tokens), len(seq.tokens) + len(token_ids)
        seq.blocks = np.concatenate([seq.blocks, self._take(self._layout.blocks_for(total) - len(seq.blocks))])
        seq.tokens = np.concatenate([seq.tokens, np.asarray(token_ids, np.int32)])
        table = np.arange(total) - had
        plan = plan_transfer(self._dense(len(token_ids)), self._layout, table, seq.blocks, start=had, stop=total)
        execute(plan, [kv], self.buffers)
        first, full = len(seq.digests), total // self._layout.block_size
        if self._digest and full > first:
            new = block_digests(self._digest, self._layout, self.buffers, seq.blocks, first, full, total)
            seq.digests = np.concatenate([seq.digests, new])

    def read(self, session: str) -> tuple[Int32, npt.NDArray[np.uint8]]:
        """(int32[n], uint8 bytes of [layer, kind, n, head, element]) of a session."""
        seq = self._get(session)
        n = len(seq.tokens)
        dense = self._dense(n)
        out = np.zeros(dense.region_nbytes, np.uint8)
        execute(plan_transfer(self._layout, dense, seq.blocks, np.arange(n), stop=n), self.buffers, [out])
        return seq.tokens, out

    def drop(self, session: str) -> None:
        """Forget a session; its blocks are free when no pin holds them."""
        seq = self._sessions.pop(session, None)
        if seq is not None:
            seq.gone = True
            self._collect(seq)

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def sessions(self) -> dict[str, Session]:
        """The sessions held here."""
        return dict(self._sessions)

    # -- both sides ----------------------------------------------------------------------------------------------
    def layout(self) -> KVLayout:
        """The pool's layout."""
        return self._layout

    def regions(self) -> Sequence[Region]:
        """The pool's memory."""
        return [Region(b.ctypes.data, len(b)) for b in self.buffers]

    # -- source --------------------------------------------------------------------------------------------------
    async def pin(self, session: str) -> Pinned:
        """Keep the session's blocks."""
        seq = self._get(session)
        self._generation += 1
        seq.pins += 1
        self._pins[self._generation] = seq
        kept = KeptDigests(self._digest, seq.digests[None, :]) if self._digest else None
        return Pinned(self.version, seq.tokens, seq.blocks, self._generation, kept)

    async def freeze(self, session: str) -> Pinned:
        """Keep them and refuse to add to them."""
        pinned = await self.pin(session)
        self._get(session).frozen = True
        return pinned

    async def release(self, session: str, generation: int, *, forget: bool = False) -> None:
        """Drop a pin; `forget` drops the session it pinned, not one of that name that has come in since."""
        seq = self._pins.pop(generation, None)
        if seq is None:
            return
        seq.pins -= 1
        if forget and self._sessions.get(session) is seq:
            self.drop(session)
        self._collect(seq)

    async def unfreeze(self, session: str) -> None:
        """Allow adding again."""
        if session in self._sessions:
            self._sessions[session].frozen = False

    # -- sink ----------------------------------------------------------------------------------------------------
    async def reserve(self, session: str, n_tokens: int, version: int) -> Int32:
        """Take blocks; again: as many more as are missing."""
        if version != self.version:
            came, want = f"version {version}", f"{self.version}"
            raise MoveRefused("version", explain(f"reserving for {session}", came, want, "Prefill the session."))
        held = self._reserved.get(session, np.zeros(0, np.int32))
        self._reserved[session] = np.concatenate([held, self._take(self._layout.blocks_for(n_tokens) - len(held))])
        return self._reserved[session]

    async def commit(self, session: str, version: int, token_ids: Int32, block_ids: Int32) -> None:
        """The reservation becomes a session; blocks it does not need are given back."""
        held = self._reserved.pop(session)
        if version != self.version:
            self._free += held.tolist()
            came, want = f"version {version}", f"{self.version}"
            raise MoveRefused("version", explain(f"taking in {session}", came, want, "Prefill the session."))
        self._free += held[len(block_ids) :].tolist()
        self.drop(session)
        self._sessions[session] = Session(np.asarray(token_ids, np.int32), np.asarray(block_ids, np.int32))

    async def cancel(self, session: str) -> None:
        """Give the reservation back."""
        self._free += self._reserved.pop(session, np.zeros(0, np.int32)).tolist()

    # -- blocks --------------------------------------------------------------------------------------------------
    def _get(self, session: str) -> Session:
        if session not in self._sessions:
            raise MoveRefused(
                "unknown_session", explain("looking up a session", repr(session), "one held here", "Prefill it.")
            )
        return self._sessions[session]

    def _take(self, count: int) -> Int32:
        if count > len(self._free):
            came, want = f"{len(self._free)} free blocks", f"{count}"
            raise MoveRefused("no_room", explain("taking blocks", came, want, "Free some, or use another cell."))
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return np.array(taken, np.int32)

    def _collect(self, seq: Session) -> None:
        if seq.gone and seq.pins == 0 and len(seq.blocks):
            self._free += seq.blocks.tolist()
            seq.blocks = np.zeros(0, np.int32)
