"""Which split a task belongs to, when nobody says it: a pure function of its name, the same on every machine."""

from __future__ import annotations

import hashlib

SPLITS: tuple[str, ...] = ("train", "heldout")
HELDOUT_ONE_IN = 5


def split_of(name: str) -> str:
    """`heldout` for one name in five, else `train`; follows from the SHA-256 of the name alone."""
    return SPLITS[int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % HELDOUT_ONE_IN == 0]


def known_split(family: str, split: str) -> str:
    """`split` if it is one; ValueError naming those there are otherwise."""
    if split not in SPLITS:
        raise ValueError(f"listing tasks of {family!r}: split is {split!r}, expected one of {', '.join(SPLITS)}")
    return split
