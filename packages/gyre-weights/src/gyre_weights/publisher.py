"""`Publisher`: a trainer's way to publish version after version, whichever kind it chose.

Invariants: `folder`/v<N> can be opened for every version kept, in each kind (in memory it is a link); a delta rests on
the version before it and at most `full_every` of them on one full version, or on a full one as soon as a delta would
not be worth it. One thread at a time. Not here: the stream of tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from gyre_weights.arrays import Named
from gyre_weights.errors import MismatchError
from gyre_weights.folder import Extras, drop_drafts, drop_old, version_folder
from gyre_weights.publish import SHARD_BYTES, publish_delta, publish_full
from gyre_weights.shadow import Shadow
from gyre_weights.shm import drop_links, link_version, own, settle, shm_root, sweep
from gyre_weights.version import Published, open_version


class Kind(StrEnum):
    """Ways for a version at rest."""

    DISK = "disk"
    SHM = "shm"
    DELTA = "delta"


class Publisher:
    """Publishes under `folder`.

    `full_every`: with kind delta, at least every so many versions is full. `worth`: a delta of more than this part of
    the full bytes is followed by a full version.
    """

    def __init__(
        self,
        kind: Kind | str,
        folder: str | Path,
        *,
        keep: int = 3,
        full_every: int = 16,
        worth: float = 0.5,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.kind, self.folder = Kind(kind), Path(folder)
        self._keep, self._full_every, self._worth, self._shard_bytes = keep, full_every, worth, shard_bytes
        self._shadow: Shadow | None = None
        self._deltas = 0
        self._root: Path | None = None
        self._last: int | None = None
        """The version published last."""

    def publish(
        self,
        version: int,
        tensors: Callable[[], Named],
        extras: Extras | None = None,
        spare: Iterable[str | Path] = (),
    ) -> Published:
        """Publish `version`. `tensors` makes the stream; for kind delta it may be called twice (a full version is
        also copied aside, to take the next difference to)."""
        if self._last is None:
            drop_drafts(self.folder)
        ways = {Kind.SHM: self._shm, Kind.DELTA: self._delta, Kind.DISK: self._full}
        published = ways[self.kind](version, tensors, extras, spare)
        self._last = version
        return published

    def _full(
        self, version: int, tensors: Callable[[], Named], extras: Extras | None, spare: Iterable[str | Path]
    ) -> Published:
        return publish_full(
            self.folder, version, tensors(), keep=self._keep, extras=extras, spare=spare, shard_bytes=self._shard_bytes
        )

    def _shm(
        self, version: int, tensors: Callable[[], Named], extras: Extras | None, spare: Iterable[str | Path]
    ) -> Published:
        if self._root is None:
            sweep()
            self._root = shm_root(self.folder)
            drop_drafts(self._root)
        own(self._root, self.folder.resolve())
        spare = list(spare)
        published = publish_full(
            self._root, version, tensors(), kind="shm", keep=self._keep, extras=extras, spare=spare,
            shard_bytes=self._shard_bytes,
        )  # fmt: skip
        link_version(self.folder, version, Path(published.location))
        drop_links(self.folder)
        drop_old(self.folder, self._keep, [*spare, version_folder(self.folder, version)], newest=version)
        return published

    def _delta(
        self, version: int, tensors: Callable[[], Named], extras: Extras | None, spare: Iterable[str | Path]
    ) -> Published:
        spare = list(spare)
        shadow = self._shadow
        if (
            shadow is not None
            and shadow.version < version
            and self._deltas < self._full_every - 1
            and self._holds(shadow)
        ):
            try:
                published = publish_delta(
                    self.folder, version, tensors(), shadow, keep=self._keep, extras=extras, spare=spare
                )
            except MismatchError:
                self._shadow = None  # the model's tensors changed; a full version says so
            else:
                full = open_version(published).manifest.full_bytes
                self._deltas += 1
                if published.bytes > self._worth * full:
                    self._shadow = None
                return published
        started = time.perf_counter()
        published = self._full(version, tensors, extras, spare)
        self._shadow, self._deltas = Shadow(version, published.digest, tensors()), 0
        return replace(published, seconds=time.perf_counter() - started)

    def _holds(self, shadow: Shadow) -> bool:
        """Whether the base is still at rest under the folder."""
        return version_folder(self.folder, shadow.version).is_dir()

    def close(self) -> Path | None:
        """End: what lies in shared memory goes to disk as `folder`/v<N> and the memory is given back. Where the
        version published last lies, if it was moved."""
        self._shadow = None
        root, self._root = self._root, None
        return None if root is None else settle(self.folder, root, self._last)
