"""Names for KV: what it was computed from, and what its bytes are.

A block's name is the hash of (layout meaning, policy version, all tokens up to its end), so KV of an old policy or
another prefix has another name. A block's digest is over bytes and finds damage; it is not a name.

Invariant: equal names mean equal tokens, version and meaning (up to a 128-bit collision). Names say nothing about
bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


class TokenDigest:
    """Running hash of (fingerprint, version, tokens); tokens are added as they come and never hashed twice."""

    __slots__ = ("_hash", "count")

    def __init__(self, fingerprint: str, version: int) -> None:
        self._hash = hashlib.blake2b(f"{fingerprint}/{version}/".encode(), digest_size=16)
        self.count = 0

    def update(self, token_ids: npt.NDArray[np.integer]) -> TokenDigest:
        """Add int[n] tokens. Returns itself."""
        self._hash.update(np.ascontiguousarray(token_ids, dtype="<i4").data)
        self.count += len(token_ids)
        return self

    def copy(self) -> TokenDigest:
        """An independent hash in the same state."""
        other = object.__new__(TokenDigest)
        other._hash, other.count = self._hash.copy(), self.count
        return other

    def hex(self) -> str:
        """32 hex digits for the tokens so far."""
        return self._hash.hexdigest()


def block_names(fingerprint: str, version: int, token_ids: npt.NDArray[np.integer], block_size: int) -> Iterator[str]:
    """The name of each full block, in order: the prefix hash at its end."""
    running = TokenDigest(fingerprint, version)
    for end in range(block_size, len(token_ids) + 1, block_size):
        yield running.update(token_ids[end - block_size : end]).hex()
