"""What an engine offers to the mover: two small async protocols in plain data.

Invariant: block ids and tokens cross this border as int32 arrays, memory as (address, size, device). The mover never
sees an engine's tensors or requests, and never asks for a block that is not pinned or reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from gyre_kvxfer.digest import U64
from gyre_kvxfer.layout import KVLayout

Int32: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous piece of an engine's KV pool that stays where it is while it is offered.

    `addr` is a virtual address in the owning process (host) or a device pointer, `nbytes` its size. `device` is
    `"cpu"` or `"cuda:N"`. `rank` is the tensor-parallel rank whose heads it holds.
    """

    addr: int
    nbytes: int
    device: str = "cpu"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class KeptDigests:
    """Digests an engine made when blocks filled: a full block's bytes are final, so one digest serves all its moves.

    `kind`: as in `MovePolicy.digest`. `values`: uint64[ranks, k], of the session's first k blocks, all of them full.
    """

    kind: str
    values: U64


@dataclass(frozen=True, slots=True)
class Pinned:
    """A session's KV that stays alive and in place until its generation is released.

    `version`: policy version that computed every token in it. `token_ids`: int32[n], the tokens whose KV is complete.
    `block_ids`: int32[ceil(n / block_size)], in token order. `generation`: the engine's name for this pin. `kept`:
    digests the engine has of these blocks already; what is missing, the mover computes when a move asks for it.
    """

    version: int
    token_ids: Int32
    block_ids: Int32
    generation: int
    kept: KeptDigests | None = None


class KVSource(Protocol):
    """The giving side. Pins nest: a later pin or freeze of a session may return a new generation."""

    def layout(self) -> KVLayout:
        """The layout of the pool (rank 0's, if the pool is split over ranks)."""
        ...

    def regions(self) -> Sequence[Region]:
        """The pool's memory in the order of `KVLayout.region_index`, rank after rank."""
        ...

    async def pin(self, session: str) -> Pinned:
        """Keep the session's blocks alive while it goes on decoding. Full blocks never change; the last may."""
        ...

    async def freeze(self, session: str) -> Pinned:
        """Stop decoding at a token border and return what is there; nothing of it changes until released."""
        ...

    async def release(self, session: str, generation: int, *, forget: bool = False) -> None:
        """Drop the pin; with `forget` the session has left for good. Releasing what is gone is no error.

        `forget` is about the session this generation pinned: one of the same name that has been committed here since
        (it came back) is not touched.
        """
        ...

    async def unfreeze(self, session: str) -> None:
        """Let the session decode here again (the move did not happen)."""
        ...


class KVSink(Protocol):
    """The taking side."""

    def layout(self) -> KVLayout:
        """The layout of the pool (rank 0's, if the pool is split over ranks)."""
        ...

    def regions(self) -> Sequence[Region]:
        """The pool's memory in the order of `KVLayout.region_index`, rank after rank."""
        ...

    async def reserve(self, session: str, n_tokens: int, version: int) -> Int32:
        """Blocks for `n_tokens` tokens, nobody else's until commit or cancel.

        Called again for the same session it grows the reservation: the result then begins with the ids given before
        (an engine that returns others is served too; everything is then copied again). Raises a refusal if there is
        no room or the engine holds another policy version.
        """
        ...

    async def commit(self, session: str, version: int, token_ids: Int32, block_ids: Int32) -> None:
        """The blocks now hold these tokens' KV: enter them into the prefix cache under `version`."""
        ...

    async def cancel(self, session: str) -> None:
        """Give the reservation back. Cancelling nothing is no error."""
        ...
