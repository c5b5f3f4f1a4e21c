"""A version from the nearest holder: this machine's folder, what it fetched before, or another machine.

Invariants: what was fetched has the digests its manifest tells, and what it rests on has its place before it, or it is
not there at all; the processes of one machine that want a version fetch it once, one after the other (a lock that dies
with its owner), and who is killed leaves nothing that stays. A number that came twice is not taken for what it was
before: the holder's digest decides, where it can be asked. Not here: the holder's side (`holder`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from gyre_weights.errors import (
    CorruptError,
    IncompleteError,
    PeerError,
    RefusedError,
    UnreachableError,
    VersionError,
    WeightsError,
)
from gyre_weights.folder import drop_drafts, drop_old, new_folder, version_folder
from gyre_weights.handover.store import locked, make_room, told_place
from gyre_weights.handover.wire import Channel, Endpoint, connect
from gyre_weights.manifest import read_manifest
from gyre_weights.version import Version, open_version

log = logging.getLogger("gyre.weights")

_PIECE = 4 << 20

Reach: TypeAlias = "Endpoint | str | Path | Callable[[], Endpoint | None] | None"
"""A holder's endpoint, its file, or what tells it when it is needed; None: there is none."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """One version of a holder's answer."""

    version: int
    digest: str
    files: tuple[tuple[str, int], ...]

    @property
    def nbytes(self) -> int:
        return sum(size for _, size in self.files)


def nearest(
    location: str | Path,
    version: int,
    endpoint: Reach,
    into: str | Path,
    *,
    digest: str | None = None,
    keep: int = 2,
    idle_s: float = 30.0,
    total_s: float = 600.0,
) -> Version:
    """The version at `location` if this machine has it whole, else `into`/v<version>, else fetched to there.

    With `digest` only that content is taken, and nobody is asked about what lies here. Without it a holder that can be
    reached says whether `into`/v<version> is what it has; if it has none, neither has this machine. `endpoint` is
    looked up when it is needed. Every file of what is returned is open: whoever drops it takes nothing away. Raises
    what `fetch_version` raises; IncompleteError or VersionError when it is not here and there is nobody to ask.
    """
    try:
        return _whole(Path(location), version, digest)
    except (IncompleteError, VersionError) as error:
        absent = error
    found = _fetched(into, version, digest)
    if found is not None and digest:
        return found
    if found is not None and _is_current(endpoint, found, idle_s, total_s):
        return found
    place = _look_up(endpoint)
    if place is None:
        raise type(absent)(
            f"taking policy version {version}",
            got=f"none on this machine ({absent})",
            expected="it, or a holder to ask",
        ) from absent
    return fetch_version(place, version, into, digest=digest, keep=keep, idle_s=idle_s, total_s=total_s)


def fetch_version(
    endpoint: Endpoint,
    version: int,
    into: str | Path,
    *,
    digest: str | None = None,
    keep: int | None = None,
    idle_s: float = 30.0,
    total_s: float = 600.0,
) -> Version:
    """Have `into`/v<version> be the version that the process at `endpoint` holds, with what it rests on, and open it.

    What lies there already with the same digest is not fetched again. With `keep` the newest so many stay, and what
    they rest on. PeerError when the holder has it not, dies or is silent, or another process of this machine is at it
    for `total_s`; CorruptError when other bytes came than were published; VersionError when its contents are not
    `digest`; NoRoomError. Of a version that could not be fetched nothing is left. `into` is for fetched versions alone.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"fetching policy version {version}: got keep = {keep}, expected at least 1")
    doing = f"fetching policy version {version} from {endpoint.host}:{endpoint.port}"
    target = version_folder(into, version)
    with told_place(doing, Path(into)), locked(Path(into), doing, total_s):
        drop_drafts(into)  # of a process that was killed here
        with closing(_ask(endpoint, version, doing, idle_s, total_s)) as channel:
            offers, newest = _answer(channel, version, digest)
            missing = [offer for offer in offers if not _lies(into, offer)]
            if missing:
                need, here = sum(offer.nbytes for offer in missing), [version_folder(into, o.version) for o in offers]
                make_room(Path(into), need, keep, here, newest, doing)
            channel.send({"want": [offer.version for offer in reversed(missing)]})
            for offer in reversed(missing):
                _receive(channel, offer, into)
        found = _whole(target, version, offers[0].digest)
        if keep is not None:
            drop_old(into, keep, [target], newest=newest)
        return found


def _whole(folder: Path, version: int, digest: str | None) -> Version:
    """Opened with every file of it and of all it rests on."""
    found = open_version(folder, version=version, digest=digest)
    found.hold()
    return found


