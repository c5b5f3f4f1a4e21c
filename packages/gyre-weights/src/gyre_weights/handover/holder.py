"""Giving versions to other machines: what a version's folder holds, and what it rests on.

Invariants: every file that a peer may ask for is open before the first is offered, so a version that is dropped
meanwhile is given to its end or was refused at the beginning; a folder that is replaced is not mixed with its
successor; bytes are told only to who knows the token. Not here: comparing them with their digests (the taker does).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_weights.errors import IncompleteError, VersionError, WeightsError
from gyre_weights.folder import version_folder, versions_in
from gyre_weights.handover.listening import Listener
from gyre_weights.handover.wire import Channel, Endpoint
from gyre_weights.manifest import MANIFEST, Manifest, from_json

Where = Callable[[int], "str | Path | None"]
"""The folder of a version, None when it is not held."""


class Holder:
    """Gives the whole versions under `folder` to whoever knows the token, from `start` to `close`.

    `folder` may be set later, and to another one; None holds nothing. `v<N>` may be a link (into shared memory). With a
    delta goes what it rests on. Of a folder without a manifest nothing is given: its bytes could not be checked.
    """

    def __init__(
        self, folder: str | Path | None, *, host: str = "127.0.0.1", idle_s: float = 30.0, total_s: float = 600.0
    ) -> None:
        """`host`: the one address to listen on. `idle_s`: longest silence of a peer; `total_s`: longest fetch."""
        self.folder = folder
        self._lock = threading.Lock()
        self._given: dict[int, int] = {}
        self._listener = Listener(self._serve, "giving a policy version", host=host, idle_s=idle_s, total_s=total_s)

    def start(self) -> Endpoint:
        """Listen; where. PeerError when the host is no address of this machine."""
        return self._listener.start()

    def close(self) -> None:
        """Stop; fetches that are under way end with an error at their side."""
        self._listener.close()

    @property
    def given(self) -> dict[int, int]:
        """How often each version was asked for and began to go out."""
        with self._lock:
            return dict(self._given)

    def _serve(self, channel: Channel, first: Mapping[str, Any]) -> None:
        if first.get("do") != "fetch":
            channel.send({"refused": f"{first.get('do')!r}", "expected": "a fetch; gradients go to a Receiver"})
            return
        folder = self.folder
        newest = -1 if folder is None else max(versions_in(folder), default=-1)
        give_version(channel, int(first["version"]), self._where, newest, self._count)

    def _count(self, version: int) -> None:
        with self._lock:
            self._given[version] = self._given.get(version, 0) + 1

    def _where(self, version: int) -> Path | None:
        if self.folder is None:
            return None
        place = version_folder(self.folder, version)
        return place if place.is_dir() else None


@dataclass(frozen=True, slots=True)
class _Opened:
    """A version with every file open."""

    manifest: Manifest
    files: Mapping[str, int]
    """Descriptors by name."""


def give_version(
    channel: Channel,
    version: int,
    where: Where,
    newest: int = -1,
    begun: Callable[[int], None] = lambda version: None,
) -> None:
    """The holder's side of a fetch: tell what `version` is and rests on, then send the files of those the peer wants;
    `begun` is called with each. `newest` is the highest number held, -1 when that is not known. A refusal is told to
    the peer."""
    channel.doing = f"giving policy version {version}"
    with ExitStack() as stack:
        try:
            chain = _open_chain(channel.doing, version, where, stack)
        except (WeightsError, OSError) as error:
            channel.send({"refused": str(error), "expected": "a whole version"})
            return
        told = [
            {
                "version": opened.manifest.version, "digest": opened.manifest.digest,
                "files": [[name, os.fstat(handle).st_size] for name, handle in opened.files.items()],
            } for opened in chain
        ]  # fmt: skip
        channel.send({"chain": told, "newest": newest})
        wanted = [int(number) for number in channel.receive()["want"]]
        by_number = {opened.manifest.version: opened for opened in chain}
        for number in wanted:
            begun(number)
            for handle in by_number[number].files.values():
                channel.send_file(handle)


def _open_chain(doing: str, version: int, where: Where, stack: ExitStack) -> list[_Opened]:
    """The version first, then what it rests on, each after the other, the whole one last."""
    folder = where(version)
    if folder is None:
        raise IncompleteError(
            doing, got="a version not held here", expected="one that is", fix="It may be too old; take the newest one."
        )
    chain: list[_Opened] = []
    place, expected = Path(folder), (version, "")
    while True:
        opened = _open_files(doing, place, stack)
        found = (opened.manifest.version, opened.manifest.digest)
        if found[0] != expected[0] or expected[1] not in ("", found[1]):
            raise VersionError(doing, got=f"version {found[0]} ({found[1]}) at {place}", expected=f"{expected}")
        chain.append(opened)
        base = opened.manifest.base
        if base is None:
            return chain
        if base.version >= found[0]:
            raise VersionError(doing, got=f"a delta on version {base.version}", expected="one on an older version")
        place, expected = place.parent / base.location, (base.version, base.digest)


def _open_files(doing: str, place: Path, stack: ExitStack) -> _Opened:
    """By the folder's own descriptor: its name may come to be another folder's meanwhile."""
    try:
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, folder)
        files: dict[str, int] = {}
        for name in sorted(os.listdir(folder)):
            if name.startswith(".") or not stat.S_ISREG(os.stat(name, dir_fd=folder).st_mode):
                continue
            files[name] = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
            stack.callback(os.close, files[name])
        if MANIFEST not in files:
            raise IncompleteError(doing, got=f"no manifest in {place}", expected="a version published by gyre-weights")
        text = os.pread(files[MANIFEST], os.fstat(files[MANIFEST]).st_size, 0).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise IncompleteError(
            doing, got=f"{type(error).__name__}: {error}", expected=f"the files of {place}",
            fix="It may have been dropped just now; take the newest one.",
        ) from error  # fmt: skip
    manifest = from_json(text, doing)
    for name, size in manifest.files.items():
        found = os.fstat(files[name]).st_size if name in files else None
        if found != size:
            raise IncompleteError(
                doing, got=f"{name} of {found} bytes in {place}", expected=f"{size} bytes",
                fix="It was cut short or is being dropped; take the newest one.",
            )  # fmt: skip
    return _Opened(manifest, files)