def _fetched(into: str | Path, version: int, digest: str | None) -> Version | None:
    """What was fetched before, if it is whole and of these contents."""
    with suppress(WeightsError):
        return _whole(version_folder(into, version), version, digest)
    return None


def _look_up(endpoint: Reach) -> Endpoint | None:
    if endpoint is None or isinstance(endpoint, Endpoint):
        return endpoint
    return endpoint() if callable(endpoint) else Endpoint.load(Path(endpoint))


def _is_current(endpoint: Reach, found: Version, idle_s: float, total_s: float) -> bool:
    """Whether the holder has the same under this number. A holder that refuses has it not; where there is nobody to
    ask nothing is known, and what lies here is taken. PeerError when a holder is silent."""
    doing = f"asking whether policy version {found.version} is still the same"
    try:
        place = _look_up(endpoint)
        if place is None:
            return True
        with closing(_ask(place, found.version, doing, idle_s, total_s)) as channel:
            offers, _ = _answer(channel, found.version, None)
            channel.send({"want": []})
    except RefusedError:
        return False
    except UnreachableError as error:
        log.info("%s", error)
        return True
    return offers[0].digest == found.digest


def _ask(endpoint: Endpoint, version: int, doing: str, idle_s: float, total_s: float) -> Channel:
    return connect(endpoint, {"do": "fetch", "version": version}, doing, idle_s=idle_s, total_s=total_s)


def _answer(channel: Channel, version: int, digest: str | None) -> tuple[list[_Offer], int | None]:
    """What the holder has: the version, then what it rests on; and the highest number it holds, if it tells."""
    told = channel.receive()
    try:
        offers = [_offer(entry) for entry in told["chain"]]
        newest = int(told["newest"])
    except (KeyError, ValueError, TypeError) as error:
        raise PeerError(channel.doing, got=f"an answer without {error}", expected="what the holder has") from error
    numbers = [offer.version for offer in offers]
    if not numbers or numbers[0] != version or numbers != sorted(set(numbers), reverse=True):
        raise PeerError(channel.doing, got=f"an offer of versions {numbers}", expected=f"{version} and older ones")
    if digest and offers[0].digest != digest:
        raise VersionError(
            channel.doing, got=f"contents {offers[0].digest} at the holder", expected=f"contents {digest}",
            fix="The number was published anew; ask with the digest it has now.",
        )  # fmt: skip
    for offer in offers:
        for name, size in offer.files:
            if Path(name).name != name or name.startswith(".") or size < 0:
                raise PeerError(channel.doing, got=f"a file named {name!r}", expected="a plain file name")
    return offers, max(newest, version) if newest >= 0 else None


def _offer(entry: Any) -> _Offer:
    files = tuple((str(name), int(size)) for name, size in entry["files"])
    return _Offer(int(entry["version"]), str(entry["digest"]), files)


def _lies(into: str | Path, offer: _Offer) -> bool:
    """Whether this very version was fetched before, whole (what it rests on is looked at by itself)."""
    with suppress(WeightsError):
        open_version(version_folder(into, offer.version), version=offer.version, digest=offer.digest)
        return True
    return False


def _receive(channel: Channel, offer: _Offer, into: str | Path) -> None:
    """Put one version in its place, whole and verified; what it rests on is there."""
    with new_folder(version_folder(into, offer.version), durable=False) as draft:
        for name, size in offer.files:
            _receive_file(channel, draft / name, size)
        base = _checked(draft, offer, channel.doing)
        if base is not None:
            _whole(version_folder(into, base[0]), *base)


def _checked(draft: Path, offer: _Offer, doing: str) -> tuple[int, str] | None:
    """The version and digest that what has arrived rests on; an error when it is not what was offered."""
    manifest = read_manifest(draft)
    if manifest is None or not manifest.digest:
        raise CorruptError(doing, got="a folder without a manifest", expected="one with digests")
    open_version(draft, version=offer.version, digest=offer.digest).verify()
    base = manifest.base
    if base is None:
        return None
    if base.location != version_folder("", base.version).name:
        raise PeerError(doing, got=f"a base at {base.location!r}", expected=f"v{base.version}, beside it")
    return base.version, base.digest


def _receive_file(channel: Channel, path: Path, size: int) -> None:
    buffer = np.empty(min(size, _PIECE), np.uint8)
    with path.open("wb") as writer:
        while size:
            piece = buffer[: min(size, _PIECE)]
            channel.receive_into(piece)
            writer.write(piece.data)
            size -= piece.nbytes
